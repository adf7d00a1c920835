"""Daily returns, in percent: the portfolios of Kenneth French's library, or synthetic ones if its files are missing."""

import warnings

import numpy as np

US = {f"us_100_size_{sort}_daily": f"us_size_{sort}" for sort in ("bm", "op", "inv")}  # file -> table
SETS = (*US, "developed", "synthetic")
MISSING = ("zero", "mean", "drop", "code")
SHAPES = {**dict.fromkeys(US, (13_781, 100)), "developed": (7_240, 25), "synthetic": (13_781, 100)}


class SyntheticReturns(UserWarning):
    """The files of a data set are missing. Synthetic returns of the same shape replace them."""


def returns(data: str, missing: str = "zero", seed: int = 0) -> list[tuple[str, np.ndarray]]:
    """Named tables of days × portfolios: one for a US set, six regions for `developed`.

    missing: the treatment of the library's code −99.99, which 501 to 2,111 cells of a US set have (the regions have
    none). `zero`: a return of 0; `mean`: that of the portfolio's other days; `drop`: the day is removed; `code`: a loss
    of 99.99 percent, as in scripts that ignore the code.
    """
    from fedstrata.data.sources import finance
    from fedstrata.data.sources.dataset import pick

    pick("data of portfolio", data, SETS)
    pick("missing of portfolio", missing, MISSING)
    if data == "synthetic":
        return [("synthetic", synthetic(*SHAPES[data], seed=seed))]
    tables = {region: f"{region}_ME" for region in finance.REGIONS} if data == "developed" else {data: US[data]}
    try:
        return [(name, _filled(table, missing)) for name, table in tables.items()]
    except FileNotFoundError as absent:
        warnings.warn(
            f"{data}: the files of fama_french are missing, so synthetic returns of the same shape are used "
            f"(without this warning: --data data=synthetic). {str(absent).splitlines()[0]}",
            SyntheticReturns,
            stacklevel=2,
        )
        return [(name, synthetic(*SHAPES[data], seed=seed + number)) for number, name in enumerate(tables)]


def present(data: str) -> bool:
    """Whether the files of the real returns are present."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntheticReturns)
        try:
            return data != "synthetic" and bool(returns(data))
        except SyntheticReturns:
            return False


def _filled(table: str, missing: str) -> np.ndarray:
    from fedstrata.data.sources import finance, load

    if missing in ("zero", "drop"):
        return np.asarray(load("fama_french", table=table, missing=missing).train["x"], np.float64)
    r = np.asarray(load("fama_french", table=table, missing="nan").train["x"], np.float64)
    return np.where(np.isnan(r), finance.MISSING / 100 if missing == "code" else np.nanmean(r, axis=0), r)


def synthetic(days: int, portfolios: int, seed: int = 0) -> np.ndarray:
    r"""Returns in percent per day, with factors, fat tails, and quiet and volatile years.

    $$ r_t = \mu + \sigma_t \big( \beta m_t + B s_t + e_t \big) $$

    One market factor m of deviation 0.95 with β between 0.8 and 1.2, three smaller ones s (0.35), and e of each
    portfolio alone (0.4 to 0.9), all Student-t with five degrees of freedom; σ_t, common to all, an autoregression of
    logarithms (persistence 0.995, deviation 0.35), so that periods of time differ; μ from 0.02 to 0.07. Designed for
    the shape of the problem (one large eigenvalue, a small μᵀΣ⁻¹μ), not fitted to data.
    """
    rng = np.random.default_rng(seed)
    student = lambda *shape: rng.standard_t(5, shape) * (3 / 5) ** 0.5  # of variance one
    calm = np.zeros(days)
    shocks = 0.35 * (1 - 0.995**2) ** 0.5 * rng.normal(size=days)
    for day in range(1, days):
        calm[day] = 0.995 * calm[day - 1] + shocks[day]
    market, others = 0.95 * student(days, 1), 0.35 * student(days, 3)
    beta, loadings = rng.uniform(0.8, 1.2, portfolios), rng.normal(size=(3, portfolios))
    own = rng.uniform(0.4, 0.9, portfolios) * student(days, portfolios)
    return rng.uniform(0.02, 0.07, portfolios) + np.exp(calm)[:, None] * (market * beta + others @ loadings + own)
