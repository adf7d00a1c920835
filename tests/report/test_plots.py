"""Plots: the right lines, bands and labels, and labels that do not overlap."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from pictures import overlapping
from scipy import optimize, stats

from fedstrata.report import History, plot
from fedstrata.report.labels import spread
from fedstrata.report.plots import curve


def bands(figure) -> list[PolyCollection]:
    return [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]


def falling(rate: float, seeds: int = 3, rounds: int = 30) -> History:
    t = np.broadcast_to(np.arange(rounds), (seeds, rounds))
    objective = np.exp(-rate * t) * (1 + 0.1 * np.arange(seeds)[:, None])
    return History({"seed": list(range(seeds))}, {"round": t, "objective": objective})


def test_one_labelled_line_and_band_per_method_and_setting(filled):
    results = {"A": filled({"step_size": [0.1, 0.01], "seed": [0, 1]}), "B": filled({"seed": [0, 1, 2]}, seed=1)}
    axes = plot(results).axes[0]
    labels = ["A, step_size=0.1", "A, step_size=0.01", "B"]
    assert [line.get_label() for line in axes.lines] == labels
    assert [text.get_text() for text in axes.texts] == labels
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 3
    assert axes.get_legend() is None
    assert len(bands(axes.figure)) == 3
    np.testing.assert_allclose(axes.lines[2].get_ydata(), results["B"]["objective"].mean(axis=0))
    assert axes.get_xlabel() == "communication rounds"
    assert axes.get_ylabel() == "objective"


def test_one_seed_has_no_band(filled):
    assert bands(plot({"A": filled({"seed": [4]})})) == []


def test_bands_have_their_statistical_meaning(filled):
    history = filled({"seed": list(range(6))})
    y = history["objective"]
    c = curve(history, "objective", "round", "std")
    np.testing.assert_allclose([c.low, c.high], [y.mean(0) - y.std(0, ddof=1), y.mean(0) + y.std(0, ddof=1)])
    c = curve(history, "objective", "round", "ci")
    interval = stats.t.interval(0.95, 5, loc=y.mean(0), scale=stats.sem(y, axis=0))
    np.testing.assert_allclose([c.low, c.high], interval)
    c = curve(history, "objective", "round", "quantiles")
    np.testing.assert_allclose([c.low, c.middle, c.high], np.percentile(y, [25, 50, 75], axis=0))


@pytest.mark.parametrize(
    ("x", "label"),
    [("megabytes", "megabytes sent (up + down)"), ("seconds", "wall-clock time (seconds)")],
)
def test_horizontal_axes_have_units(filled, x, label):
    history = filled({"seed": [0, 1]})
    axes = plot({"A": history}, y="accuracy", x=x).axes[0]
    assert axes.get_xlabel() == label
    total = (history["bytes_up"] + history["bytes_down"]).mean(0) / 1e6 if x == "megabytes" else history[x].mean(0)
    np.testing.assert_allclose(axes.lines[0].get_xdata(), total)


def sending(megabytes: float, objective: float) -> History:
    """Six recorded rounds over which this much is sent, half of it up, with a falling objective."""
    rounds = np.broadcast_to(np.arange(6), (2, 6))
    sent = rounds * megabytes * 1e6 / 10
    values = objective + 1 / (1 + rounds) + 0.01 * np.arange(2)[:, None]
    columns = {"round": rounds, "objective": values, "bytes_up": sent, "bytes_down": sent}
    return History({"seed": [0, 1]}, columns)


def test_a_method_that_sends_nothing_is_a_horizontal_level():
    results = {"central": sending(0.0, 0.2), "A": sending(8.0, 0.5), "B": sending(2.0, 0.5)}
    figure = plot(results, x="megabytes")
    axes = figure.axes[0]
    end = results["central"]["objective"][:, -1].mean()
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [end, end])
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0, 8])
    np.testing.assert_allclose(axes.lines[1].get_xdata(), 8 * np.arange(6) / 5)
    assert [text.get_text() for text in axes.texts] == ["central (sends nothing)", "A", "B"]
    assert axes.get_xscale() == "linear"
    assert len(bands(figure)) == 2
    assert overlapping(figure) == []
    np.testing.assert_allclose(plot(results).axes[0].lines[0].get_xdata(), np.arange(6))
    with pytest.raises(ValueError, match=r"none of these methods sends anything.*give x='round'"):
        plot({"central": results["central"]}, x="megabytes")


def test_methods_that_send_very_different_amounts_have_a_logarithmic_axis():
    results = {"central": sending(0.0, 0.2), "much": sending(50.0, 0.5), "little": sending(1.0, 0.5)}
    axes = plot(results, x="megabytes").axes[0]
    assert axes.get_xscale() == "log"
    level, much, little = (np.asarray(line.get_xdata()) for line in axes.lines)
    np.testing.assert_allclose(much, 10 * np.arange(1, 6))
    np.testing.assert_allclose(little, 0.2 * np.arange(1, 6))
    np.testing.assert_allclose(level, [0.2, 50])
    np.testing.assert_allclose(axes.lines[2].get_ydata(), results["little"]["objective"].mean(axis=0)[1:])


def test_log_is_chosen_for_costs_that_fall_far():
    scale = lambda *args, **options: plot(*args, **options).axes[0].get_yscale()
    far, near = {"A": falling(1.0)}, {"A": falling(0.01)}
    assert scale(far) == "log"
    assert scale(near) == "linear"
    assert scale(near, log=True) == "log"
    assert scale(far, log=False) == "linear"
    gain = History({"seed": [0]}, {"round": [[0, 1]], "accuracy": [[0.001, 0.9]]})
    assert scale({"A": gain}, y="accuracy") == "linear"


def test_diverged_methods_are_marked(filled):
    early, never = filled({"seed": [0, 1]}), filled({"seed": [0, 1]})
    early.columns["objective"][:, 2:] = np.nan
    never.columns["objective"][:] = np.nan
    figure = plot({"early": early, "never": never, "well": filled({"seed": [0, 1]})})
    assert [t.get_text() for t in figure.axes[0].texts] == ["early (diverged)", "never (diverged)", "well"]


@pytest.mark.parametrize("count", [2, 9, 30])
@pytest.mark.parametrize("log", [True, False])
def test_labels_do_not_overlap_or_leave_the_picture(count, log, tmp_path):
    results = {f"method number {i}": falling(0.1 + 1e-4 * i) for i in range(count)}
    figure = plot(results, log=log, path=tmp_path / "plot.png")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    assert figure.axes[0].get_window_extent().width > 0.4 * figure.bbox.width


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_files_have_the_format_of_their_suffix(filled, tmp_path, suffix, magic):
    path = tmp_path / f"plot.{suffix}"
    plot({"A": filled({"seed": [0]})}, path=path)
    assert path.read_bytes().startswith(magic)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_results_with_labels_can_come_as_a_list(filled):
    history = filled({"seed": [0]})
    figure = plot([SimpleNamespace(label="FedAvg", history=history), history])
    assert [t.get_text() for t in figure.axes[0].texts] == ["FedAvg", "run 2"]


def test_bad_requests(filled):
    history = filled({"seed": [0]})
    with pytest.raises(ValueError, match="did you mean objective"):
        plot({"A": history}, y="objectiv")
    with pytest.raises(ValueError, match="unknown x axis 'rounds'; did you mean round"):
        plot({"A": history}, x="rounds")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown band"):
        plot({"A": history}, band="sd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log must be"):
        plot({"A": history}, log="y")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown history column 'bytes_up'"):
        plot({"A": falling(0.1)}, x="megabytes")


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_spread_is_the_nearest_feasible_placement(wanted):
    places = spread(np.array(wanted), gap=0.1, low=0.0, high=1.0)
    order = np.argsort(wanted, kind="stable")
    assert np.all(np.diff(places[order]) >= 0.1 - 1e-9)
    assert places.min() >= -1e-9
    assert places.max() <= 1 + 1e-9
    target = np.array(wanted)[order]
    constraints = [{"type": "ineq", "fun": lambda p, i=i: p[i + 1] - p[i] - 0.1} for i in range(len(wanted) - 1)]
    start = 0.1 * np.arange(len(wanted))
    solved = optimize.minimize(
        lambda p: np.sum((p - target) ** 2), start, bounds=[(0, 1)] * len(wanted), constraints=constraints, tol=1e-12
    )
    assert np.sum((places[order] - target) ** 2) <= solved.fun + 1e-6
