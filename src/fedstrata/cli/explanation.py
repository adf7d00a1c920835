"""The contents of `fedstrata explain`, from an algorithm's class: docstring, declared fields and placements."""

import dataclasses
import itertools
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.base import docstrings
from fedstrata.base.docstrings import Docstring
from fedstrata.cli import bibliography
from fedstrata.cli.latex import formulas, readable
from fedstrata.core.algorithm import Algorithm
from fedstrata.core.hyperparameters import Range, declarations, reals
from fedstrata.core.placement import Placement, placements
from fedstrata.core.vector import Vector
from fedstrata.data import Federation
from fedstrata.data.sampling import WithReplacement
from fedstrata.engine.context import RoundContext
from fedstrata.engine.exchange import exchanges
from fedstrata.engine.ledger import Entry, Ledger, ledger
from fedstrata.engine.participation import Everyone
from fedstrata.problems.average import Average
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.fair import Fair
from fedstrata.problems.nested import Nested
from fedstrata.problems.pairwise.pair_losses import Square
from fedstrata.problems.pairwise.problem import Pairwise
from fedstrata.problems.regularized import Regularized
from fedstrata.prox import Zero

PAIR_BATCH = 32
KINDS = {
    "float": "number",
    "int": "whole number",
    "int | None": "whole number, or None",
    "float | None": "number, or None",
    "str": "word",
    "bool": "True or False",
    "Callable": "optax optimizer",
}


def explain(cls: type[Algorithm], size: int, cohort: int) -> dict[str, Any]:
    """Everything, as plain JSON.

    Args:
        cls: the algorithm.
        size: how many numbers a model has, for counting bytes.
        cohort: clients that take part in a round.
    """
    parts = docstrings.read(cls)
    return {
        "name": cls.__name__,
        "summary": readable(parts.summary),
        "update": formulas(cls.__doc__ or ""),
        "hyperparameters": hyperparameters(cls),
        "state": [{"field": f, "placement": p.name, "reveals": reveals(p)} for f, p in _placed(cls).items()],
        "traffic": traffic(cls, size, cohort),
        "privacy": cls.privacy,
        **convergence(parts),
        "paper": paper(parts.starting("Reference:").removeprefix("Reference:").strip()),
    }


def convergence(parts: Docstring) -> dict[str, list[str]]:
    """What a method converges to, what it does not do, and other notes.

    A docstring has them as sections `Converges to:` and `Does not:`, or as bullets that start with these words. Where
    it has neither, a paragraph that starts with "Converges" is taken.

    Args:
        parts: the docstring.
    """
    found = {"converges_to": parts.items("Converges to"), "does_not": parts.items("Does not"), "notes": []}
    starts = {"Converges to ": "converges_to", "Does not ": "does_not", "Converges ": "converges_to"}
    for bullet in parts.bullets:
        words = bullet.replace("*Converges to*", "Converges to").replace("*Does not*", "Does not")
        start = next((start for start in starts if words.startswith(start)), None)
        found[starts[start] if start else "notes"].append(words if start is None else _after(words, start))
    if not any(found.values()):
        first, does_not, rest = parts.starting("Converges").partition(" Does not ")
        found["converges_to"] += [_after(first, "Converges to ")] if first else []
        found["does_not"] += [rest] if does_not else []
    return {key: [readable(text) for text in texts] for key, texts in found.items()}


def _after(words: str, start: str) -> str:
    return words if start == "Converges " else words.removeprefix(start)


def hyperparameters(cls: type[Algorithm]) -> list[dict[str, Any]]:
    """Name, meaning, type, range and default, and whether a value has to be given.

    Args:
        cls: the algorithm.
    """
    ranges, hints = declarations(cls), get_type_hints(cls)
    out = []
    for entry in dataclasses.fields(cls):
        kind, allowed = hints[entry.name], ranges.get(entry.name)
        default = None if entry.default is dataclasses.MISSING else entry.default
        plain = default if isinstance(default, int | float | str | None) else getattr(default, "__name__", str(default))
        words = "" if allowed is None else str(allowed)
        words += ", or None" if isinstance(allowed, Range) and allowed.optional else ""
        name = KINDS.get(getattr(kind, "__name__", str(kind)), "object")
        about = {"name": entry.name, "meaning": _meaning(cls, entry.name), "type": name, "range": words}
        out.append({**about, "default": plain, "needed": entry.default is dataclasses.MISSING})
    return out


def _meaning(cls: type, name: str) -> str:
    """What `Args:` has for a hyper-parameter, in the docstring of the class or of one that it extends."""
    texts = (docstrings.read(owner).arguments().get(name) for owner in cls.__mro__)
    return readable(next(filter(None, texts), "")).rstrip(".")


def reveals(place: Placement) -> str:
    """What a placement lets others learn, in words.

    Args:
        place: the placement of a field of the state.
    """
    if place.merge == "mean":
        others = "other clients see the mean" if place.down else "other clients never see it"
        return f"the server sees each client's own value, unless aggregation is secured, then only the mean; {others}"
    if place.merge == "rows":
        return "the server sees each client's own value and whose it is; secure aggregation cannot hide it"
    if place.merge == "union":
        return "every row of every client is seen by the server and by all clients"
    if place.down:
        return "all clients see it; it holds only what the server made of merged values"
    return "never leaves its client" if place.held == "by client" else "never leaves the server"


def traffic(cls: type[Algorithm], size: int, cohort: int) -> dict[str, Any] | None:
    """Bytes per client and round; None if they depend on the problem.

    Args:
        cls: the algorithm.
        size: how many float32 numbers a model has.
        cohort: clients that take part in a round.
    """
    about = {"parameters": size, "cohort": cohort, "up_bytes": 0, "down_bytes": 0, "fields": [], "note": ""}
    if cls.centralised:
        return about
    x = Vector(jax.ShapeDtypeStruct((size,), jnp.float32))
    loss = lambda w, example: 0.5 * jnp.sum((w - example["x"]) ** 2)
    problems = [Average(loss), Regularized(loss, Zero()), two_levels(x), Fair(loss, groups=2), below(x), ranks(x)]
    needed = cls.oracle
    fitting = [p for p in problems if isinstance(needed, type) and issubclass(p.Oracle, needed)]
    problem = fitting[0] if fitting else problems[0]
    try:
        found = _counted(specimen(cls), problem, x, cohort)
    except (AttributeError, TypeError, ValueError):  # it solves another kind of problem
        return None
    row = lambda e: {"field": e.field, "placement": e.placement, "direction": e.direction, "bytes": _bytes(e)}
    notes = ["two levels, the inner one of one number"] if isinstance(problem, Nested) else []
    notes += ["two groups"] if isinstance(problem, Fair) else []
    notes += ["a lower variable of ten numbers"] if isinstance(problem, Bilevel) else []
    notes += [f"a step of {PAIR_BATCH} scores of each set"] if isinstance(problem, Pairwise) else []
    notes += [f"{e.field} once, before the first round" for e in found.entries if e.repeat == 0]
    fields = [row(e) for e in found.entries]
    return {**about, "up_bytes": found.up, "down_bytes": found.down, "fields": fields, "note": "; ".join(notes)}


def _counted(algorithm: Algorithm, problem: Any, x: Vector, cohort: int) -> Ledger:
    """The ledger of a round, from shapes alone: a model of any size uses no memory."""
    context = RoundContext(
        problem=problem,
        algorithm=algorithm,
        sampler=WithReplacement(PAIR_BATCH),
        participation=Everyone(),
        data={},  # messages do not depend on the data
        counts=None,
        total=None,
        exchanges=exchanges(algorithm, problem),
        clients=cohort,
    )
    return ledger(context, jax.eval_shape(lambda x: context.at_start(algorithm, x).template, x))


def two_levels(x: Vector) -> Nested:
    """A nested problem to count messages with: a loss, and a function of its expectation.

    Args:
        x: the parameters.
    """
    levels = [lambda w, example: jnp.sum(w * example["x"]), lambda y: y**2]
    return Nested(levels).bind(x, Federation.from_clients([{"x": np.zeros((1,), np.float32)}]))


def below(x: Vector) -> Bilevel:
    """A bilevel problem to count messages with; `Local` fields do not count.

    Args:
        x: the parameters.
    """
    upper = lambda w, y, example: jnp.sum(w * example["x"]) + jnp.sum(y)
    return Bilevel(upper, lambda w, y, example: upper(w, y, example) + jnp.sum(y**2), np.zeros(10, np.float32))


def ranks(x: Vector) -> Pairwise:
    """A pairwise problem to count messages with.

    Args:
        x: the parameters.
    """
    data = Federation.from_clients([{"x": np.zeros(2, np.float32), "y": np.array([0, 1])}]).by_label()
    score = lambda w, example: jnp.sum(w * example["x"])
    return Pairwise(score, Square()).bind(x, data, WithReplacement(PAIR_BATCH))


def _bytes(entry: Entry) -> int:
    return entry.bytes * max(entry.repeat, 1)  # 0: once


def specimen(cls: type[Algorithm]) -> Any:
    """An algorithm of this class with any allowed values: messages do not depend on them.

    Args:
        cls: the algorithm.
    """
    ranges = reals(cls)
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    values: dict[str, Any] = {name: _inside(ranges[name]) if name in ranges else 1 for name in needed}
    return cls(**values)


def _inside(bounds: Range) -> float:
    low = next((v for v in (bounds.above, bounds.at_least) if v is not None), None)
    high = next((v for v in (bounds.below, bounds.at_most) if v is not None), None)
    if low is None:
        return 0.0 if high is None else high - 1
    return low + 1 if high is None else (low + high) / 2


def _placed(cls: type[Algorithm]) -> dict[str, Placement]:
    return {} if cls.centralised else placements(cls.State)


def paper(reference: str) -> dict[str, Any]:
    """The key of a paper, the place in it, and the paper behind the key.

    >>> found = paper("mcmahan2017, Algorithm 1.")
    >>> found["key"], found["where"]
    ('mcmahan2017', 'Algorithm 1')

    Args:
        reference: what a docstring has after `Reference:`.
    """
    key = "".join(itertools.takewhile(lambda letter: letter.isalnum() or letter in "-_", reference)) or None
    where = reference.removeprefix(key or "").removeprefix(",").strip().rstrip(".")
    cited = bibliography.citation(key) if key else None
    return {"key": key, "where": where, "citation": cited, "link": bibliography.link(key) if key else None}
