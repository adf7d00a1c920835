"""Figures that display in notebooks and are saved with fonts that journals accept."""

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import figure

from fedstrata.base.files import replacing

FONTS: Any = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}  # TrueType; matplotlib's default, Type 3, is refused by many journals


class Figure(figure.Figure):
    """A matplotlib figure without pyplot: no window opens, and it is freed with its last reference."""

    def _repr_png_(self) -> bytes:
        """The picture that Jupyter displays as the result of a cell, with or without `%matplotlib inline`."""
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save with `FONTS`; arguments are those of matplotlib's `savefig`."""
        with matplotlib.rc_context(FONTS):  # the user's settings stay as they are
            super().savefig(fname, **options)

    def write(self, path: str | Path, dpi: int) -> Path:
        """Save atomically, in the format of the suffix (.png, .pdf, .svg).

        Args:
            path: the file.
            dpi: dots per inch, for formats made of pixels.
        """
        with replacing(path) as temporary:
            self.savefig(temporary, dpi=dpi)
        return Path(path)
