"""Errors and warnings for users; the error for an unknown name suggests the nearest known ones."""

import difflib
from collections.abc import Iterable


class SetupWarning(UserWarning):
    """Settings that can be run but look like a mistake."""


class StateError(RuntimeError):
    """A file, a disk or another process is not as it must be. The text names it and the remedy."""


def unknown(kind: str, name: object, known: Iterable[object]) -> ValueError:
    """A `ValueError` for a name that does not exist, with the closest known names.

    Args:
        kind: what the name stands for, e.g. "algorithm".
        name: the unknown name.
        known: all known names.

    >>> unknown("algorithm", "FedAvgg", ["FedAvg", "FedProx"])
    ValueError("unknown algorithm 'FedAvgg'; did you mean FedAvg? Known: FedAvg, FedProx.")
    """
    names = sorted(map(str, known))
    hint = did_you_mean(name, names)
    return ValueError(f"unknown {kind} {name!r}; {f'{hint} ' if hint else ''}Known: {', '.join(names) or 'none'}.")


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A question with the closest known names; empty if none is close.

    Args:
        name: the unknown name.
        known: all known names.

    >>> did_you_mean("FedAvgg", ["FedAvg", "FedSGD", "plot"])
    'did you mean FedAvg or FedSGD?'
    """
    folded = {n.lower(): n for n in sorted(map(str, known), reverse=True)}
    near = [folded[n] for n in difflib.get_close_matches(str(name).lower(), list(folded), n=3, cutoff=0.6)]
    return f"did you mean {' or '.join(near)}?" if near else ""
