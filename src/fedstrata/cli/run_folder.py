"""The output folder of a run: checks before writing, and the configuration that --resume and --force read."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedstrata import __version__
from fedstrata.base.files import replacing
from fedstrata.cli.parsing import Mistake

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
PROFILES = "profile"


class Folder:
    """One run's folder. Nothing in it is touched before `begin`."""

    def __init__(self, path: str | os.PathLike[str], *, resume: bool, force: bool):
        self.path, self.resume = Path(path), resume
        if self.path.exists() and not self.path.is_dir():
            raise Mistake(f"--out {self.path}: this is a file; name a folder")
        self.saved = self._read_config()
        filled = self.path.is_dir() and any(self.path.iterdir())
        if filled and resume and self.saved is None:
            raise Mistake(f"--resume: {self.path} does not hold a run ({CONFIG} is missing); choose the folder of one")
        if filled and not resume and not force:
            raise Mistake(
                f"--out {self.path} is not empty; --resume continues the run in it, --force replaces that run, "
                "or name another folder"
            )
        self._check_writable()

    def _read_config(self) -> dict[str, Any] | None:
        try:
            content = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        ours = isinstance(content, dict) and "fedstrata" in content and isinstance(content.get("settings"), dict)
        return content if ours else None

    def _check_writable(self) -> None:
        """Test the nearest existing folder, so that a refused command leaves no files."""
        here = next(p for p in [self.path.absolute(), *self.path.absolute().parents] if p.exists())
        probe = here / f".fedstrata-{os.getpid()}"
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise Mistake(
                f"--out {self.path}: cannot write to {here} ({error.strerror}); name another folder"
            ) from None

    def begin(self, settings: Mapping[str, Any], files: Sequence[str]) -> None:
        """Check that a resumed run is the same run, clear what a forced one replaces, and write the configuration.

        Args:
            settings: everything that determines the result.
            files: the names of the files that the run writes.
        """
        if self.resume and self.saved is not None:
            from fedstrata.core.fingerprint import differences

            free = lambda s: {k: v for k, v in s.items() if k != "rounds"}  # a run may be extended
            if changed := differences(free(self.saved["settings"]), free(settings)):
                raise Mistake(
                    f"--resume: the run in {self.path} has other settings:\n  " + "\n  ".join(changed) + "\n"
                    "repeat them, or start a new run in another folder"
                )
        elif self.saved is not None:
            self._clear(self.saved)
        content = {"fedstrata": __version__, "jax": version("jax"), "settings": dict(settings), "files": list(files)}
        self.write(CONFIG, json.dumps(content, indent=2) + "\n")

    def _clear(self, saved: Mapping[str, Any]) -> None:
        """Remove the files of the earlier run, and no others."""
        for name in saved.get("files", []):
            if Path(name).name == name:
                (self.path / name).unlink(missing_ok=True)
        for folder in (CHECKPOINTS, PROFILES):
            shutil.rmtree(self.path / folder, ignore_errors=True)

    def checkpoint(self, label: str) -> Path:
        return self.path / CHECKPOINTS / label

    def profile(self, label: str) -> Path:
        return self.path / PROFILES / label

    def write(self, name: str, text: str) -> None:
        with replacing(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
