"""Histories as files and frames: every format gives back every number."""

import json
from dataclasses import replace
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.base.files import replacing
from fedstrata.report import History

FORMATS = {
    "jsonl": (History.to_jsonl, History.from_jsonl),
    "parquet": (History.to_parquet, History.from_parquet),
}


@st.composite
def histories(draw) -> History:
    names = draw(st.lists(st.sampled_from(["step_size", "momentum", "clip"]), unique=True, max_size=2))
    labels = st.one_of(st.floats(allow_nan=False), st.integers(-5, 5), st.text("abc", min_size=1))
    axes = {name: draw(st.lists(labels, min_size=1, max_size=3, unique_by=repr)) for name in names}
    axes = {name: values for name, values in axes.items() if len({type(v) for v in values}) == 1}
    axes["seed"] = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))
    shape = (*(len(v) for v in axes.values()), draw(st.integers(1, 3)))
    floats = hnp.arrays(np.float64, shape, elements=st.floats(allow_nan=True, allow_infinity=True))
    integers = hnp.arrays(np.int64, shape, elements=st.integers(-(2**62), 2**62))
    columns = {"objective": draw(floats), "round": draw(integers), "bytes_up": draw(integers)}
    per_client = draw(hnp.arrays(np.float64, (*shape, 2), elements=st.floats()))
    return History(axes, columns, {"loss": per_client})


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None)
@given(history=histories())
def test_files_give_back_every_bit(tmp_path_factory, kind, history):
    write, read = FORMATS[kind]
    back = read(write(history, tmp_path_factory.mktemp("history") / f"h.{kind}"))
    assert back == history
    assert [list(map(type, v)) for v in back.axes.values()] == [list(map(type, v)) for v in history.axes.values()]
    for name, values in history.columns.items():
        np.testing.assert_array_equal(back.columns[name], values)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_keep_everything_about_a_history(filled, tmp_path, kind):
    write, read = FORMATS[kind]
    known = {"modes": {"accuracy": "min", "client/loss": "none"}, "problem": "Average 12ab", "monitor": "Fair 34cd"}
    for about in (known, {"problem": "Average 12ab"}, {}):
        history = replace(filled({"step_size": [0.1, 0.01], "seed": [0, 1]}), **about)
        back = [
            read(write(history, tmp_path / f"h.{kind}")),
            History.from_json(json.loads(json.dumps(history.to_json()))),
        ]
        for other in (*back, history.select(step_size=0.1), next(history.settings())[1]):
            assert (other.modes, other.problem, other.monitor) == (history.modes, history.problem, history.monitor)
        assert back[0] == back[1] == history
        later = replace(history, columns={**history.columns, "round": history["round"] + 9})
        assert history.concat(later).problem == history.problem


def test_files_from_before_are_still_read(filled, tmp_path):
    history = filled({"seed": [0, 1]})
    old = {name: group for name, group in history.to_json().items() if name != "about"}
    assert History.from_json(old) == history
    assert not any("about" in line for line in history.to_jsonl(tmp_path / "h.jsonl").read_text().splitlines())


@settings(deadline=None)
@given(history=histories())
def test_json_dictionary_is_strict_json_and_exact(history):
    assert History.from_json(json.loads(json.dumps(history.to_json(), allow_nan=False))) == history


def test_jsonl_has_one_flat_object_per_run_and_round(filled, tmp_path):
    history = filled({"step_size": [0.1, 0.01], "seed": [0, 1, 2]})
    history.columns["objective"][1, 2, 3] = np.nan
    lines = [json.loads(line) for line in history.to_jsonl(tmp_path / "h.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 3 * 4
    assert list(lines[0])[:3] == ["step_size", "seed", "round"]
    assert lines[-1]["objective"] is None
    assert lines[4]["accuracy"] == history["accuracy"][0, 1, 0]


def test_pandas_frame_is_tidy(filled):
    history = filled({"step_size": [0.1, 0.01], "seed": [0, 1, 2]})
    frame = history.to_pandas()
    assert list(frame.columns[:3]) == ["step_size", "seed", "round"]
    for (step, seed, t), row in frame.set_index(["step_size", "seed", "round"]).iterrows():  # type: ignore[misc]
        index = (history.axes["step_size"].index(step), seed, t)
        assert row["objective"] == history["objective"][index]
        assert row["bytes_up"] == history["bytes_up"][index]
    assert frame["bytes_up"].dtype == np.int64


def test_pandas_frame_with_clients(filled):
    history = filled({"step_size": [0.1, 0.01], "seed": [0, 1, 2]})
    frame = history.to_pandas(clients=True)
    assert len(frame) == 2 * 3 * 4 * 3
    row = frame.query("step_size == 0.01 and seed == 2 and round == 1 and client == 2")
    assert row["client/loss"].item() == history["client/loss"][1, 2, 1, 2]
    with pytest.raises(ValueError, match="no per-client metric"):
        History(history.axes, history.columns).to_pandas(clients=True)


def test_files_that_are_not_histories(filled, tmp_path: Path):
    path = filled({"seed": [0, 1]}).to_jsonl(tmp_path / "h.jsonl")
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(ValueError, match="line 8: not a JSON object"):
        History.from_jsonl(path)
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"2 runs of \[3, 4\] rounds"):
        History.from_jsonl(path)
    path.write_text(whole + '{"seed": 0, "round": 9}\n')
    with pytest.raises(ValueError, match="a record has fields"):
        History.from_jsonl(path)
    path.write_text("")
    with pytest.raises(ValueError, match="not a history"):
        History.from_jsonl(path)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path):
    path = tmp_path / "new folder" / "file.txt"

    def write(text: str, error: bool) -> None:
        with replacing(path) as temporary:
            temporary.write_text(text)
            if error:
                raise RuntimeError("the disk is gone")

    write("old", error=False)
    with pytest.raises(RuntimeError):
        write("new", error=True)
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_seeds_of_64_bits_survive_every_format(tmp_path):
    history = History({"seed": [1, 2**40, 2**64 - 1]}, {"round": [[0, 1]] * 3, "loss": [[1.0, 0.5]] * 3})
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert History.from_jsonl(history.to_jsonl(tmp_path / "history.jsonl")) == history
    pytest.importorskip("pyarrow")
    assert History.from_parquet(history.to_parquet(tmp_path / "history.parquet")) == history
