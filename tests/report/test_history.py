"""History: reductions against loops, selection and concatenation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.report import History


def test_equality_ignores_only_the_wall_clock(filled):
    one, two = filled({"seed": [0, 1]}), filled({"seed": [0, 1]})
    two.columns["seconds"] = two.columns["seconds"] + 1
    assert one == two
    two.columns["objective"][0, 0] += 1e-12
    assert one != two
    assert one != filled({"seed": [0, 2]})
    assert one != "history"
    del two.columns["objective"]
    assert one != two


@settings(deadline=None)
@given(cut=st.integers(0, 4))
def test_concat_of_two_parts_is_the_whole(filled, cut):
    whole = filled({"step_size": [0.1, 0.01], "seed": [0, 1]})
    parts = [
        History(
            whole.axes,
            {k: v[..., part] for k, v in whole.columns.items()},
            {k: v[..., part, :] for k, v in whole.per_client.items()},
        )
        for part in (slice(None, cut), slice(cut, None))
    ]
    assert parts[0].concat(parts[1]) == whole


def test_concat_refuses_what_does_not_follow(filled):
    history = filled({"seed": [0, 1]})
    with pytest.raises(ValueError, match="starts at round 0, not after round 3"):
        history.concat(history)
    with pytest.raises(ValueError, match="axes differ"):
        history.concat(filled({"seed": [0, 2]}))
    with pytest.raises(ValueError, match="columns differ"):
        history.concat(History(history.axes, {"round": history["round"] + 10}, history.per_client))


def test_select_matches_indexing(filled):
    history = filled({"step_size": [0.1, 0.01], "momentum": ["a", "b", "c"], "seed": [5, 6]})
    chosen = history.select(momentum="b", step_size=np.float32(0.01).item())
    assert chosen.axes == {"seed": [5, 6]}
    np.testing.assert_array_equal(chosen["objective"], history["objective"][1, 1])
    np.testing.assert_array_equal(chosen["client/loss"], history["client/loss"][1, 1])
    kept = history.select(momentum=["c", "a"], seed=6)
    assert kept.axes == {"step_size": [0.1, 0.01], "momentum": ["c", "a"], "seed": [6]}
    np.testing.assert_array_equal(kept["accuracy"], history["accuracy"][:, [2, 0]][:, :, [1]])
    with pytest.raises(ValueError, match=r"no value 0\.5; it has"):
        history.select(step_size=0.5)
    with pytest.raises(ValueError, match="did you mean step_size"):
        history.select(stepsize=0.1)


def test_settings_cover_the_sweep_once(filled):
    history = filled({"step_size": [0.1, 0.01], "momentum": ["a", "b"], "seed": [5, 6]})
    seen = {(s["step_size"], s["momentum"]): h for s, h in history.settings()}
    assert len(seen) == 4
    np.testing.assert_array_equal(seen[0.01, "a"]["objective"], history["objective"][1, 0])


def test_reductions_over_seeds_match_loops(filled):
    history = filled({"step_size": [0.1, 0.01], "seed": [0, 1, 2]})
    values = history["objective"]
    for s in range(2):
        for t in range(4):
            runs = [values[s, k, t] for k in range(3)]
            average = sum(runs) / 3
            assert history.mean("objective")[s, t] == pytest.approx(average)
            assert history.std("objective")[s, t] == pytest.approx(math.sqrt(sum((v - average) ** 2 for v in runs) / 2))
            assert history.quantile("objective", 0.5)[s, t] == sorted(runs)[1]
    assert history.last("objective")[1, 2] == values[1, 2, 3]
    assert not filled({"seed": [3]}).std("objective").any()


def test_best_goes_the_right_way_and_skips_nan(filled):
    history = filled({"seed": [0, 1]})
    history.columns["objective"][0] = [3, 1, np.nan, np.nan]
    history.columns["objective"][1] = np.nan
    history.columns["accuracy"][0] = [0.1, 0.9, 0.5, 0.2]
    best = history.best("objective")
    assert best[0] == 1
    assert np.isnan(best[1])
    assert history.best("accuracy")[0] == 0.9
    assert history.best("accuracy", "min")[0] == 0.1
    with pytest.raises(ValueError, match="unknown mode"):
        history.best("accuracy", "up")  # type: ignore[arg-type]


def test_best_setting_never_picks_a_diverged_one(filled):
    history = filled({"step_size": [1.0, 0.1, 0.01], "seed": [0, 1]})
    history.columns["objective"][:, :, -1] = [[0.0, np.nan], [1.0, 3.0], [2.5, 2.5]]
    assert history.best_setting() == {"step_size": 0.1}
    assert history.best_setting(mode="max") == {"step_size": 0.01}
    history.columns["objective"][:] = np.nan
    with pytest.raises(ValueError, match="every setting diverged"):
        history.best_setting()


@pytest.mark.parametrize(
    ("axes", "columns", "message"),
    [
        ({}, {"round": [0]}, "last axis must be 'seed'"),
        ({"seed": [0], "step": [1]}, {"round": [[[0]]]}, "last axis must be 'seed'"),
        ({"seed": [0, 0]}, {"round": [[0], [0]]}, "no value twice"),
        ({"seed": []}, {"round": np.zeros((0, 1))}, "at least one value"),
        ({"seed": [0]}, {"objective": [[1.0]]}, "'round' column"),
        (
            {"seed": [0]},
            {"round": [[0, 1]], "objective": [[1.0]]},
            r"'objective' has shape \(1, 1\)",
        ),
        ({"seed": [0]}, {"round": [[0]], "seed": [[0]]}, "used twice"),
    ],
)
def test_bad_histories_are_refused(axes, columns, message):
    with pytest.raises(ValueError, match=message):
        History(axes, columns)


def test_wrong_types_are_refused(filled):
    with pytest.raises(TypeError, match="'objective' must hold numbers"):
        History({"seed": [0]}, {"round": np.array([[0]]), "objective": np.array([["low"]])})
    with pytest.raises(TypeError, match="axis value"):
        History({"clip": [object()], "seed": [0]}, {"round": np.array([[[0]]])})
    with pytest.raises(ValueError, match="did you mean objective"):
        filled({"seed": [0]})["objectiv"]
    with pytest.raises(ValueError, match="no round was recorded"):
        filled({"seed": [0]}, rounds=0).last("objective")
