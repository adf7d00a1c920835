"""What there is, and what an algorithm does, as people and programs read it."""

import re

import pytest

import fedstrata as fs
from fedstrata.algorithms import families, known
from fedstrata.base.docstrings import read
from fedstrata.cli import bibliography, latex
from fedstrata.cli.explanation import convergence, explain, hyperparameters, reveals, specimen
from fedstrata.cli.latex import formulas, readable
from fedstrata.cli.list import START
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.placement import AVERAGED, BROADCAST, GATHERED, LOCAL, POOLED, REPORTED, SERVER
from fedstrata.problems.base import Problem
from fedstrata.public import PUBLIC


def test_list_names_everything(answer):
    found = answer("list")
    names = {kind: [entry["name"] for entry in entries] for kind, entries in found.items()}
    assert sorted(names["algorithms"]) == list(known())
    assert len(names["algorithms"]) == len(known())
    assert "Average" in names["problems"]
    assert {"digits", "breast_cancer", "least_squares", "mnist"} <= {*names["experiments"]}
    assert {"digits", "mnist"} <= {*names["data"]}
    assert all(entry["summary"] for entries in found.values() for entry in entries)


def test_list_for_people_shows_one_kind(command):
    code, out, _ = command("list", "experiments")
    assert code == 0
    assert "digits" in out
    assert "FedProx" not in out


def test_list_shows_which_files_are_missing(answer):
    state = {entry["name"]: entry["state"] for entry in answer("list", "data")["data"]}
    assert state["digits"] == "built in"
    assert state["mnist"] == "not here"


def test_list_shows_which_files_users_must_provide(answer, tmp_path, monkeypatch):
    state = lambda: {entry["name"]: entry["state"] for entry in answer("list", "data")["data"]}
    by_hand = ("cifar100", "chexpert", "chestmnist")
    assert {name: state()[name] for name in by_hand} == dict.fromkeys(by_hand, "to be put by hand")
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "cifar-100-binary.tar.gz").touch()
    assert state()["cifar100"] == "here"


def test_no_latex_reaches_the_terminal(answer):
    for kind, entries in answer("list").items():
        for entry in entries:
            found = re.findall(r"\$|\\[A-Za-z]|[_^]\{", " ".join(map(str, entry.values())))
            assert not found, (kind, entry)


def commands_of(docstring: str | None) -> set[str]:
    formulas = re.findall(r"\$\$?(.*?)\$", docstring or "", flags=re.DOTALL)
    return {*re.findall(r"\\([A-Za-z]+)", " ".join(formulas))}


def test_every_latex_command_of_a_docstring_has_a_sign():
    """One that is not in the table would be read as a word: F circ G."""
    todo, used = [Problem, Algorithm], set()
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        used |= commands_of(cls.__doc__) if cls.__module__.startswith("fedstrata.") else set()
    words = {"arg", "min", "max", "log", "exp"}  # read as what they are
    shapes = {"frac", "tfrac", "sqrt", "text", "mathrm", "operatorname", "bar", "hat", "tilde", "quad", "qquad"}
    assert {"nabla", "frac", "circ"} <= used
    assert used - words - shapes - {*latex._SYMBOLS} - {*latex._SILENT} == set()


def has_section(cls: type, title: str) -> bool:
    return any(title in read(owner).sections for owner in cls.__mro__)


@pytest.mark.parametrize("name", list(known()))
def test_every_algorithm_can_be_explained(name, answer, command):
    about = answer("explain", name, "--parameters", "1000")
    assert about["update"]
    assert about["converges_to"] or about["does_not"]
    assert about["paper"]["citation"] is not None, "a docstring's key must stand in docs/papers.bib"
    if has_section(known()[name], "Args"):
        assert all(entry["meaning"] for entry in about["hyperparameters"])
    points = [*about["converges_to"], *about["does_not"], *about["notes"]]
    prose = [about["summary"], about["privacy"], *points, *(h["meaning"] for h in about["hyperparameters"])]
    assert not any(mark in line for line in about["update"] for mark in "\\${}")
    assert not any(mark in line for line in prose for mark in "\\$")
    code, out, _ = command("explain", name)
    assert code == 0
    assert about["update"][0] in out
    assert out.count("• ") == len(points)


SECTIONS = """One line.

    $$ x = y $$

    Converges to:
        - a minimum of $f$;
        - a fixed point.

    Does not:
        - settle.

    Reference: mcmahan2017.
    """
MARKED = """One line.

    - *Converges to* a minimum of $f$;
    - It is also fast.
    - *Does not* settle.
    """
PROSE = """One line.

    Converges to a minimum of $f$; Does not settle.
    """


def test_what_a_method_converges_to_is_read_from_sections_bullets_or_a_paragraph():
    sections, marked, prose = (convergence(read(text)) for text in (SECTIONS, MARKED, PROSE))
    assert sections == {"converges_to": ["a minimum of f;", "a fixed point."], "does_not": ["settle."], "notes": []}
    assert marked == {"converges_to": ["a minimum of f;"], "does_not": ["settle."], "notes": ["It is also fast."]}
    assert prose == {"converges_to": ["a minimum of f;"], "does_not": ["settle."], "notes": []}
    assert convergence(read("One line.")) == {"converges_to": [], "does_not": [], "notes": []}


class Documented(fs.FedAvg):
    """A method.

    Args:
        mu: $\\mu$, the pull.
        history: rounds that are kept.
    """

    mu: float = fs.real(0.1, at_least=0, below=1)
    history: int | None = fs.whole(None, at_least=1)
    other: float | None = fs.real(None, above=0)


def test_hyperparameters_are_read_from_args_and_declarations():
    found = {h["name"]: h for h in hyperparameters(Documented)}
    assert found["mu"]["meaning"] == "μ, the pull"
    assert found["mu"]["range"] == ">= 0 and < 1"
    assert found["history"]["meaning"] == "rounds that are kept"
    assert found["history"]["range"] == "a whole number >= 1, or None"
    assert found["other"]["range"] == "> 0, or None"
    assert found["other"]["meaning"] == ""
    assert found["step_size"]["needed"]


def test_methods_to_start_with_are_known_and_in_their_family(answer, command):
    for problem, methods in START.items():
        assert {*methods} <= {*families()[problem.lower()]}
        assert hasattr(fs, problem)
    assert {*START} == {family.capitalize() for family in families()}
    entries = answer("list", "algorithms")["algorithms"]
    assert {e["name"] for e in entries if e["start"]} == {name for methods in START.values() for name in methods}
    code, out, _ = command("list", "algorithms")
    assert code == 0
    assert "FedAvg *" in out
    assert "Start here" in command("list", "start")[1]


def test_public_names_are_listed_by_purpose(answer):
    entries = answer("list", "names")["names"]
    assert [*dict.fromkeys(entry["purpose"] for entry in entries)] == list(PUBLIC)
    assert all(hasattr(fs, entry["name"]) for entry in entries)
    assert {"run", "Average", "Averaged", "pair_losses"} <= {entry["name"] for entry in entries}


@pytest.mark.parametrize(
    ("name", "up", "down"), [("FedAvg", 1, 1), ("FedSGD", 1, 1), ("SCAFFOLD", 2, 2), ("FedAdam", 1, 1)]
)
def test_bytes_are_those_of_the_papers_vectors(name, up, down):
    """Each sends its count of vectors of d float32 numbers; SCAFFOLD twice what FedAvg sends."""
    traffic = explain(known()[name], size=1000, cohort=3)["traffic"]
    assert (traffic["up_bytes"], traffic["down_bytes"]) == (4000 * up, 4000 * down)
    assert sum(row["bytes"] for row in traffic["fields"]) == 4000 * (up + down)


def test_a_centralised_method_sends_nothing(command):
    about = explain(known()["CentralSGD"], size=1000, cohort=3)
    assert about["traffic"]["up_bytes"] == about["traffic"]["down_bytes"] == 0
    assert "nothing: it runs on the pooled data" in command("explain", "CentralSGD")[1]


def test_size_is_another_word_for_parameters(answer):
    assert answer("explain", "FedAvg", "--size", "7")["traffic"]["up_bytes"] == 28


def test_hyperparameters_come_with_range_default_and_meaning(answer):
    found = {h["name"]: h for h in answer("explain", "FedProx")["hyperparameters"]}
    assert found["mu"]["default"] == known()["FedProx"].mu
    assert (found["mu"]["range"], found["step_size"]["range"]) == (">= 0", "> 0")
    assert found["step_size"]["default"] is None
    inherited = {h["name"]: h for h in answer("explain", "FedYogi")["hyperparameters"]}
    ours = {h["name"]: h for h in answer("explain", "FedAdam")["hyperparameters"]}
    assert inherited["beta1"] == ours["beta1"]


def test_what_a_placement_reveals():
    words = {place.name: reveals(place) for place in (AVERAGED, REPORTED, GATHERED, POOLED, BROADCAST, LOCAL, SERVER)}
    assert len(set(words.values())) == 7
    assert "other clients see the mean" in words["Averaged"]
    assert "other clients never see" in words["Reported"]
    assert "cannot hide" in words["Gathered"]
    assert "all clients" in words["Pooled"]
    assert words["Local"] == "never leaves its client"
    assert words["Server"] == "never leaves the server"


@pytest.mark.parametrize("name", list(known()))
def test_a_specimen_is_in_range(name):
    specimen(known()[name])  # an algorithm refuses values out of range


@pytest.mark.parametrize(
    ("latex", "plain"),
    [
        (r"\frac12 \|z - y\|^2", "1/2 ‖z - y‖²"),
        (r"\frac{|S|}{N} \sum_i p_i c_i^+", "|S|/N Σ_i p_i c_i^+"),
        (r"\big( a \big) \, b", "( a ) b"),
        (r"x \quad (Q \text{ times})", "x   (Q times)"),
        (r"\mathrm{sign}(v) \in \{0, 1\}", "sign(v) ∈ {0, 1}"),
        ("no formula here", "no formula here"),
    ],
)
def test_latex_is_readable(latex, plain):
    assert readable(latex) == plain


def test_formulas_are_on_separate_lines():
    assert formulas(r"A. $$ a \gets b, \quad c \gets d $$ B. $$ e $$") == ["a ← b", "c ← d", "e"]


def test_without_the_file_a_paper_is_its_key(monkeypatch, command):
    monkeypatch.setattr(bibliography, "entries", dict)
    assert "karimireddy2020" in command("explain", "SCAFFOLD")[1]


def test_the_bibliography_is_complete():
    for key, entry in bibliography.entries().items():
        assert {"author", "title", "year"} <= entry.keys(), key
        assert str(entry["year"]) in key
    robbins = bibliography.citation("robbins1951")
    assert robbins.startswith("Robbins and Monro (1951). A Stochastic Approximation Method.")
    assert bibliography.link("black2002") == "https://doi.org/10.1007/3-540-45760-7_9"
