"""The interface of an algorithm: a placed state, and the maths of one client step and one server step."""

import dataclasses
import difflib
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fedstrata.base.clock import Clock
from fedstrata.base.directions import Direction
from fedstrata.core.hyperparameters import check_values
from fedstrata.core.placement import PlacedState, placements
from fedstrata.core.vector import Vector


class Cohort(NamedTuple):
    """The clients of a round, as a server step sees them.

    Args:
        clock: round and step.
        ids: (m,) the numbers of the clients.
        present: (m,) False where a slot of a given schedule is empty.
        weights: (m,) of the clients; they sum to one.
        key: randomness of the server in this round.
        clients: N, in the whole federation.
        share: Σ p_i over the clients present, of the weights p_i that sum to one over all N.
    """

    clock: Clock
    ids: Int[Array, " m"]
    present: Array
    weights: Array
    key: PRNGKeyArray
    clients: int
    share: Array

    @property
    def count(self) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of clients present, traced, in the dtype of the weights. It hides the method of tuples."""
        return jnp.sum(self.present.astype(self.weights.dtype))


class Phase(NamedTuple):
    """One exchange of a round: clients run `steps` steps, send, the server merges and steps.

    Args:
        step: `step(oracle, start, state) -> State`, on the clients.
        steps: how often it runs.
        sends: the fields that go up and are merged (None: all that go up); "h.1" is the second part of a field that is
            a tuple.
        receives: the fields that come down at its start (None: everything in the first phase; later, what the previous
            phase merged and every Broadcast field). A client keeps its own copy of what it does not receive.
        server_step: `server_step(problem, start, merged, cohort) -> State`, after the merge.
        begin: called once before the first step, on a sample that no step draws.
        end: called once after the last step, on a sample that no step draws.
        repeat: the number of such exchanges in a row.
        when: `when(server_state, cohort, repetition) -> bool`, traced; where False the exchange changes nothing.
        fresh: draw separate samples; otherwise samples are keyed by the local step, and phases share them.
        first: the number of its first local step, for samples and schedules.
        streams: the problem's streams that it draws from (None: all), which count as examples seen; one that is drawn
            several times in a step is named as often.
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


class StateWithX(PlacedState, Protocol):
    """A state whose field x is the solution: what code for several states takes."""

    @property
    def x(self) -> Vector: ...


class _NamedArguments(type(eqx.Module)):
    """Errors for wrong arguments of a constructor that suggest the nearest right one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fields = [f for f in dataclasses.fields(cast(Any, cls)) if f.init]
        names = [f.name for f in fields]
        for wrong in [name for name in kwargs if name not in names]:
            near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{cls.__name__} has no hyper-parameter {wrong!r}; {hint}It has: {', '.join(names)}.")
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} takes {len(names)} hyper-parameters, not {len(args)}: {', '.join(names)}.")
        absent = [f.name for f in fields[len(args) :] if _required(f) and f.name not in kwargs]
        if absent:
            raise TypeError(f"{cls.__name__} needs {', '.join(absent)}: give {cls.__name__}({absent[0]}=...)")
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        """`FedNMap.theory` and the like, for one release. The functions are now in `theory.py` of the family."""
        found, home = None, f"{cls.__module__.rpartition('.')[0]}.theory"
        inside = cls.__name__.lower() + name.removeprefix("theory")
        if name.startswith("theory") and importlib.util.find_spec(home):
            found = getattr(importlib.import_module(home), inside, None)
        if found is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        text = f"{cls.__name__}.{name} is now {home}.{inside}; the old place will be removed in the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return found


def _required(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


class Algorithm(eqx.Module, metaclass=_NamedArguments):
    """A federated method: one placed state, one local step. Everything else is derived or has a default.

    `start` is the state when the exchange began (after the last merge), `state` the current one. Every field needs a
    start value from `init_server`, which reads no data. `init_client` may change fields that depend on data.
    """

    State: ClassVar[Any]
    oracle: ClassVar[Any] = None  # the oracle that its steps use; None: any
    merge_at_init: ClassVar[bool] = False  # merge all clients' results of `init_client` before round 0
    centralised: ClassVar[bool] = False  # runs on the pooled data of all clients, and sends nothing
    variant_of: ClassVar["type[Algorithm] | None"] = None  # a sibling whose settings in an experiment suit it too
    privacy: ClassVar[str] = ""  # what its messages reveal beyond what follows from placements
    if not TYPE_CHECKING:  # for a type checker it would be the first field of every algorithm; see `steps_of`
        local_steps: eqx.AbstractVar[int]

    def init_server(self, problem: Any, x0: Vector) -> Any:
        raise TypeError(f"{type(self).__name__} must define init_server(problem, x0) -> State")

    def init_client(self, oracle: Any, view: Any) -> Any:
        """Starts that depend on this client's data: of `Local`, `Pooled` and other fields."""
        return view

    def server_start(self, problem: Any, merged: Any, cohort: Cohort) -> Any:
        """Once, after the merge of `merge_at_init`."""
        return merged

    def client_start(self, oracle: Any, start: Any, state: Any) -> Any:
        """Once on every client, after the merge of `merge_at_init`, before round 0.

        `start` has the merged fields, `state` is the client's from `init_client`. If it changes `Pooled` fields, they
        are pooled again.
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
        """More columns at an evaluation: numbers about the method's state, given ∇f at its solution x."""
        return {}

    def observe(self, problem: Any, local: Any, x: Vector, full: Any) -> dict[str, Any]:
        """More columns, in simulations only: `local["y"]` is the `Local` field y of all clients, stacked."""
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
        check_values(self)
        steps = steps_of(self)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"{type(self).__name__}: local_steps = {steps!r} must be a whole number >= 1")


def steps_of(algorithm: Algorithm) -> int:
    """Local steps in a round: a field or a constant of every algorithm."""
    return cast(Any, algorithm).local_steps
