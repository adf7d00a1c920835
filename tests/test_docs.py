"""The documents are true: the README's code runs, the skeleton is a working algorithm, public names exist."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from references import least_squares

import fedstrata as fs
from fedstrata.cli.explanation import hyperparameters

ROOT = Path(__file__).parents[1]


PAGES = (
    "README.md",
    *(f"docs/guides/{name}.md" for name in ("regularized", "nested", "bilevel", "pairwise", "scale", "deploy")),
)
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))
LAYERS = ("engine", "simulate", "deploy")
RUNNER = """
import json, sys, traceback
from pathlib import Path

failed = {}
for page, code in json.load(sys.stdin).items():
    try:
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    except BaseException:
        failed[page] = traceback.format_exc()
Path(sys.argv[1]).write_text(json.dumps(failed))
"""


def code_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Tracebacks by page. All pages run in one process, each in its own namespace.

    A separate process, because users have float32 and JAX's usual promotion. Only compilation is as fast as in tests.
    """
    folder = tmp_path_factory.mktemp("pages")
    pages = json.dumps({page: "\n".join(code_of(page)) for page in PAGES})
    # This checkout, also where another one is installed.
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", RUNNER, str(folder / "failed.json")]
    subprocess.run(command, input=pages, text=True, check=True, cwd=folder, env=environment)
    return json.loads((folder / "failed.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_pages_runs(page, failures):
    assert code_of(page)
    assert page not in failures, failures[page]


def script(name):
    """A module of the docs folder."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_security_guide_follows_from_placements():
    """`python docs/security_table.py` regenerates it."""
    found = script("security_table")
    page = found.PAGE.read_text()
    assert found.with_table(page) == page


def test_the_outside_files_of_the_guide_work():
    method, experiment = ({}, {})
    for code, names in zip(code_of("docs/add_an_algorithm.md"), (method, experiment), strict=True):
        exec(compile(code, "add_an_algorithm.md", "exec"), names)
    task = least_squares()
    options = {"rounds": 5, "batch_size": 2, "params": np.zeros(3)}
    plain = fs.run(task.problem, fs.FedAvg(0.1, 3), task.federation, **options).solution()
    still = fs.run(task.problem, method["Momentum"](0.1, 3, momentum=0.0), task.federation, **options).solution()
    np.testing.assert_allclose(plain, still, rtol=1e-12)
    assert all(entry["meaning"] for entry in hyperparameters(method["Momentum"]))
    assert experiment["EXPERIMENT"].build(clients=5).federation.clients == 5


def test_the_skeleton_is_fedavg_without_momentum():
    module = script("skeleton")
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


def test_links_to_sections_lead_to_headings():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target, section in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            text = (page.parent / target).read_text() if target else page.read_text()
            headings = [
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)
            ]
            assert section in headings, f"{page.name} links to {target}#{section}"


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_a_page_of_concepts_is_short(page):
    assert len(page.read_text().split()) <= (1000 if page.name == "glossary.md" else 900)


@pytest.mark.parametrize("layer", LAYERS)
def test_concepts_name_every_module_of_a_layer(layer):
    folder, text = ROOT / "src" / "fedstrata" / layer, "\n".join(page.read_text() for page in CONCEPTS)
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert modules
    assert [name for name in modules if f"{name}`" not in text] == []


def test_modules_that_pages_name_exist():
    places = [ROOT, ROOT / "src", *(ROOT / "src" / "fedstrata").glob("**/")]
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/concepts/*.md"),
        *ROOT.glob("docs/guides/*.md"),
    ]:
        for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)\b(?!::)", page.read_text()):
            own = name == "hospitals/task.py"  # a file of the reader's app
            assert own or any((place / name).exists() for place in places), f"{page.name} names {name}"


def test_tests_that_pages_name_exist():
    """The claims of the security guide are worth as much as the tests beside them."""
    short = {"attacks/": "tests/attacks/", "flower/": "tests/deploy/flower/"}
    named = set()
    for page in ROOT.glob("docs/**/*.md"):
        for folder, file, test in re.findall(
            r"`(attacks/|flower/|tests/[\w/]*/)(test_\w+\.py)::(\w+)`", page.read_text()
        ):
            path = ROOT / short.get(folder, folder) / file
            assert path.exists(), f"{page.name} names {path}"
            assert f"def {test}(" in path.read_text(), f"{page.name} names {test} in {file}"
            named.add(test)
    assert len(named) > 40


def test_every_claim_of_the_threat_model_has_a_test():
    page = (ROOT / "docs" / "guides" / "security.md").read_text()
    claims = [
        line for part in page.split("| claim | test |\n|---|---|\n")[1:] for line in part.split("\n\n")[0].splitlines()
    ]
    assert len(claims) > 20
    assert [line for line in claims if "::test_" not in line and "as above" not in line] == []
