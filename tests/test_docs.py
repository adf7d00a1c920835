"""The documents are true: the README's code runs, the skeleton is a working algorithm, public names exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedstrata as fs
from references import least_squares

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/regularized.md", "docs/nested.md", "docs/bilevel.md", "docs/pairwise.md"]
)
def test_the_code_of_the_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    # In a process of its own: users have float32 and JAX's usual promotion (only compiling is as fast as in tests).
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True, cwd=tmp_path, env=_plain())


def _plain():
    import os

    return {**os.environ, "MPLBACKEND": "Agg"}


def test_the_skeleton_is_fedavg_without_momentum():
    spec = importlib.util.spec_from_file_location("skeleton", ROOT / "docs" / "skeleton.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task = least_squares()
    options = {"rounds": 5, "batch_size": 2, "params": np.zeros(3)}
    plain = fs.run(task.problem, fs.FedAvg(0.1, 3), task.federation, **options).solution()
    still = fs.run(task.problem, module.Skeleton(0.1, 3, momentum=0.0), task.federation, **options).solution()
    moving = fs.run(task.problem, module.Skeleton(0.1, 3), task.federation, **options).solution()
    np.testing.assert_allclose(plain, still, rtol=1e-12)
    assert np.linalg.norm(moving - plain) > 1e-3


@pytest.mark.parametrize("name", dir(fs))
def test_public_names_exist(name):
    assert getattr(fs, name) is not None


def test_unknown_names_raise_the_usual_error():
    with pytest.raises(AttributeError, match="module 'fedstrata' has no attribute 'FedAverage'"):
        _ = fs.FedAverage


def test_links_between_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
