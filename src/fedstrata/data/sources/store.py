"""Data files: found in a shared folder, in the user's cache or at the official address, and verified by checksum."""

import bz2
import functools
import gzip
import hashlib
import lzma
import os
import shutil
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from fedstrata.base.errors import unknown
from fedstrata.base.files import cache_folder

TIMEOUT = 20.0  # seconds without a response
OPENERS = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}


class File(NamedTuple):
    """One accepted form of a data file.

    Args:
        source: the data set.
        name: of the file.
        sha256: its checksum.
        url: its official address, if there is one.
    """

    source: str
    name: str
    sha256: str
    url: str | None


class Status(NamedTuple):
    """The state of one local file.

    Args:
        source: the data set.
        file: the name of the file.
        where: its path, or "missing".
        size: bytes found, or expected if it is missing.
        checksum: "ok", "bad" or "unchecked".
    """

    source: str
    file: str
    where: str
    size: int
    checksum: str


@functools.cache
def _table() -> dict[str, dict[str, dict]]:
    return tomllib.loads(files("fedstrata.data.sources").joinpath("files.toml").read_text(encoding="utf-8"))


def _forms(source: str, name: str) -> list[File]:
    """A file and, where it exists, its official form without compression."""
    if source not in _table():
        raise unknown("data source with files", source, _table())
    if name not in _table()[source]:
        raise unknown(f"file of {source}", name, _table()[source])
    entry = _table()[source][name]
    forms = [File(source, name, entry["sha256"], entry.get("url"))]
    if "unpacked" in entry:
        forms.append(File(source, name.rpartition(".")[0], entry["unpacked"]["sha256"], entry["unpacked"]["url"]))
    return forms


def shared() -> Path | None:
    """The folder named by FEDSTRATA_DATA, if any."""
    folder = os.environ.get("FEDSTRATA_DATA")
    return Path(folder).expanduser() if folder else None


def cache() -> Path:
    """The folder that downloads go to: data in the library's cache folder."""
    return cache_folder() / "data"


def _found(forms: list[File]) -> tuple[Path, File] | None:
    for folder in (shared(), cache()):
        for form in forms:
            if folder is not None and (path := folder / form.source / form.name).is_file():
                return path, form
    return None


_digests: dict[tuple[str, int, int], str] = {}  # a file is hashed once per process, again if it changes


def _stamp(path: Path) -> tuple[str, int, int]:
    facts = path.stat()
    return str(path.resolve()), facts.st_size, facts.st_mtime_ns


def _digest(path: Path) -> str:
    stamp = _stamp(path)
    if stamp not in _digests:
        with path.open("rb") as stream:
            _digests[stamp] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digests[stamp]


def _verify(path: Path, form: File, remedy: str) -> None:
    if (actual := _digest(path)) != form.sha256:
        raise ValueError(
            f"{form.source}/{form.name}: {path} is not the expected file.\n"
            f"  expected sha256 {form.sha256}\n  actual   sha256 {actual}\n{remedy}"
        )


def _download(form: File, url: str) -> Path:
    """Download into the cache: to a temporary file first, renamed once its checksum is correct."""
    target = cache() / form.source / form.name
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out, urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            shutil.copyfileobj(answer, out)
        _verify(Path(temporary), form, f"The download from {url} was discarded; get the file by hand.")
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def find(source: str, name: str) -> Path:
    """The path of a verified data file; it is downloaded if it is missing and has an official address.

    Args:
        source: the data set.
        name: of the file.
    """
    forms = _forms(source, name)
    if hit := _found(forms):
        _verify(*hit, remedy="Delete it (the file is then searched again), or replace it by an intact copy.")
        return hit[0]
    set_ = shared()
    tried = [
        f"{set_ / source}" if set_ else "$FEDSTRATA_DATA (not set)",
        f"{cache() / source} (the cache; FEDSTRATA_CACHE moves it)",
    ]
    for form in forms:
        if form.url is not None:
            try:
                return _download(form, form.url)
            except (OSError, HTTPException) as problem:
                tried.append(f"{form.url} (failed: {problem})")
    if not any(form.url for form in forms):
        tried.append("no download: this is a repackaged file without an official address")
    raise FileNotFoundError(
        f"{source}/{name} was not found. Looked at:\n"
        + "".join(f"  - {place}\n" for place in tried)
        + f"Without a network: copy the file (sha256 {forms[0].sha256}) into a folder {source}/ and set FEDSTRATA_DATA "
        "to the folder that holds it, or put it into the cache."
    )


def read(source: str, name: str) -> bytes:
    """The contents of a data file, decompressed (.npz is left compressed).

    Args:
        source: the data set.
        name: of the file.
    """
    path = find(source, name)
    return OPENERS.get(path.suffix, bytes)(path.read_bytes())


def _names(source: str | None) -> Iterator[tuple[str, str]]:
    if source is not None and source not in _table():
        raise unknown("data source with files", source, _table())
    return ((s, name) for s in ([source] if source else _table()) for name in _table()[s])


def status(source: str | None = None, *, verify: bool = False) -> list[Status]:
    """The status of every file.

    Args:
        source: the data set; None: all.
        verify: whether to compute checksums; else only those computed in this process are compared.
    """
    rows = []
    for owner, name in _names(source):
        hit = _found(_forms(owner, name))
        if hit is None:
            rows.append(Status(owner, name, "missing", _table()[owner][name]["bytes"], "unchecked"))
            continue
        path, form = hit
        known = _digest(path) if verify else _digests.get(_stamp(path))
        verdict = "unchecked" if known is None else "ok" if known == form.sha256 else "bad"
        rows.append(Status(owner, form.name, str(path), path.stat().st_size, verdict))
    return rows


def check(source: str | None = None) -> list[Status]:
    """The status of every file, with checksums computed."""
    return status(source, verify=True)


def fetch(source: str) -> list[Status]:
    """Download the missing files of a data set and verify all of them.

    Args:
        source: the data set.
    """
    for owner, name in _names(source):
        find(owner, name)
    return check(source)
