"""An evaluation at the sites of a run: what the server asks about a solution, and what a site answers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.data.federation import Federation
from fedstrata.errors import unknown
from fedstrata.runtime import onsite
from fedstrata.transport.codec import from_named_arrays, named_arrays
from fedstrata.vector import Vector

if TYPE_CHECKING:
    from fedstrata.runtime.site import Terms


Tells = Literal["nothing", "measures", "scores"]  # what a site lets leave


class Said(NamedTuple):
    """A site's answer. A value is NaN where it has no meaning at the site (no rows, or an AUC of one class)."""

    values: dict[str, Any]  # "split/measure"
    counts: dict[str, Any]  # rows by split
    withheld: Any  # whether scores were asked for, and the site lets none leave
    scores: dict[str, Any]  # by split
    labels: dict[str, Any]  # whether each is the positive one


class Question(NamedTuple):
    """What is asked of every site: measures of some splits, and of some of them the score and label of every row."""

    measures: dict[str, tuple[str, ...]]  # by split, in the order of the answer
    scores: tuple[str, ...]

    @classmethod
    def of(cls, terms: "Terms", splits: Sequence[str] | None = None, scores: Sequence[str] = ()) -> "Question":
        """splits: those to evaluate on (None: all that mean something to the problem); scores: those to send scores of.

        What cannot be answered is refused here, before anybody is asked.
        """
        chosen = dict.fromkeys([*(onsite.meaningful(terms) if splits is None else splits), *scores])
        for split in chosen:
            if split not in terms.shapes:
                raise unknown("split of the sites", str(split), list(terms.shapes))
        for split in scores:
            onsite.score_type(terms, split)
        return cls({split: onsite.measures(terms, split) for split in chosen}, tuple(scores))

    def packed(self, terms: "Terms", x: Vector) -> dict[str, np.ndarray]:
        """The arrays of a call: the solution, and splits by their place in the terms."""
        known = list(terms.shapes)
        places = lambda splits: np.array([known.index(s) for s in splits], np.int32)
        return named_arrays(x, "x") | {"splits": places(self.measures), "scores": places(self.scores)}

    @classmethod
    def unpacked(cls, terms: "Terms", arrays: Mapping[str, np.ndarray]) -> tuple["Question", Vector]:
        left, known = dict(arrays), list(terms.shapes)
        asked = []
        for name in ("splits", "scores"):
            places = left.pop(name, None)
            if places is None or places.dtype != np.int32 or not all(0 <= i < len(known) for i in places.ravel()):
                raise ValueError(f"evaluation: {name!r} must be places among the splits {known}, not {places}")
            asked.append([known[i] for i in places.ravel()])
        x = jax.tree.map(jnp.asarray, from_named_arrays(terms.x0, left, "x"))
        return cls.of(terms, *asked), x

    def read(self, terms: "Terms", arrays: Mapping[str, np.ndarray]) -> Said:
        """A site's answer, checked; a ValueError says what is wrong with it."""
        of_rows = ("said.scores", "said.labels")
        values = {f"{split}/{name}": np.zeros(()) for split, names in self.measures.items() for name in names}
        like = Said(values, dict.fromkeys(self.measures, np.zeros((), np.int64)), np.zeros((), bool), {}, {})
        said = from_named_arrays(like, {n: a for n, a in arrays.items() if not n.startswith(of_rows)}, "said")
        for name, value in said.values.items():
            if np.isinf(value):
                raise ValueError(f"{name} is not finite")
        for split, count in said.counts.items():
            if count < 0:
                raise ValueError(f"split {split!r} cannot have {count} rows")
        sent = () if said.withheld else self.scores
        row = lambda split, dtype: np.broadcast_to(np.zeros((), dtype), (int(said.counts[split]),))
        types = ({s: row(s, onsite.score_type(terms, s)) for s in sent}, {s: row(s, bool) for s in sent})
        scores, labels = (
            from_named_arrays(rows, {n: a for n, a in arrays.items() if n.startswith(name)}, name)
            for name, rows in zip(of_rows, types, strict=True)
        )
        for split, found in scores.items():
            if not np.all(np.isfinite(np.asarray(found, np.float64))):
                raise ValueError(f"scores of split {split!r} are not all finite")
        return said._replace(scores=scores, labels=labels)


def answer(
    terms: "Terms", data: Federation, arrays: Mapping[str, np.ndarray], tells: Tells, site: str
) -> dict[str, np.ndarray]:
    """The arrays of a site's reply to a call, from the data of all its splits."""
    if tells not in get_args(Tells):
        raise unknown(f"setting tells of {site}", str(tells), get_args(Tells))
    if tells == "nothing":
        raise ValueError(
            f'{site} lets no measures leave; a site that does has tells="measures" or "scores" among its own settings'
        )
    question, x = Question.unpacked(terms, arrays)
    problem, send = terms.world.problem, tells == "scores"
    said = Said({}, {}, np.array(bool(question.scores) and not send), {}, {})
    for split, names in question.measures.items():
        rows = onsite.own_rows(data, split, x.scalar_dtype)
        said.counts[split] = np.array(0 if rows is None else rows.weight.shape[0], np.int64)
        found = dict.fromkeys(names, jnp.nan) if rows is None else onsite.measured(problem, x, rows, split)
        said.values.update({f"{split}/{name}": np.asarray(found[name], np.float64) for name in names})
        if split in question.scores and send:
            empty = (np.zeros(0, onsite.score_type(terms, split)), np.zeros(0, bool))
            scores, labels = empty if rows is None else onsite.scored(problem, x, rows)
            said.scores[split], said.labels[split] = np.asarray(scores), np.asarray(labels)
    return named_arrays(said, "said")
