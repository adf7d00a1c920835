"""Results as labelled series, one per method and swept value."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedstrata.report.format import human_number
from fedstrata.report.history import History


class Series(NamedTuple):
    """The seeds of one setting of one method: one line of a plot, one row of a table.

    Args:
        label: the name of the method and the swept values.
        setting: the swept values.
        history: the seeds.
    """

    label: str
    setting: dict[str, Any]
    history: History


def series(results: Any, who: str) -> list[Series]:
    """Histories or results, by label or in a list, divided into single settings.

    Args:
        results: a dictionary, a list, or one history or result.
        who: the caller, for errors.

    >>> h = History({"step_size": [0.1, 0.01], "seed": [0]}, {"round": [[[0]], [[0]]]})
    >>> [s.label for s in series({"FedAvg": h, "FedProx": h.select(step_size=0.1)}, "plot")]
    ['FedAvg, step_size=0.1', 'FedAvg, step_size=0.01', 'FedProx']
    """
    out = []
    for name, history in _named(results, who):
        swept = [axis for axis, values in history.axes.items() if axis != "seed" and len(values) > 1]
        for setting, runs in history.settings():
            words = ([name] if name else []) + [f"{axis}={_word(setting[axis])}" for axis in swept]
            out.append(Series(", ".join(words) or "run", setting, runs))
    return out


def _named(results: Any, who: str) -> list[tuple[str, History]]:
    named: list[tuple[str, Any]]
    if isinstance(results, Mapping):
        named = [(str(label), result) for label, result in results.items()]
    elif isinstance(results, Iterable) and not isinstance(results, History):
        found = list(results)
        named = [(str(getattr(r, "label", "") or f"run {i}"), r) for i, r in enumerate(found, start=1)]
    else:
        named = [(str(getattr(results, "label", "")), results)]
    if not named:
        raise ValueError(f"{who}: no results to show; give at least one history")
    histories: list[tuple[str, History]] = []
    for label, result in named:
        history = getattr(result, "history", result)
        if not isinstance(history, History):
            raise TypeError(f"{who}: {label!r} is a {type(history).__name__}; a History or a result of run is needed")
        if not len(history):
            raise ValueError(f"{who}: {label!r} recorded no round, so there is nothing to show")
        histories.append((label, history))
    return histories


def _word(value: Any) -> str:
    return human_number(value) if isinstance(value, float) else str(value)
