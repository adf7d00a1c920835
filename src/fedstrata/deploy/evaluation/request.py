"""An evaluation at the sites of a run: the server's request about a solution, and a site's reply."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.base.errors import unknown
from fedstrata.core.vector import Vector
from fedstrata.data.federation import Federation
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.evaluation import local
from fedstrata.deploy.messages import NotFinite
from fedstrata.engine.codec import from_named_arrays, named_arrays

Tells = Literal["nothing", "measures", "scores"]  # what may leave a site
REPLY = "said"  # the prefix of a reply's arrays


class Reply(NamedTuple):
    """A site's reply. A value is NaN if it is undefined at the site (no rows, or an AUC of one class)."""

    values: dict[str, np.ndarray]  # by "split/measure"
    counts: dict[str, np.ndarray]  # rows by split
    withheld: np.ndarray  # whether scores were requested, and the site does not send them
    scores: dict[str, np.ndarray]  # by split
    labels: dict[str, np.ndarray]  # by split: whether each label is the positive one


class Request(NamedTuple):
    """What every site is to send: measures of some splits, and for some of these the score and label of every row."""

    measures: dict[str, tuple[str, ...]]  # by split, in the order of the reply
    scores: tuple[str, ...]  # splits

    @classmethod
    def of(cls, agreement: Agreement, splits: Sequence[str] | None = None, scores: Sequence[str] = ()) -> "Request":
        """A request that the sites of this run can answer; a ValueError otherwise.

        Args:
            agreement: of the run.
            splits: to evaluate on; None: all that the problem can evaluate.
            scores: splits of which sites send the score and label of every row.
        """
        chosen = dict.fromkeys([*(local.meaningful(agreement) if splits is None else splits), *scores])
        for split in chosen:
            if split not in agreement.shapes:
                raise unknown("split of the sites", str(split), list(agreement.shapes))
        for split in scores:
            local.score_type(agreement, split)
        return cls({split: local.measures(agreement, split) for split in chosen}, tuple(scores))

    def packed(self, agreement: Agreement, x: Vector) -> dict[str, np.ndarray]:
        """The arrays of a call: the solution, and splits by their place in the agreement.

        Args:
            agreement: of the run.
            x: the solution.
        """
        names = list(agreement.shapes)
        places = lambda splits: np.array([names.index(s) for s in splits], np.int32)
        return named_arrays(x, "x") | {"splits": places(self.measures), "scores": places(self.scores)}

    @classmethod
    def unpacked(cls, agreement: Agreement, arrays: Mapping[str, np.ndarray]) -> tuple["Request", Vector]:
        """The request and the solution in a call's arrays; a ValueError if they are malformed."""
        left, names = dict(arrays), list(agreement.shapes)
        requested: list[list[str]] = []
        for name in ("splits", "scores"):
            places = left.pop(name, None)
            fits = places is not None and places.dtype == np.int32 and places.size <= len(names)
            if places is None or not fits or not all(0 <= i < len(names) for i in places.ravel()):
                shown = "missing" if places is None else f"{places.dtype}{places.shape}"
                raise ValueError(f"evaluation: {name!r} must be places among the splits {names}, and is {shown}")
            requested.append([names[i] for i in places.ravel()])
        x = jax.tree.map(jnp.asarray, from_named_arrays(agreement.x0, left, "x"))
        return cls.of(agreement, *requested), x

    def read(self, agreement: Agreement, site: int, arrays: Mapping[str, np.ndarray]) -> Reply:
        """A site's reply, checked; a ValueError if it is invalid.

        Args:
            agreement: of the run.
            site: its number.
            arrays: of the reply.
        """
        of_rows = (f"{REPLY}.scores", f"{REPLY}.labels")
        values = {f"{split}/{name}": np.zeros(()) for split, names in self.measures.items() for name in names}
        like = Reply(values, dict.fromkeys(self.measures, np.zeros((), np.int64)), np.zeros((), bool), {}, {})
        reply: Reply = from_named_arrays(like, {n: a for n, a in arrays.items() if not n.startswith(of_rows)}, REPLY)
        for name, value in reply.values.items():
            if np.isinf(value):
                raise NotFinite(f"{name} is not finite")
        for split, count in reply.counts.items():
            if count != (agreed := agreement.rows[split][site]):
                raise ValueError(f"split {split!r} has {count} rows, and {agreed} by the agreement")
        sent = () if reply.withheld else self.scores
        row = lambda split, dtype: np.broadcast_to(np.zeros((), dtype), (int(reply.counts[split]),))
        types = ({s: row(s, local.score_type(agreement, s)) for s in sent}, {s: row(s, bool) for s in sent})
        scores, labels = (
            from_named_arrays(rows, {n: a for n, a in arrays.items() if n.startswith(name)}, name)
            for name, rows in zip(of_rows, types, strict=True)
        )
        for split, found in scores.items():
            if not np.all(np.isfinite(np.asarray(found, np.float64))):
                raise NotFinite(f"scores of split {split!r} are not all finite")
        return reply._replace(scores=scores, labels=labels)


def answer(
    agreement: Agreement,
    data: Federation,
    arrays: Mapping[str, np.ndarray],
    tells: Tells,
    site: str,
    allowed: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of a site's reply to an evaluation.

    Args:
        agreement: of the run.
        data: all splits of the site.
        arrays: of the call.
        tells: what may leave the site.
        site: its name, for error messages.
        allowed: splits whose scores may be requested; None: all.
    """
    if tells not in get_args(Tells):
        raise unknown(f"setting tells of {site}", str(tells), get_args(Tells))
    if tells == "nothing":
        raise ValueError(
            f'{site} sends no measures; to allow it, the site sets tells="measures" or "scores" in its settings'
        )
    request, x = Request.unpacked(agreement, arrays)
    if other := [split for split in request.scores if allowed is not None and split not in allowed]:
        raise ValueError(f"{site}: the app does not request scores of split {other[0]!r}, and the server does")
    problem, send = agreement.context.problem, tells == "scores"
    reply = Reply({}, {}, np.array(bool(request.scores) and not send), {}, {})
    for split, names in request.measures.items():
        rows = local.own_rows(data, split, x.scalar_dtype)
        reply.counts[split] = np.array(0 if rows is None else rows.weight.shape[0], np.int64)
        found = dict.fromkeys(names, jnp.nan) if rows is None else local.measured(problem, x, rows, split)
        reply.values.update({f"{split}/{name}": np.asarray(found[name], np.float64) for name in names})
        if split in request.scores and send:
            empty = (np.zeros(0, local.score_type(agreement, split)), np.zeros(0, bool))
            scores, labels = empty if rows is None else local.scored(problem, x, rows)
            reply.scores[split], reply.labels[split] = np.asarray(scores), np.asarray(labels)
    return named_arrays(reply, REPLY)
