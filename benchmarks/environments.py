"""Contenders in environments of their own: made once from published packages, then asked things as child processes.

A contender is a script of `contenders/` that answers one JSON line for each it is sent (`contenders/child.py`). All of
them stay alive through a benchmark, so that they can be interleaved with warm programs; while one works, the others
wait for their next line. What cannot be installed is kept as a reason, for the page to print.
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

import harness  # noqa: F401  how children share a GPU
from fedstrata.base.files import cache_folder

SCRIPTS = Path(__file__).parent / "contenders"
CORES = os.cpu_count() or 1

# What pip is given for each environment, one list a call. fedjax 0.0.17 runs with today's JAX but for `jax.tree_map`.
PACKAGES: dict[str, list[list[str]]] = {
    "torch": [["torch==2.13.0", "numpy==2.4.6"]],
    "pfl": [["pfl[pytorch]==0.6.0", "torch==2.13.0", "numpy==2.4.6"]],
    "flwr": [["flwr[simulation]==1.41.0", "torch==2.13.0", "numpy==2.4.6"]],
    "fedjax": [["fedjax==0.0.17", "jax==0.10.2", "numpy==2.4.6"]],
    # Its dependencies would bring old and large packages; its losses need these few of them.
    "libauc": [
        ["torch==2.13.0", "numpy==2.4.6", "tqdm", "scipy", "scikit-learn"],
        ["--no-deps", "libauc==2.0.1"],
    ],
}


class Unavailable(Exception):
    """Why a contender cannot be had."""


def python_of(name: str) -> str:
    """The interpreter of a contender's environment, which is made at the first call; raises `Unavailable`."""
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
    """A contender at work: `call("run", rounds=3)` asks its object for `run(rounds=3)` and waits for the answer."""

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
    """Children by title and, for those that cannot be had, the reason.

    wanted: for each title its script, its environment (None: this interpreter) and its job. here: make no environment
    and try this interpreter for all. only: words, one of which a script's name must hold.
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
    """What runs with what, and what does not run at all, for a page."""
    lines = [f"- {title}: {child.about['note']}" for title, child in children.items()]
    lines += [f"- {title}: {reason}" for title, reason in lacking.items()]
    return "\n".join(lines)


def _reason(text: str) -> str:
    """The last line that says what went wrong, without addresses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return re.sub(r"\S*(://|/)\S*", "…", (errors or lines or ["no message"])[-1])[:200]
