"""Daily returns of portfolios, from Kenneth French's data library."""

import io

import numpy as np

from fedstrata.data.sources import store
from fedstrata.data.sources.dataset import Dataset, Source, pick

US = {
    "us_size_bm": "us_100_size_bm_daily.npz",
    "us_size_op": "us_100_size_op_daily.npz",
    "us_size_inv": "us_100_size_inv_daily.npz",
}
REGIONS = ("Asia_Pacific_ex_Japan", "Europe", "Global", "Global_ex_US", "Japan", "North_America")
TABLES = (*US, *(f"{region}_{sort}" for region in REGIONS for sort in ("ME", "OP", "INV")))
MISSING = -9999  # hundredths of a percent: the library's code -99.99


def fama_french(table: str = "us_size_bm", missing: str = "zero", dates: bool = False) -> Dataset:
    """Returns in percent per day, one row per trading day, one column per portfolio.

    Days are in order, so `Contiguous(clients)` gives each client a period.

    Args:
        table: `us_size_bm`, `us_size_op`, `us_size_inv`: 100 US portfolios, 13,781 days; `Europe_ME` and 17 more: 25
            portfolios of a developed market, 7,240 days.
        missing: missing returns (-99.99 in the files) become 0 ("zero") or NaN ("nan", to be replaced before a
            federation is built), or their days are removed ("drop").
        dates: whether to add a leaf `date` (YYYYMMDD).
    """
    pick("table of fama_french", table, TABLES)
    pick("missing policy of fama_french", missing, ("zero", "drop", "nan"))
    file = US.get(table, "developed_25_daily.npz")
    with np.load(io.BytesIO(store.read("fama_french", file)), allow_pickle=False) as stored:
        hundredths, days = stored["returns_x100" if table in US else table], stored["dates"]
        columns = tuple(map(str, stored["columns"])) if table in US else None
    gone = hundredths == MISSING
    x = np.where(gone, np.nan if missing == "nan" else 0.0, hundredths / 100.0).astype(np.float32)
    examples = {"x": x} | ({"date": days.astype(np.int32)} if dates else {})
    if missing == "drop":
        examples = {name: leaf[~gone.any(axis=1)] for name, leaf in examples.items()}
    if columns is None:
        columns = tuple(f"portfolio {j + 1}" for j in range(x.shape[1]))
    return Dataset(examples, features=columns)


SOURCES = (
    Source(
        "fama_french", "daily portfolio returns", "Kenneth R. French data library (CRSP)", "research use", fama_french
    ),
)
