"""Small models of the families through the split, as processes, against transformers token for token: cache hits, and a
pool that is too small for what runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stepfence.v1 import generation_service_pb2 as pb
from tests.e2e.client import Stream, connect, generate, sampling
from tests.support.oracle import greedy_entry
from tests.support.processes import Deployment
from tests.unit.model.families import FAMILIES, tiny
from tests.unit.model.test_families import ROPES, assert_ids_equal, rope_changes

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

_LENGTH = 128
_BLOCK_SIZE = 8
# Six requests of up to 190 tokens need about 130 blocks at once.
_NUM_BLOCKS = 65
_SHARED = [(i * i * 7 + 13 * i) % 290 + 3 for i in range(42)]
_PROMPTS = [_SHARED + [3 + 11 * number % 290, *range(20 + number, 20 + 4 * number)] for number in range(6)]
_CHUNK = "24"  # tokens of a step: prompts come in chunks, beside decodes

# Which model shows which feature of a family, at the positions that rope scaling changes.
_ROPE_OF = {"Llama": "llama3", "Qwen2": "yarn", "Phi3": "longrope, long", "Gemma3Text": "linear"}


def _request(prompt: list[int], length: int = _LENGTH) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(token_ids=ids, sampling=sampling(max_tokens=length, ignore_eos=True))


async def _at_once(deployment: Deployment, prompts: list[list[int]]) -> list[Stream]:
    async with connect(deployment.frontend_address) as stub:
        return await asyncio.gather(*(generate(stub, _request(prompt), deadline_s=200) for prompt in prompts))


async def _check(folder: Path, family: str) -> None:
    changes = rope_changes(family, _ROPE_OF.get(family, "default"), {})
    assert changes is not None
    max_len = ROPES[_ROPE_OF.get(family, "default")].max_len
    lengths = {"max_position_embeddings": 256}
    if family == "Phi3":
        max_len, lengths = 256, {"max_position_embeddings": 256, "original_max_position_embeddings": 40}
    model = tiny(family, **(changes | lengths))
    model.save_pretrained(folder / "model")
    entries = [greedy_entry(model, prompt, _LENGTH) for prompt in _PROMPTS]
    with Deployment(folder) as deployment:
        settings = {} if max_len is None else {"max_model_len": str(max_len)}
        deployment.start_worker(
            0,
            runner="model",
            model=str(folder / "model"),
            dtype="float32",
            threads="1",
            num_blocks=str(_NUM_BLOCKS),
            **settings,
        )
        deployment.start_scheduler(block_size=str(_BLOCK_SIZE), max_num_batched_tokens=_CHUNK)
        deployment.start_frontend()
        deployment.wait_ready()
        (alone,) = await _at_once(deployment, _PROMPTS[:1])
        streams = [alone, *await _at_once(deployment, _PROMPTS[1:]), *await _at_once(deployment, _PROMPTS[:1])]
        deployment.wait_idle()
    assert sum(stream.usage.num_preemptions for stream in streams) > 0
    assert all(stream.usage.num_cached_tokens >= len(_SHARED) // _BLOCK_SIZE * _BLOCK_SIZE for stream in streams[1:])
    reach = 0
    for stream, entry in zip(streams, [*entries, entries[0]], strict=True):
        assert len(stream.token_ids) == _LENGTH
        reach += assert_ids_equal(stream.token_ids, entry)
    assert reach > 0.8 * _LENGTH * len(streams), "near ties ended the comparison early"


@pytest.mark.parametrize("family", ["Gemma2", "Qwen3Moe"])
async def test_greedy_ids_equal_transformers_through_the_split(tmp_path: Path, family: str) -> None:
    await _check(tmp_path, family)


@pytest.mark.long
@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in ("Gemma2", "Qwen3Moe")])
async def test_greedy_ids_of_every_family_through_the_split(tmp_path: Path, family: str) -> None:
    await _check(tmp_path, family)
