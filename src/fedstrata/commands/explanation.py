"""What can be said of an algorithm, read from its class: docstring, fields and placed state."""

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.algorithm import Algorithm, Range, oracle_of, reals
from fedstrata.commands import papers
from fedstrata.commands.latex import formulas, readable
from fedstrata.data import Federation
from fedstrata.data.sampling import WithReplacement
from fedstrata.placement import Placement, placements
from fedstrata.problems.average import Average
from fedstrata.problems.bilevel import Bilevel
from fedstrata.problems.fair import Fair
from fedstrata.problems.nested import Nested
from fedstrata.problems.pair_losses import Square
from fedstrata.problems.pairwise import Pairwise
from fedstrata.problems.regularized import Regularized
from fedstrata.prox import Zero
from fedstrata.runtime.start import start_values
from fedstrata.transport.ledger import Entry, ledger
from fedstrata.vector import Vector

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
    """Everything, as plain JSON."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    paragraphs = re.split(r"\n\s*\n", doc)
    words = lambda start: next((" ".join(p.split()) for p in paragraphs if p.startswith(start)), "")
    return {
        "name": cls.__name__,
        "summary": readable(doc.split("\n")[0]),
        "update": formulas(doc),
        "hyperparameters": hyperparameters(cls),
        "state": [{"field": f, "placement": p.name, "reveals": reveals(p)} for f, p in _placed(cls).items()],
        "traffic": traffic(cls, size, cohort),
        "privacy": cls.privacy,
        "convergence": readable(words("Converges")),
        "paper": paper(words("Reference:")),
    }


def hyperparameters(cls: type[Algorithm]) -> list[dict[str, Any]]:
    """Name, meaning, type, range and default, and whether a value has to be given."""
    ranges, hints = reals(cls), get_type_hints(cls)
    out = []
    for entry in dataclasses.fields(cls):
        kind, bounds = hints[entry.name], ranges.get(entry.name)
        default = None if entry.default is dataclasses.MISSING else entry.default
        plain = default if isinstance(default, int | float | str | None) else getattr(default, "__name__", str(default))
        allowed = str(bounds) if bounds else ">= 1" if entry.name == "local_steps" else ""
        name = KINDS.get(getattr(kind, "__name__", str(kind)), "object")
        about = {"name": entry.name, "meaning": _meaning(cls, entry.name), "type": name, "range": allowed}
        out.append({**about, "default": plain, "needed": entry.default is dataclasses.MISSING})
    return out


def _meaning(cls: type, name: str) -> str:
    """What a docstring says after `name:`; that of the class which declares it, where a subclass says nothing."""
    for owner in cls.__mro__:
        doc = " ".join(inspect.cleandoc(owner.__dict__.get("__doc__") or "").split())
        fields = [f.name for f in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
        label = rf"(?:\b(?:{'|'.join(map(re.escape, fields))})\b(?:, )?)+: " if fields else None
        if label is None or name not in fields:
            continue
        if f"`{name}` is not used" in doc:
            return "not used"
        for part in re.finditer(rf"({label})(.*?)(?={label}|Converges|`optimizer` is|>>>|Reference:|$)", doc):
            if name in re.findall(r"\w+", part[1]):
                return readable(part[2]).strip().rstrip(".")
    return ""


def reveals(place: Placement) -> str:
    """What a placement lets others learn, in words."""
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
    """Bytes per client and round for a model of `size` float32 numbers; None where the problem decides them."""
    about = {"parameters": size, "cohort": cohort, "up_bytes": 0, "down_bytes": 0, "fields": [], "note": ""}
    if cls.centralised:
        return about
    x = Vector(jax.ShapeDtypeStruct((size,), jnp.float32))
    loss = lambda w, example: 0.5 * jnp.sum((w - example["x"]) ** 2)
    problems = [Average(loss), Regularized(loss, Zero()), two_levels(x), Fair(loss, groups=2), below(x), ranks(x)]
    needed = oracle_of(cls)
    fitting = [p for p in problems if isinstance(needed, type) and issubclass(p.Oracle, needed)]
    problem = fitting[0] if fitting else problems[0]
    try:
        algorithm = specimen(cls)
        template = jax.eval_shape(lambda x: start_values(algorithm, problem, x), x)
        found = ledger(algorithm, problem, template, cohort)
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


def two_levels(x: Vector) -> Nested:
    """A nested problem to count messages with: a loss, and a function of its expectation."""
    levels = [lambda w, example: jnp.sum(w * example["x"]), lambda y: y**2]
    return Nested(levels).bind(x, Federation.from_clients([{"x": np.zeros((1,), np.float32)}]))


def below(x: Vector) -> Bilevel:
    """A bilevel problem to count messages with; what stays with the clients does not count."""
    upper = lambda w, y, example: jnp.sum(w * example["x"]) + jnp.sum(y)
    return Bilevel(upper, lambda w, y, example: upper(w, y, example) + jnp.sum(y**2), np.zeros(10, np.float32))


def ranks(x: Vector) -> Pairwise:
    """A pairwise problem to count messages with."""
    data = Federation.from_clients([{"x": np.zeros(2, np.float32), "y": np.array([0, 1])}]).by_label()
    score = lambda w, example: jnp.sum(w * example["x"])
    return Pairwise(score, Square()).bind(x, data, WithReplacement(PAIR_BATCH))


def _bytes(entry: Entry) -> int:
    return entry.bytes * max(entry.repeat, 1)  # 0: once


def specimen(cls: type[Algorithm]) -> Any:
    """An algorithm of this class with any allowed values: what travels does not depend on them."""
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
    """The `Reference:` line of a docstring, with the paper behind its key."""
    match = re.match(r"Reference: ([\w-]+)(?:, )?(.*)", reference)
    key, where = (match[1], match[2].rstrip(".")) if match else (None, "")
    cited = papers.citation(key) if key else None
    return {"key": key, "where": where, "citation": cited, "link": papers.link(key) if key else None}
