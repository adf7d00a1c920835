"""Pictures of experiments: the first of every test is drawn in full."""

import pytest

from fedstrata.experiments.reproduction import drawing


@pytest.fixture(autouse=True)
def labels_on_the_first_picture(monkeypatch):
    """A label settles the layout of its whole picture anew, which takes longer than all the rest of drawing it."""
    label_ends, first = drawing.label_ends, []

    def once(axes, labelled):
        first[:] = first or [axes.figure]
        if axes.figure is first[0]:
            label_ends(axes, labelled)

    monkeypatch.setattr(drawing, "label_ends", once)
