"""What a disk, or somebody with access to it, may do to a file."""

import os
import shutil

import numpy as np


def flipped(data, at=0.5):
    """One bit of one byte has changed; `at` is its place, from 0 to 1."""
    place = min(int(at * len(data)), len(data) - 1)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


CONTENTS = {
    "cut off": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "random bytes": lambda data: np.random.default_rng(1).bytes(len(data)),
    "twice": lambda data: data + data,
    "flipped at the start": lambda data: flipped(data, 0.0),
    "flipped in the middle": lambda data: flipped(data, 0.5),
    "flipped at the end": lambda data: flipped(data, 1.0),
    "other JSON": lambda data: b'{"a": [1, 2]}',
    "a list": lambda data: b"[[[]]]",
    "deep": lambda data: b"[" * 100_000,
}
PLACES = ("deleted", "a folder", "a link", "a link to nothing")
DAMAGES = (*CONTENTS, *PLACES)
PIPE = "a pipe"  # whoever reads it may wait forever


def damage(path, how):
    """Damage a file; returns a function that restores it."""
    before = path.read_bytes()
    path.unlink()
    if how in CONTENTS:
        path.write_bytes(CONTENTS[how](before))
    elif how == "a folder":
        path.mkdir()
        (path / "inside").write_bytes(before)
    elif how == PIPE:
        os.mkfifo(path)
    elif how.startswith("a link"):
        elsewhere = path.parent / "elsewhere"
        if how == "a link":
            elsewhere.write_bytes(before)
        path.symlink_to(elsewhere)

    def restore():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(before)
        path.chmod(0o600)

    return restore
