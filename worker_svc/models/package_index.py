"""Finding and downloading one file of a Python package index the way pip would, resumably.

Understands the simple API (JSON and HTML), over http(s) or file, and directories of files (find-links). Settings are
pip's.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from worker_svc.models.progress import Advance, Report

_DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_TIMEOUT_S = 30.0
_ATTEMPTS = 4
_CHUNK = 1 << 18
_MAX_PAGE_BYTES = 64 << 20


class FetchFailed(RuntimeError):
    """The file cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file of an index. sha256 is None when the index does not state it."""

    url: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class PackageIndexes:
    """Where to look: index pages, plain directories or pages of links, and how to get there."""

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    cafile: str | None = None
    proxy: str | None = None

    @classmethod
    def from_pip(cls) -> PackageIndexes:
        """As pip is configured here: environment first, then its configuration files."""
        settings = _pip_settings()
        indexes = [settings.get("index-url", _DEFAULT_INDEX), *settings.get("extra-index-url", "").split()]
        if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            indexes = []
        return cls(
            index_urls=tuple(indexes),
            find_links=tuple(settings.get("find-links", "").split()),
            cafile=_cafile(settings),
            proxy=settings.get("proxy"),
        )

    def find(self, distribution: str, file_name: str) -> Candidate:
        """The first place that has the file. Raises FetchFailed, naming every place asked and what it said."""
        said: list[str] = []
        project = re.sub(r"[-_.]+", "-", distribution).lower()
        pages = list(self.find_links) + [f"{url.rstrip('/')}/{project}/" for url in self.index_urls]
        for page in pages:
            try:
                for candidate in self._links(page):
                    if unquote(urlsplit(candidate.url).path).rpartition("/")[2] == file_name:
                        return candidate
                said.append(f"{_shown(page)} does not have {file_name}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                said.append(f"{_shown(page)} cannot be read: {_reason(error)}")
        raise FetchFailed("; ".join(said) or "pip is configured with no-index and without find-links")

    def _links(self, page: str) -> list[Candidate]:
        path = _local_path(page)
        if path is not None and path.is_dir():
            if not (path / "index.html").exists():
                return [Candidate(entry.as_uri(), None) for entry in sorted(path.iterdir()) if entry.is_file()]
            page = (path / "index.html").as_uri()
        with self._open(page if path is None or "://" in page else path.as_uri(), {"Accept": _ACCEPT}) as response:
            base, body = response.geturl(), response.read(_MAX_PAGE_BYTES)
        return _parse_page(body.decode("utf-8"), base)

    def download(self, candidate: Candidate, target: Path, report: Report) -> Path:
        """The file at `target`, resumed from `target`.part when a part is there; it appears complete and checked.

        Raises FetchFailed when the connection keeps failing or the content is not what the index promises.
        """
        part = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        for fresh_start in (False, True):
            if fresh_start:
                part.unlink(missing_ok=True)  # the part on disk was of something else
            self._fill(candidate, part, report)
            if candidate.sha256 is None or _file_sha256(part) == candidate.sha256:
                part.replace(target)
                return target
        found = _file_sha256(part)
        part.unlink()
        raise FetchFailed(f"{_shown(candidate.url)} has sha256 {found}, its index says {candidate.sha256}")

    def _fill(self, candidate: Candidate, part: Path, report: Report) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self._resume(candidate, part, report)
                return
            except (OSError, http.client.HTTPException) as error:
                if (isinstance(error, urllib.error.HTTPError) and error.code < 500) or attempt == _ATTEMPTS - 1:
                    raise FetchFailed(f"{_shown(candidate.url)} cannot be downloaded: {_reason(error)}") from error
                report.say(f"{_reason(error)}; going on where it stopped")
                time.sleep(2.0**attempt / 2)

    def _resume(self, candidate: Candidate, part: Path, report: Report) -> None:
        have = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            response = self._open(candidate.url, headers)
        except urllib.error.HTTPError as error:
            if (
                error.code == 416 and have
            ):  # nothing beyond what is here: complete, or not the same file; the digest tells
                return
            raise
        with response:
            resumed = have > 0 and response.status == 206
            have = have if resumed else 0
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            title = unquote(urlsplit(candidate.url).path).rpartition("/")[2]
            with part.open("ab" if resumed else "wb") as out, report.download(title, total) as advance:
                _copy(response, out, have, advance)
        if total is not None and part.stat().st_size < total:
            raise ConnectionError(f"the connection ended after {part.stat().st_size} of {total} bytes")

    def _open(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        sent = dict(headers) | {"User-Agent": "stepfence"}
        if parts.username is not None:  # urllib does not take credentials out of a URL
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
            url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        context = ssl.create_default_context(cafile=self.cafile)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        if self.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": self.proxy, "https": self.proxy}))
        opener = urllib.request.build_opener(*handlers)
        response: http.client.HTTPResponse = opener.open(urllib.request.Request(url, headers=sent), timeout=_TIMEOUT_S)
        return response


def _copy(response: IO[bytes], out: IO[bytes], have: int, advance: Advance) -> None:
    while piece := response.read(_CHUNK):
        out.write(piece)
        have += len(piece)
        advance(have)


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def _parse_page(body: str, base: str) -> list[Candidate]:
    # By content: some mirrors send JSON as text/html.
    if body.lstrip().startswith("{"):
        files = json.loads(body).get("files", [])
        return [Candidate(urljoin(base, f["url"]), f.get("hashes", {}).get("sha256")) for f in files]
    anchors = _Anchors()
    anchors.feed(body)
    candidates = []
    for href in anchors.hrefs:
        url, fragment = urldefrag(urljoin(base, href))
        name, _, digest = fragment.partition("=")
        candidates.append(Candidate(url, digest if name == "sha256" else None))
    return candidates


def _local_path(page: str) -> Path | None:
    """A path, when the page is a file URL or no URL at all."""
    parts = urlsplit(page)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in ("http", "https") else Path(os.path.expanduser(page))


def _shown(url: str) -> str:
    """Without credentials."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error) or type(error).__name__


def _file_sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _cafile(settings: Mapping[str, str]) -> str | None:
    """Certificates as pip and requests find them; None leaves it to OpenSSL (which reads SSL_CERT_FILE itself)."""
    for value in (settings.get("cert"), os.environ.get("REQUESTS_CA_BUNDLE"), os.environ.get("CURL_CA_BUNDLE")):
        if value and Path(value).is_file():
            return value
    return None


def _pip_settings() -> dict[str, str]:
    """pip's options by name. PIP_* variables win over configuration files, a command's section over [global]."""
    found: dict[str, str] = {}
    for section in ("global", "install", "download"):
        found |= {name: value for where, name, value in _pip_configuration() if where == section}
    for variable, value in os.environ.items():
        if variable.startswith("PIP_") and value:
            found[variable.removeprefix("PIP_").lower().replace("_", "-")] = value
    return found


@functools.cache
def _pip_configuration() -> tuple[tuple[str, str, str], ...]:
    """(section, option, value) of pip's configuration files, as pip itself reads them; empty where there is no pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    if not _has_pip():
        alone = shutil.which("pip")
        if alone is None:
            return ()
        command = [alone, "config", "list"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(_listed_settings(listing))


def _has_pip() -> bool:
    import importlib.util

    return importlib.util.find_spec("pip") is not None


def _listed_settings(listing: str) -> Iterator[tuple[str, str, str]]:
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if separator and section and not section.startswith(":env"):
            try:
                yield section, option, str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                continue
