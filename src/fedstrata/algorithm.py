"""The interface of an algorithm: a placed state, and the maths of one client step and one server step."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray

from fedstrata.clock import Clock
from fedstrata.directions import Direction
from fedstrata.errors import unknown
from fedstrata.placement import placements
from fedstrata.vector import Vector

Schedule = Callable[[Array], Array]


class Range(NamedTuple):
    """The values that a real hyper-parameter may take."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def holds(self, value: Any) -> bool:
        value = np.asarray(value)
        return bool(
            np.all(np.isfinite(value))
            and (self.above is None or np.all(value > self.above))
            and (self.at_least is None or np.all(value >= self.at_least))
            and (self.below is None or np.all(value < self.below))
            and (self.at_most is None or np.all(value <= self.at_most))
        )

    def __str__(self) -> str:
        words = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}
        return " and ".join(f"{words[k]} {v:g}" for k, v in self._asdict().items() if v is not None) or "finite"


def real(default: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """Declare a real hyper-parameter: `step_size: float = real(above=0)`, `mu: float = real(0.1, at_least=0)`.

    Reals may be swept (many values in one compiled program) and may be optax schedules, read at the clock's step
    (or round: `per_round`). Bounds: `above`, `at_least`, `below`, `at_most`.
    """
    given = {} if default is dataclasses.MISSING else {"default": default}
    return eqx.field(metadata={"range": Range(**bounds)}, **given)


def per_round(schedule: Schedule) -> Schedule:
    """A schedule that counts rounds instead of local steps."""
    at = lambda count: schedule(count)
    at.counts_rounds = True  # pyright: ignore[reportFunctionMemberAccess]
    return at


class Cohort(NamedTuple):
    """What the server knows of the clients of this round, beside what they sent."""

    clock: Clock
    ids: Int[Array, " m"]
    present: Array  # (m,) False where a slot of a given schedule is empty
    weights: Array  # (m,) sums to one
    key: PRNGKeyArray
    clients: int  # N, in the whole federation
    share: Array  # Σ p_i over the clients present, of the weights p_i that sum to one over all N

    @property
    def count(self) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """How many clients are present, traced, in the dtype of the weights (a tuple's own `count` is of no use)."""
        return jnp.sum(self.present.astype(self.weights.dtype))


class Phase(NamedTuple):
    """One exchange of a round: clients run `steps` steps, send, the server merges and steps.

    sends: the fields that go up and are merged (None: all that go up); "h.1" is the second part of a field that is a
    tuple. receives: the fields that come down at its start (None: everything in the first phase; later, what the
    previous phase merged and every Broadcast field). A client keeps its own copy of what it does not receive.
    begin, end: called once before the first step and once after the last, each on a sample that no step draws.
    repeat: this many exchanges of this kind in a row.
    when: `when(server_state, cohort, repetition) -> bool`, traced; where False the exchange changes nothing.
    fresh: draw samples of its own; otherwise samples are keyed by the local step, and phases share them.
    first: the local step that its first step counts as, for samples and schedules.
    streams: the problem's samples that it looks at (None: all), which is what counts as examples seen; one that it
    draws from several times in a step is named as often.
    """

    step: Callable[..., Any]
    steps: int = 1
    sends: tuple[str, ...] | None = None
    receives: tuple[str, ...] | None = None
    server_step: Callable[..., Any] | None = None
    begin: Callable[..., Any] | None = None
    end: Callable[..., Any] | None = None
    repeat: int = 1
    when: Callable[..., Any] | None = None
    fresh: bool = False
    first: int = 0
    streams: tuple[str, ...] | None = None


class Algorithm(eqx.Module):
    """A federated method: one placed state, one local step. Everything else is derived or has a default.

    `start` is the state as the exchange began (after the last merge), `state` the one being worked on. Every field
    needs a start value from `init_server`; it looks at no data. `init_client` may change what depends on data.
    """

    State: ClassVar[Any]
    merge_at_init: ClassVar[bool] = False  # merge what `init_client` made of all clients, before round 0
    centralised: ClassVar[bool] = False  # runs on the pooled data of all clients, and sends nothing
    privacy: ClassVar[str] = ""  # what its messages reveal beyond what placements say
    if not TYPE_CHECKING:  # a type checker would take it for the first field of every algorithm; see `steps_of`
        local_steps: eqx.AbstractVar[int]

    def init_server(self, problem: Any, x0: Vector) -> Any:
        raise TypeError(f"{type(self).__name__} must define init_server(problem, x0) -> State")

    def init_client(self, oracle: Any, view: Any) -> Any:
        """Local, Pooled and per-client starts; may look at this client's data."""
        return view

    def server_start(self, problem: Any, merged: Any, cohort: Cohort) -> Any:
        """Once, after the merge of `merge_at_init`."""
        return merged

    def client_start(self, oracle: Any, start: Any, state: Any) -> Any:
        """Once on every client, after the merge of `merge_at_init`, before round 0.

        `start` has what was merged, `state` is the client's own as `init_client` left it. What it changes of Pooled
        fields is pooled once more.
        """
        return state

    def local_begin(self, oracle: Any, start: Any, state: Any) -> Any:
        """Once a round, before the first local step; on a sample that no step draws."""
        return state

    def local_step(self, oracle: Any, start: Any, state: Any) -> Any:
        raise TypeError(f"{type(self).__name__} must define local_step(oracle, start, state) -> State")

    def local_end(self, oracle: Any, start: Any, state: Any) -> Any:
        """Once a round, after the last local step and before sending; on a sample that no step draws."""
        return state

    def server_step(self, problem: Any, start: Any, merged: Any, cohort: Cohort) -> Any:
        return merged

    def solution(self, problem: Any, state: Any) -> Vector:
        raise TypeError(f"{type(self).__name__} must define solution(problem, state) -> Vector")

    def check(self, problem: Any) -> None:
        """Refuse a problem with which these hyper-parameters cannot work, before anything compiles."""

    def diagnose(self, problem: Any, state: Any, x: Vector, gradient: Vector) -> dict[str, Any]:
        """More to record at an evaluation: numbers about the method's own state, given ∇f at its solution x."""
        return {}

    def observe(self, problem: Any, local: Any, x: Vector, full: Any) -> dict[str, Any]:
        """More to record that only a simulation can see: `local["y"]` is the Local field y of all clients, stacked."""
        return {}

    def modes(self) -> dict[str, Direction]:
        """The directions ("max", "min" or "none") of the columns that `diagnose` and `observe` add."""
        return {}

    def phases(self, problem: Any) -> list[Phase]:
        """The exchanges of a round; one by default."""
        begin, end, server = self.local_begin, self.local_end, self.server_step
        return [Phase(self.local_step, steps_of(self), begin=begin, end=end, server_step=server)]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "State" in cls.__dict__:
            placements(cls.State)  # a field without a placement is refused where the class is defined

    def __check_init__(self) -> None:
        name = type(self).__name__
        for field, bounds in reals(self).items():
            value = getattr(self, field)
            if callable(value) or isinstance(value, (Tracer, jax.ShapeDtypeStruct)) or value is None:
                continue
            if isinstance(value, (str, bool)) or not jnp.issubdtype(np.asarray(value).dtype, jnp.number):
                raise TypeError(f"{name}: {field} = {value!r} must be a number or an optax schedule")
            if not bounds.holds(value):
                raise ValueError(f"{name}: {field} = {value} is out of range; it must be {bounds}")
        steps = steps_of(self)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"{name}: local_steps = {steps!r} must be a whole number >= 1")


def steps_of(algorithm: Algorithm) -> int:
    """Local steps in a round: a field or a constant of every algorithm."""
    return algorithm.local_steps  # pyright: ignore[reportAttributeAccessIssue]


def reals(algorithm: Algorithm | type[Algorithm]) -> dict[str, Range]:
    """The declared real hyper-parameters and their ranges."""
    return {f.name: f.metadata["range"] for f in dataclasses.fields(algorithm) if "range" in f.metadata}


def hyperparameters(algorithm: Algorithm) -> dict[str, Any]:
    """All hyper-parameters by name, as given."""
    return {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}


def with_values(algorithm: Algorithm, **values: Any) -> Any:
    """A copy with other hyper-parameters; checks names and ranges."""
    known = [f.name for f in dataclasses.fields(algorithm)]
    for name in values:
        if name not in known:
            raise unknown(f"hyper-parameter of {type(algorithm).__name__}", name, known)
    return dataclasses.replace(algorithm, **values)


def as_arrays(algorithm: Algorithm, dtype: Any) -> Any:
    """Reals as arrays of the parameters' dtype: a new value then never recompiles, and a sweep is a vmap."""
    names = [n for n in reals(algorithm) if getattr(algorithm, n) is not None]
    values = {n: v if callable(v) else jnp.asarray(v, dtype) for n in names for v in [getattr(algorithm, n)]}
    return dataclasses.replace(algorithm, **values)


def at_time(algorithm: Algorithm, clock: Clock, dtype: Any) -> Any:
    """The algorithm with every schedule replaced by its value now."""
    scheduled = {n: s for n in reals(algorithm) if callable(s := getattr(algorithm, n))}
    now = {
        n: jnp.asarray(s(clock.round if getattr(s, "counts_rounds", False) else clock.step), dtype)
        for n, s in scheduled.items()
    }
    return dataclasses.replace(algorithm, **now) if now else algorithm


def oracle_of(cls: type[Algorithm]) -> type | None:
    """The oracle type that an algorithm asks for: in its local step, or in the steps of its phases."""
    names = ("local_step", *(name for owner in cls.__mro__ for name in vars(owner)))
    steps = (step for name in names if "oracle" in getattr(step := getattr(cls, name, None), "__annotations__", {}))
    found = (oracle_needed(step) for step in steps if step is not None)
    return next((kind for kind in found if isinstance(kind, type) and kind is not Any), None)


def oracle_needed(step: Callable[..., Any]) -> type | None:
    """The oracle type that a step asks for, read from its annotation."""
    step = step.func if isinstance(step, partial) else step
    return get_type_hints(getattr(step, "__func__", step)).get("oracle")
