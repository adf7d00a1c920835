"""Census income and bank credit: tables with sensitive groups, used in fairness studies."""

import numpy as np

from fedstrata.data.sources import store
from fedstrata.data.sources.dataset import Dataset, Source, pick, standardized

ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)
ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_WORDS = tuple(name for name in ADULT if name not in ADULT_NUMBERS)
SEX_STATUS = ("A91", "A92", "A93", "A94")  # of the five documented codes, A95 (single women) has no row


def adult(scale: bool = True, group: str | None = None, clients: str | None = None) -> Dataset:
    """48,842 adults of the 1994 US census; label 1 if the income is above 50,000 dollars.

    Columns of words are one-hot over the values of train and test. A column of two values stays one column; `?` is a
    separate value.

    Args:
        scale: whether to scale numbers by the train statistics.
        group: a column of words, such as "race", that becomes the leaf `group`.
        clients: a column of words, such as "education", whose values become the natural clients.
    """
    for argument, value in (("group", group), ("clients", clients)):
        if value is not None:
            pick(f"adult column for {argument}", value, ADULT_WORDS)
    train, test = (_adult_rows(name) for name in ("adult.data.gz", "adult.test.gz"))
    numbers = [ADULT.index(name) for name in ADULT_NUMBERS]
    parts = [t[:, numbers].astype(np.float64) for t in (train, test)]
    columns = list(ADULT_NUMBERS)
    if scale:
        parts = standardized(*parts)
    blocks, codes = [parts], {}
    for name in ADULT_WORDS:
        j = ADULT.index(name)
        values, both = np.unique(np.concatenate([train[:, j], test[:, j]]), return_inverse=True)
        codes[name] = (values, both[: len(train)].astype(np.int32), both[len(train) :].astype(np.int32))
        kept = range(len(values)) if len(values) > 2 else (1,)
        columns += [f"{name} = {values[k]}" for k in kept]
        blocks.append([np.stack([c == k for k in kept], axis=1) for c in codes[name][1:]])
    results = []
    for which, table in enumerate((train, test)):
        x = np.concatenate([block[which] for block in blocks], axis=1, dtype=np.float32, casting="unsafe")
        examples = {"x": x, "y": np.char.startswith(table[:, 14], ">50K").astype(np.int32)}
        results.append(examples | ({"group": codes[group][1 + which]} if group else {}))
    if clients is None:
        return Dataset(results[0], results[1], 2, tuple(columns))
    values, own, own_test = codes[clients]
    return Dataset(results[0], results[1], 2, tuple(columns), own, tuple(f"{clients} = {v}" for v in values), own_test)


def _adult_rows(name: str) -> np.ndarray:
    lines = store.read("adult", name).decode("ascii").splitlines()
    return np.array([line.split(", ") for line in lines if line and not line.startswith("|")])


def german_credit(encoding: str = "numeric", scale: bool = True, group: str | None = None) -> Dataset:
    """1,000 loan applicants; label 1 for a bad credit risk.

    Args:
        encoding: "numeric" is the Statlog file of 24 integer columns; "ordinal" has 20 attributes, the 13 coded ones as
            the last digit of their code.
        scale: whether to scale columns.
        group: "sex_status" (four codes), "sex" (0 male, 1 female) or "age" (0 up to 25); becomes the leaf `group`.
    """
    pick("encoding of german_credit", encoding, ("numeric", "ordinal"))
    words = np.array([line.split() for line in store.read("german_credit", "german.data").decode("ascii").splitlines()])
    if encoding == "numeric":
        text = store.read("german_credit", "german.data-numeric").decode("ascii")
        x = np.array([line.split() for line in text.splitlines()], np.float64)[:, :-1]
    else:
        digits = np.char.startswith(words[:, :20], "A")
        last = np.array([[cell[-1] for cell in row] for row in words[:, :20]])
        x = np.where(digits, last, words[:, :20]).astype(np.float64)
    examples = {"x": standardized(x)[0] if scale else x.astype(np.float32), "y": (words[:, 20] == "2").astype(np.int32)}
    if group is not None:
        pick("group of german_credit", group, ("sex_status", "sex", "age"))
        status = np.searchsorted(SEX_STATUS, words[:, 8])
        choices = {"sex_status": status, "sex": words[:, 8] == "A92", "age": words[:, 12].astype(int) > 25}
        examples["group"] = choices[group].astype(np.int32)
    return Dataset(examples, classes=2, features=tuple(f"attribute {j + 1}" for j in range(x.shape[1])))


SOURCES = (
    Source("adult", "census income", "UCI", "CC BY 4.0", adult),
    Source("german_credit", "Statlog German credit", "UCI", "CC BY 4.0", german_credit),
)
