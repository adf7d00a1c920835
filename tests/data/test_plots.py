import io

import numpy as np
import pytest
from rich.console import Console

from fedstrata.data import IID, ByColumn, Federation
from fedstrata.data.plots import label_counts


def fed():
    y = np.array([0, 0, 1, 2, 2, 2])
    return Federation.from_arrays({"x": np.ones((6, 1)), "y": y}, ByColumn(list("aababb")), test={"x": np.ones((3, 1))})


def printed(table):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_label_counts_match_a_loop():
    some = fed()
    expected = [[(some["train"].shard(i)["y"] == k).sum() for k in range(3)] for i in range(2)]
    np.testing.assert_array_equal(label_counts(some), expected)


def test_summary_shows_rows_shares_and_pooled_splits():
    text = printed(fed().summary())
    assert "2 clients, 6 training rows" in text
    assert "0: 67 %, 2: 33 %" in text
    assert "test 3 rows" in text


def test_summary_of_many_clients_is_cut():
    many = Federation.from_offsets({"x": np.ones((5000, 1), np.float32)}, np.arange(5001))
    assert "… 4,990 more" in printed(many.summary(limit=10))


def test_bars_stack_to_the_rows_of_each_client(tmp_path):
    figure = fed().plot(tmp_path / "who.png")
    axes = figure.axes[0]
    heights = np.array([[bar.get_height() for bar in group] for group in axes.containers])
    np.testing.assert_array_equal(heights, label_counts(fed()).T)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "training rows")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["a", "b"]
    assert (tmp_path / "who.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("clients", [40, 500])
def test_every_row_is_drawn_without_labels_too(clients):
    axes = Federation.from_arrays({"x": np.ones((1000, 1))}, IID(clients)).plot().axes[0]
    heights = sum(bar.get_height() for bar in axes.patches)
    assert heights == (1000 if clients == 40 else 500)  # rows as bars, or clients in a histogram of sizes
