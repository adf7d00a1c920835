"""Contenders in separate environments, created once from published packages, and run as child processes.

A contender is a script of `contenders/` that answers each line of JSON with one (`contenders/child.py`). All contenders
stay alive during a benchmark, so that warm programs can be interleaved. While one works, the others wait for input. If
a package cannot be installed, the page states the reason.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness  # noqa: F401  lets children share a GPU
from fedstrata.base.files import cache_folder

SCRIPTS = Path(__file__).parent / "contenders"
CORES = os.cpu_count() or 1

# Arguments of pip for each environment, one list per call. fedjax 0.0.17 runs with today's JAX except `jax.tree_map`.
PACKAGES: dict[str, list[list[str]]] = {
    "torch": [["torch==2.13.0", "numpy==2.4.6"]],
    "pfl": [["pfl[pytorch]==0.6.0", "torch==2.13.0", "numpy==2.4.6"]],
    "flwr": [["flwr[simulation]==1.41.0", "torch==2.13.0", "numpy==2.4.6"]],
    "fedjax": [["fedjax==0.0.17", "jax==0.10.2", "numpy==2.4.6"]],
    # Without its dependencies, some of which are old and large. Its losses need these few.
    "libauc": [
        ["torch==2.13.0", "numpy==2.4.6", "tqdm", "scipy", "scikit-learn"],
        ["--no-deps", "libauc==2.0.1"],
    ],
}


class Unavailable(Exception):
    """A contender is not available, with the reason."""


def python_of(name: str) -> str:
    """The interpreter of a contender's environment, created at the first call; raises `Unavailable`."""
    wanted = hashlib.sha256(json.dumps(PACKAGES[name]).encode()).hexdigest()[:12]
    folder = cache_folder() / "benchmarks" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / f"ready-{wanted}"
    if ready.exists():
        return str(python)
    print(f"installing {name}", file=sys.stderr, flush=True)
    venv.create(folder, clear=True, with_pip=True)
    for packages in PACKAGES[name]:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Unavailable(f"not installable here: {_reason(done.stderr)}")
    ready.touch()
    return str(python)


class Child:
    """A running contender: `call("run", rounds=3)` calls `run(rounds=3)` of its object and returns the result."""

    def __init__(self, script: str, job: dict[str, Any], python: str = sys.executable):
        self.name = script
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "CORES": str(CORES)}
        self._process = subprocess.Popen(
            [python, str(SCRIPTS / f"{script}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.about: dict[str, Any] = self._ask(job)

    def call(self, method: str, **arguments: Any) -> Any:
        return self._ask({"call": method, "arguments": arguments})

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait(60)
            self._log.seek(0)
            text = self._log.read()
            print(text, file=sys.stderr)
            raise Unavailable(f"does not run here: {_reason(text)}")
        return json.loads(answer)


def begin(
    wanted: dict[str, tuple[str, str | None, dict[str, Any]]], here: bool = False, only: Sequence[str] = ()
) -> tuple[dict[str, Child], dict[str, str]]:
    """Children by title, and the reasons for those that are not available.

    wanted: for each title its script, its environment (None: this interpreter) and its job. here: use this interpreter
    for all. only: words, one of which must occur in a script's name.
    """
    found, lacking = {}, {}
    for title, (script, environment, job) in wanted.items():
        if only and not any(word in script for word in only):
            continue
        try:
            python = sys.executable if here or environment is None else python_of(environment)
            found[title] = Child(script, job, python)
        except Unavailable as error:
            lacking[title] = str(error)
            print(f"{title}: {error}", file=sys.stderr)
    return found, lacking


def notes(children: dict[str, Child], lacking: dict[str, str]) -> str:
    """A list for the page: versions of each contender, or why it is missing."""
    lines = [f"- {title}: {child.about['note']}" for title, child in children.items()]
    lines += [f"- {title}: {reason}" for title, reason in lacking.items()]
    return "\n".join(lines)


def _reason(text: str) -> str:
    """The last line with an error, without addresses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return re.sub(r"\S*(://|/)\S*", "…", (errors or lines or ["no message"])[-1])[:200]
