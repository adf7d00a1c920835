"""The ledger against bytes counted by hand, and against the messages themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import ledger
from toys import Repeated, Rows, Scores, TwoPhase, Visits

import fedstrata as fs
from fedstrata.core.algorithm import Algorithm, Phase
from fedstrata.core.memory import PerExample, Pool
from fedstrata.core.placement import Averaged, Broadcast, Gathered, Local, Pooled, Reported, Server
from fedstrata.core.vector import Vector
from fedstrata.engine.codec import message, payload_bytes
from fedstrata.engine.context import start_values
from fedstrata.engine.exchange import Exchange, exchanges
from fedstrata.engine.ledger import nbytes

# 7 float32 and 3 bfloat16 and one float64: 28 + 6 + 8 bytes.
X0 = Vector({"w": jnp.zeros(7, jnp.float32), "b": jnp.zeros(3, jnp.bfloat16), "s": jnp.zeros((), jnp.float64)})
D = 42


def template(algorithm, x0=X0):
    return jax.eval_shape(lambda x: start_values(algorithm, None, x), x0)


def totals(algorithm, cohort=5, x0=X0):
    book = ledger(algorithm, None, template(algorithm, x0), cohort)
    return book.up, book.down


@pytest.mark.parametrize(
    ("algorithm", "up", "down"),
    [
        (fs.FedAvg(0.1, local_steps=9), D, D),  # the model, both ways, however many steps
        (fs.FedProx(0.1, mu=0.5), D, D),
        (fs.FedSGD(0.1), D, D),  # the gradient up, the model down
        (fs.SCAFFOLD(0.1), 2 * D, 2 * D),  # change and control change up, model and control down
        (fs.FedOpt(0.1), D, D),
        (fs.FedOpt(0.1, optimizer=optax.adam), D, D),  # what the optimizer remembers stays at the server
        (fs.FedAdam(0.1), D, D),
    ],
    ids=lambda a: type(a).__name__ if isinstance(a, Algorithm) else str(a),
)
def test_bytes_by_hand(algorithm, up, down):
    assert totals(algorithm) == (up, down)


def test_the_toys_by_hand():
    x0 = Vector(jnp.zeros(3, jnp.float64))
    assert totals(TwoPhase(0.1), x0=x0) == (24 + 24, 24 + 24)  # g up, then x up; x down, then g down
    assert totals(Repeated(0.1, times=4), x0=x0) == (4 * 24, 4 * 24)
    assert totals(Rows(0.1), x0=x0) == (24, 24)  # a gathered row up; nothing of it comes down
    assert totals(Visits(), x0=x0) == (24, 24)  # per-example memory never leaves
    # Scores: x (24) and two numbers (16) both ways; 4 rows of 8 bytes up, the cohort's rows down.
    assert totals(Scores(local_steps=2, batch=2), cohort=5, x0=x0) == (40 + 32, 40 + 5 * 32)


def test_a_client_that_missed_rounds_gets_the_whole_history():
    x0 = Vector(jnp.zeros(3))
    for history in (1, 3):
        book = ledger(Scores(history=history), None, template(Scores(history=history), x0), 5)
        assert book.total("down", rejoining=True) == 40 + 5 * 32 * history
        assert book.total("down") == 40 + 5 * 32
        assert book.total("up", rejoining=True) == book.up


@pytest.mark.parametrize(
    "algorithm",
    [fs.FedAvg(0.1), fs.SCAFFOLD(0.1), fs.FedAdam(0.1), TwoPhase(0.1), Scores(history=2), Rows(0.1)],
    ids=repr,
)
def test_messages_have_the_bytes_of_the_ledger(algorithm):
    state, cohort = start_values(algorithm, None, Vector(jnp.zeros(3))), 1
    book = ledger(algorithm, None, state, cohort)
    found = exchanges(algorithm, None)
    for direction, names in (("up", "sends"), ("down", "receives")):
        sent = [message({f: getattr(state, f) for f in getattr(e, names)}) for e in found]
        weight = sum(payload_bytes(m) * e.repeat for m, e in zip(sent, found, strict=True))
        assert weight == book.total(direction)


def test_entries_name_field_placement_and_phase():
    book = ledger(fs.SCAFFOLD(0.1), None, template(fs.SCAFFOLD(0.1)), 3)
    assert {(e.phase, e.field, e.placement, e.direction, e.bytes) for e in book.entries} == {
        (0, "x", "Broadcast", "down", D),
        (0, "c", "Broadcast", "down", D),
        (0, "dx", "Reported", "up", D),
        (0, "dc", "Reported", "up", D),
    }


def test_nbytes_of_every_kind_of_field():
    assert nbytes(X0) == D
    assert nbytes({}) == 0
    assert nbytes(jnp.zeros((0, 4))) == 0
    assert nbytes(Pool.empty({"s": jnp.zeros(()), "k": jnp.zeros(2, jnp.int8)}, capacity=6)) == 6 * 8 + 6 * 2
    assert nbytes(PerExample(jnp.zeros(5, bool))) == 5


class Every(Algorithm):
    """One field of each placement, and the phases that a test gives it."""

    plan: Any
    local_steps: int = 1

    class State(NamedTuple):
        averaged: Averaged[Vector]
        reported: Reported[Vector]
        gathered: Gathered[Vector]
        pooled: Pooled[Pool]
        broadcast: Broadcast[Vector]
        local: Local[Vector]
        server: Server[Vector]

    def init_server(self, problem, x0):
        return self.State(x0, x0, x0, Pool.empty(jnp.zeros(2, jnp.float32), 3), x0, x0, x0)

    def phases(self, problem):
        return [Phase(self.local_step, **words) for words in self.plan]


UP, DOWN = ("averaged", "reported", "gathered", "pooled"), ("averaged", "pooled", "broadcast")


def test_defaults_of_the_first_and_the_later_phases():
    assert exchanges(Every([{}]), None) == (Exchange(0, DOWN, UP),)
    later = [{"sends": ("reported",)}, {"sends": ("averaged",)}, {"sends": ("pooled",)}, {}]
    received = [e.receives for e in exchanges(Every(later), None)]
    # Later phases receive what the one before merged and may come down, and every Broadcast field.
    assert received == [DOWN, ("broadcast",), ("averaged", "broadcast"), ("pooled", "broadcast")]
    assert totals(Every([{}]), cohort=4) == (3 * D + 24, 2 * D + 4 * 24)
    assert totals(Every([{"repeat": 3}]), cohort=4) == (3 * (3 * D + 24), 3 * (2 * D + 4 * 24))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([{"sends": ("broadcast",)}], "Every: phase 0 sends 'broadcast', but a Broadcast field does not go that way"),
        ([{"sends": ("local",)}], "Every: phase 0 sends 'local', but a Local field"),
        ([{"sends": ("server",)}], "Every: phase 0 sends 'server', but a Server field"),
        ([{}, {"receives": ("reported",)}], "Every: phase 1 receives 'reported', but a Reported field"),
        ([{"receives": ("gathered",)}], "Every: phase 0 receives 'gathered', but a Gathered field"),
        ([{"receives": ("local",)}], "Every: phase 0 receives 'local', but a Local field"),
        ([{"sends": ("avraged",)}], r"unknown field in sends of phase 0 of Every 'avraged'; did you mean averaged\?"),
        ([{"receives": ("nothing",)}], "unknown field in receives of phase 0 of Every 'nothing'"),
        ([{"sends": ("averaged",)}], "no phase sends the Pooled field 'pooled', so its work would be lost"),
        ([{"sends": ("pooled",)}], "no phase sends the Averaged field 'averaged', so its work would be lost"),
    ],
)
def test_impossible_messages_are_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        exchanges(Every(plan), None)


def test_a_smaller_cohort_changes_only_what_is_pooled():
    small, large = (ledger(Every([{}]), None, template(Every([{}])), n) for n in (2, 8))
    assert small.up == large.up
    assert large.down - small.down == 6 * 24
    assert np.sum([e.bytes for e in small.entries if e.direction == "down"]) == small.down
