"""Papers are loaded as `fedstrata_papers.NAME`; the first picture of every test is drawn in full."""

from pathlib import Path

import pytest

from fedstrata.experiments.reproduction import drawing, papers

papers.modules()  # test files then import from fedstrata_papers


@pytest.fixture(autouse=True)
def labels_on_the_first_picture(monkeypatch):
    """A label settles the layout of its whole picture anew, which takes longer than all the rest of drawing it."""
    label_ends, first = drawing.label_ends, []

    def once(axes, labelled):
        first[:] = first or [axes.figure]
        if axes.figure is first[0]:
            label_ends(axes, labelled)

    monkeypatch.setattr(drawing, "label_ends", once)


def pytest_collection_modifyitems(items):
    """Reproductions take long: all of their tests are slow ones."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
