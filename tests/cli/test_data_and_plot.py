"""Data files from the command line, pictures of histories, and the empty list of reproductions."""

import numpy as np
import pytest

from fedstrata.data.sources import by_hand, store
from fedstrata.report import History


def some_history(level: float) -> History:
    rounds = np.tile(np.arange(5), (2, 1))
    values = level / (1 + rounds) + np.array([[0.0], [0.1]])
    grows = dict.fromkeys(("bytes_up", "bytes_down", "samples", "seconds"), 10 * rounds)
    return History({"seed": [0, 1]}, {"round": rounds, "objective": values, "test/accuracy": 1 - values / 9, **grows})


def test_data_list_has_every_set(answer, command):
    found = answer("data", "list")
    built_in = {entry["name"] for entry in found["sets"] if entry["built_in"]}
    assert {"digits", "breast_cancer", "iris"} <= built_in
    assert {row["where"] for row in found["files"]} == {"missing"}
    assert "licence" in command("data", "list")[1]


def test_data_check_separates_good_from_bad(answer, command, tmp_path, monkeypatch):
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.names").write_bytes(b"not the real file")
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    found = answer("data", "check", "adult", code=1)
    state = {row["file"]: (row["checksum"], row["where"] == "missing") for row in found["files"]}
    assert state["adult.names"] == ("bad", False)
    assert state["adult.data.gz"] == ("unchecked", True)
    code, out, _ = command("data", "check", "adult")
    assert code == 1
    assert "1 damaged" in out


def test_data_fetch_refuses_a_wrong_checksum(mistake, tmp_path, monkeypatch):
    (tmp_path / "german_credit").mkdir()
    for row in store.status("german_credit"):
        (tmp_path / "german_credit" / row.file).write_bytes(b"damaged")
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    err = mistake("data", "fetch", "german_credit")
    assert "expected sha256" in err
    assert "actual" in err


def test_what_is_built_in_needs_no_fetching(command):
    code, out, _ = command("data", "fetch", "digits")
    assert code == 0
    assert "nothing to fetch" in out


@pytest.mark.parametrize("name", ["cifar100", "chexpert", "chestmnist"])
def test_what_is_put_by_hand_cannot_be_fetched(name, mistake, answer, command, tmp_path, monkeypatch):
    err = mistake("data", "fetch", name)
    file, what = by_hand.FILES[name]
    assert file in err
    assert "https://" in what
    assert what in err
    assert str(tmp_path / "cache" / "data" / name) in err
    assert command("data", "fetch", name, "--json")[0] == 2
    assert "to be put by hand" in command("data", "list", name)[1]
    row = {"source": name, "file": file, "where": "missing", "size": 0, "checksum": "unchecked"}
    assert answer("data", "check", name)["files"] == [row]
    assert not answer("data", "list", name)["sets"][0]["built_in"]
    (tmp_path / name).mkdir()
    (tmp_path / name / file).write_bytes(b"abc")
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    found = {**row, "where": str(tmp_path / name / file), "size": 3}
    assert answer("data", "fetch", name)["files"] == [found]


def test_an_experiment_without_its_files_names_the_remedy(mistake, monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(store.urllib.request, "urlopen", offline)
    err = mistake("run", "mnist", "--no-cache")
    assert "mnist/" in err
    assert "FEDSTRATA_DATA" in err


def test_plot_draws_files_and_folders(answer, tmp_path):
    some_history(1.0).to_jsonl(tmp_path / "runs" / "FedAvg.jsonl")
    some_history(2.0).to_jsonl(tmp_path / "runs" / "SCAFFOLD.jsonl")
    found = answer("plot", "runs", "--y", "test/accuracy", "--x", "megabytes", "--out", "p.png")
    assert found == {"picture": "p.png", "lines": ["FedAvg", "SCAFFOLD"]}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_one_name_are_distinguished_by_folder(answer, tmp_path):
    for folder in ("one", "two"):
        some_history(1.0).to_jsonl(tmp_path / folder / "FedAvg.jsonl")
    assert answer("plot", "one", "two", "--out", "p.svg")["lines"] == ["one/FedAvg", "two/FedAvg"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["h.jsonl", "--y", "objectve"], "did you mean objective?"),
        (["h.jsonl", "--x", "rounds"], "did you mean round or"),
        (["h.jsonl", "--out", "p.jpegg"], ".png"),
        (["absent.jsonl"], "no such file"),
        (["broken.jsonl"], "line 1"),
        (["empty"], "holds no history"),
    ],
)
def test_plot_mistakes(words, expected, mistake, tmp_path):
    some_history(1.0).to_jsonl(tmp_path / "h.jsonl")
    (tmp_path / "broken.jsonl").write_text("{cut off")
    (tmp_path / "empty").mkdir()
    assert expected in mistake("plot", *words)


def test_papers_are_listed_with_their_figures_and_what_they_cost(answer, command):
    papers = {p["name"]: p for p in answer("reproduce")["papers"]}
    assert papers["fednmap"]["figures"] == [2, 3, 4, 5, 6]
    out = command("reproduce")[1]
    for word in ("fednmap", "Huang", "small:", "full:"):
        assert word in out
