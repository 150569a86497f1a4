"""Tenants: tokens at the front end's doors, and a real scheduler that keeps tenants apart."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from scheduler_svc.config import SettingsError
from scheduler_svc.frontend.callers import Caller, Callers, TokensError
from scheduler_svc.frontend.errors import RequestError
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from scheduler_svc.rpc.tenants import qualified
from scheduler_svc.tenant_limits import read_tenant_limits
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1.sampling_pb2 import SamplingParams
from tests.contract.frontend.harness import FrontEndUnderTest, complete, front_end, refusal, served, text_request, until
from tests.support.scheduler_process import RunningScheduler, running_scheduler
from tests.support.session_double import SessionDouble
from tests.support.worker_double import WorkerDouble

ACME, ACME_TOO, BYTEWORKS = "acme-token-0123456789", "acme-second-0123456789", "byteworks-0123456789"
SECRET = ClusterSecret("0123456789abcdef-secret")


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


def write(path: Path, *lines: str) -> Path:
    """As a person's editor does: a new file in place of the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines) + "\n")
    os.replace(fresh, path)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    hashed = hashlib.sha256(ACME_TOO.encode()).hexdigest()
    return write(
        tmp_path / "tokens", "# who may call", "", f"acme {ACME}", f"acme  sha256:{hashed}", f"byteworks\t{BYTEWORKS}"
    )


# --- the file ---------------------------------------------------------------------------------------------------------


def test_callers_are_known_by_their_tokens(tokens: Path) -> None:
    callers = Callers(tokens, SECRET)
    assert callers.caller(bearer(ACME)) == callers.caller(bearer(ACME_TOO)) == Caller("acme")
    assert callers.caller((("Authorization", f"bearer   {BYTEWORKS} "),)) == Caller("byteworks")
    assert callers.caller(SECRET.metadata) == Caller(is_operator=True)
    for wrong in (
        (),
        None,
        bearer("wrong-token-0123456789"),
        bearer(""),
        (("authorization", ACME),),
        bearer(ACME[:-1]),
    ):
        with pytest.raises(RequestError) as refused:
            callers.caller(wrong)
        assert refused.value.failure.reason == "UNAUTHENTICATED"
        assert ACME not in str(refused.value)
    # The hash that the file holds is no token.
    with pytest.raises(RequestError):
        callers.caller(bearer("sha256:" + hashlib.sha256(ACME_TOO.encode()).hexdigest()))
    assert Callers(None).caller(()) == Caller()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("acme", "line 2: write the name of a tenant and a token"),
        ("acme a b", "line 2"),
        ("acme short", "16 to 512"),
        ("ac/me 0123456789abcdef", "letters, digits"),
        ("* 0123456789abcdef", "letters, digits"),
        ("acme sha256:123", "64 hexadecimal"),
        (f"byteworks {ACME}", "another tenant"),
    ],
)
def test_a_wrong_line_is_named_and_no_token_shown(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "tokens", f"acme {ACME}", line)
    with pytest.raises(TokensError, match=words) as wrong:
        Callers(path)
    assert str(path) in str(wrong.value) and ACME not in str(wrong.value)
    with pytest.raises(TokensError, match="cannot be read"):
        Callers(tmp_path / "missing")


def test_tokens_come_and_go_while_the_front_end_runs(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    callers = Callers(tokens, clock=lambda: now[0])
    write(tokens, "fresh fresh-token-0123456789", f"byteworks {BYTEWORKS}")
    now[0] = 1.5
    assert callers.caller(bearer("fresh-token-0123456789")) == Caller("fresh")
    with pytest.raises(RequestError):
        callers.caller(bearer(ACME))
    # What cannot be used changes nothing, and is said once.
    write(tokens, "broken")
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            now[0] += 1.5
            assert callers.caller(bearer(BYTEWORKS)) == Caller("byteworks")
        tokens.unlink()
        now[0] += 1.5
        assert callers.caller(bearer(BYTEWORKS)) == Caller("byteworks")
    assert len(caplog.records) == 2
    write(tokens, f"acme {ACME}")
    now[0] += 1.5
    assert callers.caller(bearer(ACME)) == Caller("acme")


def test_ids_inside_a_deployment_are_never_the_same_for_two_tenants() -> None:
    given = [("", "a"), ("", "a/b"), ("a", "b"), ("", "/a"), ("a", "/b"), ("a", "b/c"), ("", "a/b/c"), ("", "//a")]
    assert len({qualified(*one) for one in given}) == len(given)


# --- the doors --------------------------------------------------------------------------------------------------------


async def test_calls_without_a_known_token_are_refused_at_both_doors(tokens: Path) -> None:
    double = SessionDouble(features=(3,))
    async with served(double, client_tokens_file=tokens, openai_listen="127.0.0.1:0") as under_test:
        stub = under_test.stub
        calls = {
            "Generate": (stub.Generate, text_request()),
            "Complete": (stub.Complete, complete(text_request())),
            "Abort": (stub.Abort, pb.AbortRequest(request_id="gen-1")),
            "GetModel": (stub.GetModel, pb.GetModelRequest()),
        }
        for method, request in calls.values():
            for metadata in (None, bearer("wrong-token-0123456789")):
                refused = await refusal(method(request, timeout=30, metadata=metadata))
                assert (refused.code, refused.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert (await stub.GetModel(pb.GetModelRequest(), metadata=bearer(ACME))).model.name == "bytes"
        for key in ("-", "wrong-token-0123456789"):
            async with client(under_test, key) as openai_client:
                with pytest.raises(openai.AuthenticationError) as wrong:
                    await openai_client.models.list()
                assert wrong.value.response.headers["www-authenticate"] == "Bearer"
                with pytest.raises(openai.AuthenticationError):
                    await openai_client.completions.create(model="bytes", prompt="x")
        async with client(under_test, ACME) as openai_client:
            assert [model.id for model in (await openai_client.models.list()).data] == ["bytes"]
        assert not double.live and under_test.process.front_end.num_streams == 0


def client(under_test: FrontEndUnderTest, token: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{under_test.process.openai_address}/v1", api_key=token, max_retries=0, timeout=60
    )


async def test_the_tenant_travels_with_the_request_and_nothing_a_client_sends_changes_it(tokens: Path) -> None:
    double = SessionDouble(features=(3,))
    seen = []

    def play(submit: Any) -> list[bytes]:
        seen.append(submit.tenant)
        return [b"x"]

    double.play = play
    async with served(double, client_tokens_file=tokens, openai_listen="127.0.0.1:0") as under_test:
        request = complete(text_request(cache_salt="byteworks", request_id="byteworks/1"))
        for metadata in (bearer(ACME), (*bearer(BYTEWORKS), ("tenant", "acme"), ("x-tenant", "acme")), SECRET.metadata):
            if metadata != SECRET.metadata:
                await under_test.stub.Complete(request, timeout=30, metadata=metadata)
        async with client(under_test, BYTEWORKS) as openai_client:
            await openai_client.completions.create(
                model="bytes", prompt=["x", "y"], extra_headers={"x-tenant-id": "acme"}, user="acme"
            )
    assert seen == ["acme", "byteworks", "byteworks", "byteworks"]


async def test_a_scheduler_that_does_not_keep_tenants_apart_is_not_used(tokens: Path) -> None:
    async with SessionDouble() as double, front_end(double, ready=False, client_tokens_file=tokens) as under_test:
        await until(lambda: len(double.hellos) >= 2)
        assert "keep tenants apart" in (under_test.process.front_end.not_ready_cause or "")


def test_a_file_that_cannot_be_used_ends_the_front_end_at_start(tmp_path: Path) -> None:
    from scheduler_svc.config import FrontendSettings
    from scheduler_svc.frontend.server import run

    with pytest.raises(SettingsError, match=r"client_tokens_file: .*missing cannot be read"):
        run(FrontendSettings(client_tokens_file=tmp_path / "missing"))


# --- with a real scheduler --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def deployment(tokens: Path, **settings: Any) -> AsyncIterator[tuple[RunningScheduler, FrontEndUnderTest]]:
    worker = WorkerDouble()
    await worker.start()
    try:
        async with running_scheduler(worker.address, **settings) as scheduler:
            await scheduler.ready()
            async with front_end(scheduler, client_tokens_file=tokens, secret=SECRET) as under_test:  # type: ignore[arg-type]
                yield scheduler, under_test
            await scheduler.all_free()
    finally:
        await worker.stop()


def request(request_id: str = "", max_tokens: int = 4, prompt: int = 40, **fields: Any) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[index % 200 for index in range(prompt)])
    return pb.GenerateRequest(
        request_id=request_id, token_ids=ids, sampling=SamplingParams(max_tokens=max_tokens), **fields
    )


async def test_f75_cached_prefixes_are_shared_within_a_tenant_only(tokens: Path) -> None:
    async with deployment(tokens) as (_, under_test):
        hits = []
        for token, salt in ((ACME, ""), (ACME_TOO, ""), (BYTEWORKS, ""), (BYTEWORKS, "acme"), (BYTEWORKS, "")):
            call = under_test.stub.Complete(complete(request(cache_salt=salt)), timeout=30, metadata=bearer(token))
            hits.append((await call).usage.num_cached_tokens > 0)
        assert hits == [False, True, False, False, True]


async def test_ids_are_unique_within_a_tenant_and_aborts_stay_within_it(tokens: Path) -> None:
    async with deployment(tokens) as (scheduler, under_test):
        stub = under_test.stub
        long = request("the same", max_tokens=2000)
        mine = stub.Generate(long, timeout=60, metadata=bearer(ACME))
        theirs = stub.Generate(long, timeout=60, metadata=bearer(BYTEWORKS))
        for call in (mine, theirs):
            assert (await call.read()).HasField("accepted")
        refused = await refusal(stub.Generate(long, timeout=60, metadata=bearer(ACME_TOO)))
        assert refused.reason == "DUPLICATE_REQUEST_ID"
        await stub.Abort(pb.AbortRequest(request_id="the same"), metadata=bearer(ACME_TOO))
        assert (await refusal(mine)).reason == "ABORTED"
        assert set(scheduler.core.state.requests) == {"byteworks/the same"}
        # Not live as far as the other tenant can see, by whatever name.
        for name in ("the same", "byteworks/the same", "/byteworks/the same"):
            gone = await refusal(stub.Abort(pb.AbortRequest(request_id=name), metadata=bearer(ACME)))
            assert gone.reason == "REQUEST_NOT_FOUND"
        await stub.Abort(pb.AbortRequest(request_id="byteworks/the same"), metadata=SECRET.metadata)
        assert (await refusal(theirs)).reason == "ABORTED"
        await until(lambda: not scheduler.core.state.requests)


async def test_limits_of_a_tenant_hold_for_it_alone(tokens: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text('[acme]\nmax_running = 1\nmax_queued = 1\n["*"]\ntokens_per_minute = 100\n')
    async with deployment(tokens, tenant_limits_file=limits) as (scheduler, under_test):
        stub = under_test.stub

        def call(token: str, **given: Any) -> Any:
            return stub.Generate(request(max_tokens=1000, **given), timeout=60, metadata=bearer(token))

        running, waiting = call(ACME), call(ACME)
        assert (await running.read()).HasField("accepted")
        assert (await running.read()).HasField("delta")
        assert (await waiting.read()).HasField("accepted")
        refused = await refusal(call(ACME))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "TENANT_LIMIT")
        assert refused.metadata == {"tenant": "acme", "limit": "max_queued", "value": "1"}
        assert refused.retry_after_s is not None
        too_large = await refusal(call(BYTEWORKS))
        assert too_large.reason == "TENANT_LIMIT" and too_large.retry_after_s is None
        fits = stub.Complete(complete(request(max_tokens=4)), timeout=30, metadata=bearer(BYTEWORKS))
        assert len((await fits).token_ids) == 4
        assert sum(len(rank.running) for rank in scheduler.core.state.ranks.values()) == 1
        running.cancel()
        assert (await waiting.read()).HasField("delta")
        waiting.cancel()


async def test_two_front_ends_share_the_limits_and_the_ids_of_a_tenant(tokens: Path) -> None:
    async with (
        deployment(tokens) as (scheduler, one),
        front_end(scheduler, client_tokens_file=tokens) as two,  # type: ignore[arg-type]
    ):
        mine = one.stub.Generate(request("x", max_tokens=2000), timeout=60, metadata=bearer(ACME))
        assert (await mine.read()).HasField("accepted")
        refused = await refusal(two.stub.Generate(request("x"), timeout=60, metadata=bearer(ACME)))
        assert refused.reason == "DUPLICATE_REQUEST_ID"
        theirs = two.stub.Complete(complete(request("x")), timeout=60, metadata=bearer(BYTEWORKS))
        assert len((await theirs).token_ids) == 4
        mine.cancel()


# --- the limits' file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[acme]\nmax_run = 3", "max_run is unknown; a tenant has max_queued"),
        ("acme = 3", "acme is unknown"),
        ("[acme]\nmax_running = 0", "at least 1"),
        ('[acme]\nmax_running = "3"', "whole number"),
        ("[acme]\nmax_running = true", "whole number"),
        ('["a b"]\nmax_running = 3', "letters, digits"),
        ("[acme", "not a TOML file"),
    ],
)
def test_a_wrong_file_of_limits_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match="tenant_limits_file") as wrong:
        read_tenant_limits(path)
    assert words in str(wrong.value) and str(path) in str(wrong.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_tenant_limits(tmp_path / "missing.toml")
    assert read_tenant_limits(None) == ()
