"""Declared hyper-parameters: each field of an algorithm declares its values once; checks and help follow from that.

step_size: float = real(above=0)                    a real number, which may be swept or scheduled
local_steps: int = whole(1, at_least=1)             a whole number
projection: str = choice("none", "ball", "third")   one of some values, the first by default
separate_samples: bool = flag(False)                yes or no
hypergradient: Hypergradient = instance(Hypergradient, Exact())
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from fedstrata.base.clock import Clock
from fedstrata.base.errors import unknown

Schedule = Callable[[Array], Array]
DECLARED = "declared"  # the key of the declaration in a field's metadata


class Declaration(Protocol):
    """The values that a hyper-parameter may have."""

    @abstractmethod
    def check(self, where: str, value: Any) -> None:
        """Refuse any other value; `where` is "FedAvg: step_size"."""


class Range(NamedTuple):
    """A real number between bounds."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    optional: bool = False

    def holds(self, value: Any) -> bool:
        value = np.asarray(value)
        return bool(
            np.all(np.isfinite(value))
            and (self.above is None or np.all(value > self.above))
            and (self.at_least is None or np.all(value >= self.at_least))
            and (self.below is None or np.all(value < self.below))
            and (self.at_most is None or np.all(value <= self.at_most))
        )

    def check(self, where: str, value: Any) -> None:
        if callable(value) or (value is None and self.optional):
            return
        if value is None or isinstance(value, (str, bool)) or not jnp.issubdtype(np.asarray(value).dtype, jnp.number):
            raise TypeError(f"{where} = {value!r} must be a number or an optax schedule")
        if not self.holds(value):
            raise ValueError(f"{where} = {value} is out of range; it must be {self}")

    def __str__(self) -> str:
        words = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}
        bounds = {k: v for k, v in self._asdict().items() if k in words and v is not None}
        return " and ".join(f"{words[k]} {v:g}" for k, v in bounds.items()) or "finite"


class WholeNumber(NamedTuple):
    """A whole number between bounds."""

    at_least: int | None = None
    at_most: int | None = None
    optional: bool = False

    def check(self, where: str, value: Any) -> None:
        if value is None and self.optional:
            return
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{where} = {value!r} must be {self}")
        low, high = self.at_least, self.at_most
        if (low is not None and int(value) < low) or (high is not None and int(value) > high):
            raise ValueError(f"{where} = {value!r} must be {self}")

    def __str__(self) -> str:
        bounds = [f"{w} {v}" for w, v in ((">=", self.at_least), ("<=", self.at_most)) if v is not None]
        return " ".join(["a whole number", " and ".join(bounds)]).strip() + (", or None" if self.optional else "")


class OneOf(NamedTuple):
    """One of some values."""

    values: tuple[Any, ...]

    def check(self, where: str, value: Any) -> None:
        if not any(value is known or (type(value) is type(known) and value == known) for known in self.values):
            raise unknown(f"value of {where}:", value, self.values)

    def __str__(self) -> str:
        return " or ".join(repr(value) for value in self.values)


class InstanceOf(NamedTuple):
    """An object of some kind: a module with hyper-parameters, or any callable."""

    kind: Any

    def check(self, where: str, value: Any) -> None:
        if self.kind is Callable:
            if not callable(value):
                raise TypeError(f"{where} = {value!r} must be a function")
        elif not isinstance(value, self.kind):
            given = (
                f"{value.__name__}, the class; create one, e.g. {value.__name__}()"
                if isinstance(value, type)
                else repr(value)
            )
            raise TypeError(f"{where} = {given} must be {self}")

    def __str__(self) -> str:
        return "a function" if self.kind is Callable else f"a {self.kind.__name__}"


def declared(declaration: Declaration, default: Any = dataclasses.MISSING) -> Any:
    """A field of an algorithm whose values a declaration checks."""
    given = {} if default is dataclasses.MISSING else {"default": default}
    return eqx.field(metadata={DECLARED: declaration}, **given)


def real(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declare a real hyper-parameter: `step_size: float = real(above=0)`, `mu: float = real(0.1, at_least=0)`.

    Reals may be swept (many values in one compiled program) and may be optax schedules, evaluated at the clock's step
    (or round: `per_round`).

    Args:
        default: its value where none is given; None makes it optional.
        above: a bound that the value exceeds.
        at_least: a bound that the value reaches or exceeds.
        below: a bound that the value stays below.
        at_most: a bound that the value does not exceed.
    """
    return declared(Range(above, at_least, below, at_most, default is None), default)


def whole(default: Any = dataclasses.MISSING, *, at_least: int | None = None, at_most: int | None = None) -> Any:
    """Declare a whole hyper-parameter: `local_steps: int = whole(at_least=1)`.

    Args:
        default: its value where none is given; None makes it optional.
        at_least: the smallest value.
        at_most: the largest value.
    """
    return declared(WholeNumber(at_least, at_most, default is None), default)


def choice(*values: Any, default: Any = dataclasses.MISSING) -> Any:
    """Declare a hyper-parameter that takes one of some values: `projection: str = choice("none", "ball", "third")`.

    Args:
        *values: all of them.
        default: the value where none is given; the first, if left out.
    """
    return declared(OneOf(values), values[0] if default is dataclasses.MISSING else default)


def flag(default: bool) -> Any:
    """Declare a hyper-parameter that is True or False.

    Args:
        default: its value where none is given.
    """
    return declared(OneOf((False, True)), default)


def instance(kind: Any, default: Any = dataclasses.MISSING) -> Any:
    """Declare a hyper-parameter that is an object: `hypergradient: Hypergradient = instance(Hypergradient, Exact())`.

    Args:
        kind: its class; `Callable` for any function.
        default: the object where none is given.
    """
    return declared(InstanceOf(kind), default)


def per_round(schedule: Schedule) -> Schedule:
    """A schedule that counts rounds instead of local steps.

    Args:
        schedule: a function of a count, such as those of optax.
    """
    return _PerRound(schedule)


class _PerRound(eqx.Module):
    schedule: Schedule

    def __call__(self, count: Array) -> Array:
        return self.schedule(count)


def declarations(algorithm: Any) -> dict[str, Declaration]:
    """The declared hyper-parameters of an algorithm, or of its class, by name."""
    return {f.name: f.metadata[DECLARED] for f in dataclasses.fields(algorithm) if DECLARED in f.metadata}


def check_values(algorithm: Any) -> None:
    """Refuse hyper-parameters that their declarations do not allow; traced values pass."""
    for name, declaration in declarations(algorithm).items():
        value = getattr(algorithm, name)
        if not isinstance(value, Tracer | jax.ShapeDtypeStruct):
            declaration.check(f"{type(algorithm).__name__}: {name}", value)


def reals(algorithm: Any) -> dict[str, Range]:
    """The declared real hyper-parameters and their ranges."""
    return {name: found for name, found in declarations(algorithm).items() if isinstance(found, Range)}


def is_number(value: Any) -> bool:
    """Whether a real hyper-parameter is one number, which can be checked before a run; a schedule is not.

    >>> is_number(0.1), is_number(lambda step: 0.1 / (step + 1))
    (True, False)
    """
    return isinstance(value, float | int)


def hyperparameters(algorithm: Any) -> dict[str, Any]:
    """All hyper-parameters by name, as given."""
    return {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}


def with_values(algorithm: Any, **values: Any) -> Any:
    """A copy with other hyper-parameters; checks names and ranges."""
    known = [f.name for f in dataclasses.fields(algorithm)]
    for name in values:
        if name not in known:
            raise unknown(f"hyper-parameter of {type(algorithm).__name__}", name, known)
    return dataclasses.replace(algorithm, **values)


def as_arrays(algorithm: Any, dtype: Any) -> Any:
    """Reals as arrays of the parameters' dtype: a new value then never recompiles, and a sweep is a vmap."""
    names = [n for n in reals(algorithm) if getattr(algorithm, n) is not None]
    values = {n: v if callable(v) else jnp.asarray(v, dtype) for n in names for v in [getattr(algorithm, n)]}
    return dataclasses.replace(algorithm, **values)


def at_time(algorithm: Any, clock: Clock, dtype: Any) -> Any:
    """The algorithm with every schedule replaced by its value at this clock."""
    scheduled = {n: s for n in reals(algorithm) if callable(s := getattr(algorithm, n))}
    now = {
        n: jnp.asarray(s(clock.round if isinstance(s, _PerRound) else clock.step), dtype) for n, s in scheduled.items()
    }
    return dataclasses.replace(algorithm, **now) if now else algorithm
