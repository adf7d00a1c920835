"""Divisions of the sites' rows into train, valid and test, prepared with statistics of training rows only."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedstrata.experiments.base import Setup

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

TEST, VALID = 0.3, 0.2  # of every site's rows, and of what is left; label by label


def divided(federation: "Federation", seed: int) -> "Federation":
    """A division of the raw data: no imputation, no scaling.

    Args:
        federation: the sites with all their rows.
        seed: the seed of the division.
    """
    return federation.hold_out("test", TEST, seed).hold_out("valid", VALID, seed)


def prepared(division: "Federation", site: int | None = None) -> "Federation":
    """Missing values imputed, columns scaled, training rows split into positives and negatives.

    The medians, means and deviations are those of all training rows; with a site, of its rows alone.
    The rows of the other sites remain, for evaluation.

    Args:
        division: what `divided` gives.
        site: the site whose statistics are used; None: all.
    """
    from fedstrata.data import transforms as edit
    from fedstrata.data.federation import Federation

    splits = dict(division.splits)
    if site is not None:
        splits = {**splits, "train": division.select([site])["train"], "everyone": splits["train"]}
    if "missing" in splits["train"].examples:
        splits = edit.impute(splits, "x", "missing")
    splits = edit.standardize(splits, "x")
    if site is not None:
        splits["train"] = splits.pop("everyone")
    return Federation(splits, division.names, division.classes, division.features).by_label()


class Sites(Setup):
    """The prepared division of seed 0, and a function for those of other seeds."""

    divide: Callable[[int], "Federation"]  # by seed, raw
    l2: float

    @classmethod
    def of(cls, divide: Callable[[int], "Federation"], l2: float) -> "Sites":
        from fedstrata.experiments.site_study.problems import Scored
        from fedstrata.models import Linear
        from fedstrata.problems.losses import Classification

        federation = prepared(divide(0))
        model = Linear(federation["train"].examples["x"].shape[1])
        made = cls(Scored(Classification(model, l2), sites=tuple(federation.names)), federation)
        made.divide, made.l2 = divide, l2
        return made

    def pairwise(self, pair_loss: Any, batch_size: Any) -> Any:
        """The same model under a pairwise loss, bound to these data: methods with pools are checked against it.

        Args:
            pair_loss: the loss between two scores.
            batch_size: rows of each class in a step.
        """
        from fedstrata.core.vector import Vector
        from fedstrata.data.sampling import sampler
        from fedstrata.experiments.site_study.problems import Paired

        problem: Any = self.problem
        model = problem.loss.model
        found = Paired(model, pair_loss, l2=self.l2, metrics=(), sites=problem.sites)
        return found.bind(Vector(model.init()), self.federation, sampler(batch_size))
