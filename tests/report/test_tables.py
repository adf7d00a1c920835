"""Comparison tables: values from the histories, and the mark on the right row."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from references import least_squares, squared_error
from rich.console import Console

import fedstrata as fs
from fedstrata.report import History, compare


def final(**columns) -> History:
    """A history of one round with these final values per seed."""
    seeds = len(next(iter(columns.values())))
    values = {name: np.asarray(v)[:, None] for name, v in columns.items()}
    return History({"seed": list(range(seeds))}, {"round": np.full((seeds, 1), 7), **values})


def best(comparison) -> dict[str, set[str]]:
    rows = comparison.json()["rows"]
    return {name: {row["label"] for row in rows if row["values"][name]["best"]} for name in comparison.columns}


RESULTS = {
    "A": final(objective=[1.0, 2.0], accuracy=[0.9, 0.8], bytes_up=[2000, 2000], seconds=[3.0, 5.0]),
    "B": final(objective=[1.2, 1.4], accuracy=[0.7, 0.9], bytes_up=[1_600, 1_600], seconds=[9.0, 9.0]),
    "C": final(objective=[np.nan, 0.0], accuracy=[1.0, 1.0], bytes_up=[10, 10], seconds=[1.0, 1.0]),
}


def test_best_is_low_for_costs_high_for_gains_and_never_diverged():
    assert best(compare(RESULTS)) == {"objective": {"B"}, "accuracy": {"A"}, "bytes_up": {"B"}, "seconds": {"A"}}


def test_ties_share_the_mark_and_a_column_of_equals_has_none():
    a, b, c = final(objective=[1.0], loss=[2.0]), final(objective=[1.0], loss=[2.0]), final(objective=[3.0], loss=[2.0])
    assert best(compare({"a": a, "b": b, "c": c})) == {"objective": {"a", "b"}, "loss": set()}
    assert best(compare({"a": a})) == {"objective": set(), "loss": set()}
    assert best(compare({"a": a, "c": final(objective=[np.nan], loss=[0.0])})) == {"objective": {"a"}, "loss": {"a"}}


def of(problem: str, **columns) -> History:
    return dataclasses.replace(final(**columns), problem=problem)


def test_objectives_of_different_problems_are_not_ranked():
    values = {"objective": [1.0], "stationarity": [0.1], "test/loss": [3.0], "accuracy": [0.5], "seconds": [1.0]}
    better = {"objective": [0.5], "stationarity": [0.2], "test/loss": [2.0], "accuracy": [0.4], "seconds": [2.0]}
    same = compare({"a": of("f", **values), "b": of("f", **better)})
    ranked = {"accuracy": {"a"}, "seconds": {"a"}}
    assert best(same) == {"objective": {"b"}, "stationarity": {"a"}, "test/loss": {"b"}, **ranked}
    assert same.notes == ()
    for other in ("g", ""):  # another one, or one that is not known
        apart = compare({"a": of("f", **values), "b": of(other, **better)})
        assert best(apart) == {"objective": set(), "stationarity": set(), "test/loss": set(), **ranked}
        note = "Not ranked across different problems: objective, stationarity, test/loss."
        assert apart.markdown().endswith(f"|\n\n{note}\n")
        assert apart.json()["notes"] == [note]
        out = io.StringIO()
        Console(file=out, width=200, color_system=None).print(apart.rich())
        assert note in " ".join(out.getvalue().split())
    assert compare({"a": of("f", **values), "b": of("g", **better)}, columns=["accuracy"]).notes == ()


def test_a_monitor_that_all_share_ranks_different_problems():
    a, b = of("f", **{"monitor/objective": [1.0]}), of("g", **{"monitor/objective": [2.0]})
    watched = [dataclasses.replace(history, monitor="m") for history in (a, b)]
    assert best(compare(dict(zip("ab", watched, strict=True)))) == {"monitor/objective": {"a"}}
    other = dataclasses.replace(b, monitor="other")
    assert best(compare({"a": watched[0], "b": other})) == {"monitor/objective": set()}


def test_histories_from_files_have_the_fingerprint_of_their_problem(tmp_path):
    task = least_squares()
    options = {"rounds": 3, "batch_size": "all", "params": np.zeros(3)}
    plain = fs.run(task.problem, fs.FedAvg(0.1), task.federation, **options)
    same = fs.run(task.problem, fs.SCAFFOLD(0.1, 2), task.federation, **options)
    sparse = fs.Regularized(squared_error, fs.prox.L1(0.1))
    other = fs.run(sparse, fs.FedAvgServerProx(0.1), task.federation, **options)
    sized = fs.run(task.problem, fs.FedAvg(0.1), task.federation, weights="size", **options)
    assert compare([plain, same]).notes == ()
    for unlike in (other, sized):
        read = [History.from_jsonl(r.history.to_jsonl(tmp_path / "h.jsonl")) for r in (plain, unlike)]
        for pair in ([plain, unlike], read):
            table = compare(pair)
            assert "objective" in table.notes[0]
            assert not any(cell.best for row in table.cells for cell in row[:1])


def test_a_column_that_one_row_has_gets_no_mark():
    alone = compare({"a": final(objective=[1.0], zeros=[3.0]), "b": final(objective=[2.0])})
    assert [cell and cell.best for cell in alone.cells[0]] == [True, False]
    three = compare({"a": final(zeros=[1.0]), "b": final(zeros=[2.0]), "c": final(objective=[1.0])}, ["zeros"])
    assert [cell and cell.best for (cell,) in three.cells] == [False, True, None]


def test_columns_without_a_direction_are_shown_and_not_marked():
    values = lambda x: final(mine=[x], round_trips=[x], **{"test/mine": [x]}, samples=[int(x)])
    pair = {"a": values(1.0), "b": values(2.0)}
    names = ["mine", "test/mine", "round_trips", "samples"]
    assert best(compare(pair, names)) == {name: set() for name in names}
    told = compare(pair, names, modes={"mine": "max", "round_trips": "min"})
    assert best(told) == {"mine": {"b"}, "test/mine": set(), "round_trips": {"a"}, "samples": set()}
    declared = {label: dataclasses.replace(history, modes={"mine": "min"}) for label, history in pair.items()}
    assert best(compare(declared, names))["test/mine"] == {"a"}
    disagreed = {**declared, "b": dataclasses.replace(pair["b"], modes={"mine": "max"})}
    assert best(compare(disagreed, names))["mine"] == set()
    with pytest.raises(ValueError, match="unknown history column in modes 'mind'; did you mean mine"):
        compare(pair, modes={"mind": "max"})
    with pytest.raises(ValueError, match="column 'mine': the direction 'high' must be"):
        compare(pair, modes={"mine": "high"})  # type: ignore[dict-item]


def test_values_are_final_mean_and_sample_deviation(filled):
    history = filled({"seed": [0, 1, 2]})
    content = json.loads(json.dumps(compare({"A": history}).json(), allow_nan=False))
    assert content["rows"][0]["seeds"] == [0, 1, 2]
    for name in ("objective", "accuracy", "bytes_up"):
        ends = history[name][:, -1]
        cell = content["rows"][0]["values"][name]
        assert cell["mean"] == pytest.approx(ends.mean())
        assert cell["std"] == pytest.approx(ends.std(ddof=1))


def test_json_has_none_for_diverged_and_missing():
    content = compare({"A": final(objective=[np.nan]), "B": final(loss=[1.0])}).json()
    assert content["rows"][0]["values"]["objective"] == {"mean": None, "std": None, "best": False}
    assert content["rows"][1]["values"]["objective"] is None


def test_markdown_is_a_table_with_bold_best():
    lines = compare(RESULTS).markdown().splitlines()
    assert len(lines) == 2 + 3
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {6}
    assert [re.findall(r"\*\*(.*?)\*\*", line) for line in lines[2:]] == [
        ["0.850 ± 0.071", "4 s"],
        ["1.30 ± 0.14", "1.6"],
        [],
    ]
    assert lines[0].split("|")[4].strip() == "kB up"
    assert "a\\|b" in compare({"a|b": RESULTS["A"]}).markdown()


def test_rich_table_is_readable_without_colour():
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(compare({**RESULTS, "[red]": RESULTS["A"]}).rich())
    text = out.getvalue()
    assert "1.30 ± 0.14 *" in text
    assert "[red]" in text
    assert "best of its column" in text
    assert "diverged" in text


def test_sweeps_become_rows_and_columns_can_be_chosen(filled):
    history = filled({"step_size": [0.1, 0.01], "seed": [0, 1]})
    comparison = compare({"FedAvg": history}, columns=["accuracy", "round"])
    assert [row.label for row in comparison.rows] == ["FedAvg, step_size=0.1", "FedAvg, step_size=0.01"]
    assert comparison.columns == ("accuracy", "round")
    assert comparison.cells[1][0].mean == history["accuracy"][1, :, -1].mean()  # type: ignore[union-attr]


def test_bad_requests(filled):
    with pytest.raises(ValueError, match="did you mean accuracy"):
        compare({"A": filled({"seed": [0]})}, columns=["accurcy"])
    with pytest.raises(ValueError, match="no results"):
        compare({})
    with pytest.raises(TypeError, match="'A' is a int"):
        compare({"A": 3})
    with pytest.raises(ValueError, match="recorded no round"):
        compare({"A": filled({"seed": [0]}, rounds=0)})
