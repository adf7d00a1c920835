"""Data files are outside the repository: tests that read them skip where FEDSTRATA_DATA does not lead to them."""

import pytest

from fedstrata.data.sources import store


@pytest.fixture
def need():
    """Skip the test unless all files of a source are in the shared folder or the cache."""

    def check(source: str) -> None:
        missing = [row.file for row in store.status(source) if row.where == "missing"]
        if missing:
            pytest.skip(f"{source}: {', '.join(missing)} not found; set FEDSTRATA_DATA to the shared data folder")

    return check
