"""Figures show themselves in a notebook and are saved with fonts that journals accept."""

import struct

import matplotlib
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.figures import Figure
from fedstrata.experiments.picture import picture
from fedstrata.experiments.reproduction import papers
from fedstrata.experiments.reproduction.drawing import Line, Panel, draw
from fedstrata.report import History

PARETO = papers.load("fedbio.pareto")
ROUNDS = np.tile(np.arange(4), (2, 1))
COLUMNS = {"round": ROUNDS, "objective": 1 / (1.0 + ROUNDS), "bytes_up": 10 * ROUNDS, "bytes_down": 10 * ROUNDS}
HISTORY = History({"seed": [0, 1]}, COLUMNS)
FEDERATION = fs.Federation.from_arrays({"y": [0, 1, 1]}, [0, 0, 1])
FIGURES = {
    "plot": lambda: fs.plot({"A": HISTORY}),
    "federation": lambda: FEDERATION.plot(),
    "picture": lambda: picture({"A": HISTORY}, ["objective"], "title"),
}


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height, from the header of the file."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_shows_a_figure_without_pyplot(name):
    figure = FIGURES[name]()
    width, height = size_of(figure._repr_png_())
    inches = figure.get_size_inches()
    assert width / height == pytest.approx(inches[0] / inches[1], rel=0.01)
    assert width > 400
    assert isinstance(figure, matplotlib.figure.Figure), "%matplotlib inline has its own way of showing these"


def test_a_real_display_formatter_finds_the_picture():
    display = pytest.importorskip("IPython.core.formatters")
    data, _ = display.DisplayFormatter().format(fs.plot({"A": HISTORY}))
    assert size_of(data["image/png"])


def test_a_notebook_shows_a_comparison_as_a_table():
    table = fs.compare({"A": HISTORY, "B": HISTORY})
    assert table._repr_markdown_() == table.markdown()


WRITERS = {
    "plot": lambda path: fs.plot({"A": HISTORY}, path=path),
    "federation": lambda path: FEDERATION.plot(path),
    "picture": lambda path: picture({"A": HISTORY}, ["objective"], "title", path=path),
    "panels": lambda path: draw([Panel("p", {"a": Line(np.arange(3), np.ones((2, 3)))})], "title", path),
    "pareto": lambda path: PARETO.pareto([PARETO.Cloud("", {"a": (np.ones(3), np.zeros(3))})], "title", path),
    "by hand": lambda path: fs.plot({"A": HISTORY}).savefig(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_pdfs_have_no_type_3_fonts_and_settings_stay(name, tmp_path):
    before = dict(matplotlib.rcParams)
    WRITERS[name](tmp_path / "picture.pdf")
    content = (tmp_path / "picture.pdf").read_bytes()
    assert b"/Font" in content
    assert b"/Type3" not in content
    assert b"/CIDFontType2" in content
    assert dict(matplotlib.rcParams) == before


def test_postscript_has_no_type_3_fonts(tmp_path):
    fs.plot({"A": HISTORY}).savefig(tmp_path / "picture.eps")
    content = (tmp_path / "picture.eps").read_bytes()
    assert b"/FontType 3" not in content
    assert b"/FontType 42" in content


def test_a_failed_write_leaves_the_old_picture(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    figure = Figure()
    figure.savefig = lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="full"):
        figure.write(path, dpi=50)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]
