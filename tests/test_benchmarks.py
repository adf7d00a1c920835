"""What benchmarks start: programs that share a machine."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

ANSWERS = f"""
import json, os, sys
for line in sys.stdin:
    print(json.dumps({{"preallocates": os.environ.get("{PREALLOCATE}")}}), flush=True)
"""


def test_a_child_leaves_a_gpu_to_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv(PREALLOCATE, "")  # so that it is put back afterwards
    monkeypatch.delenv(PREALLOCATE)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.reload(importlib.import_module("harness"))
    environments = importlib.import_module("environments")
    monkeypatch.setattr(environments, "SCRIPTS", tmp_path)
    (tmp_path / "by_echo.py").write_text(ANSWERS)
    child = environments.Child("by_echo", {})
    child.close()
    assert child.about == {"preallocates": "false"}


@pytest.mark.parametrize("script", sorted(p.name for p in BENCHMARKS.glob("*.py") if p.name != "run_all.py"))
def test_every_benchmark_has_that_setting(script):
    """`run_all.py` only starts the others, one after the other."""
    assert script == "harness.py" or "import harness" in (BENCHMARKS / script).read_text()
