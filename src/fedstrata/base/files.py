"""Atomic writes of files, and the cache folder."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """The folder of files that can be made again: `$FEDSTRATA_CACHE`, or fedstrata in the platform's cache folder."""
    if folder := os.environ.get("FEDSTRATA_CACHE"):
        return Path(folder).expanduser()
    root = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fedstrata"


@contextmanager
def replacing(path: str | Path, private: bool = False) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it once the block has succeeded.

    Readers find the old file or the new one, never a part of it. A crash in the block leaves the old file.

    Args:
        path: the file to write; its folder is created.
        private: whether only its owner can read it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if not private:
            mask = os.umask(0o077)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)  # mkstemp's 0600 would hide the result from colleagues
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Bring a folder's names to the disk, so that a power failure does not bring an old file back."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse it
        pass
    finally:
        os.close(handle)
