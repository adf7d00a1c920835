"""Figures that a notebook shows as they are, and that are saved with fonts which journals accept."""

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import figure

from fedstrata.files import replacing

FONTS: Any = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}  # TrueType; matplotlib's default, Type 3, is refused by many journals


class Figure(figure.Figure):
    """matplotlib's figure, without pyplot: no window opens, and it is forgotten with its last reference."""

    def _repr_png_(self) -> bytes:
        """What Jupyter shows as the result of a cell, with or without `%matplotlib inline`."""
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()

    def savefig(self, fname: Any, **options: Any) -> None:
        with matplotlib.rc_context(FONTS):  # the user's own settings stay as they are
            super().savefig(fname, **options)

    def write(self, path: str | Path, dpi: int) -> Path:
        """Save as what the name says (.png, .pdf, .svg); a reader sees the whole file or the old one."""
        with replacing(path) as temporary:
            self.savefig(temporary, dpi=dpi)
        return Path(path)
