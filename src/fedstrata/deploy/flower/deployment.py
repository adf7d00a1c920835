"""The `Deployment`: what a Flower app of FedStrata declares, the same on the server and at every site."""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a client app only passes messages on; importing JAX would slow it down
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.data.federation import Federation
    from fedstrata.problems.base import Problem


class Deployment(NamedTuple):
    """What is trained, how, and where a site's data come from.

    Args:
        problem: what is minimised.
        algorithm: the method.
        load: returns a site's data, a federation of one client. Its argument is the site's settings, which its
            SuperNode receives as `--node-config`.
        rounds: how many.
        sites: how many.
        options: as in `fs.run`: params, batch_size, sampling, cohort, weights, privacy, and seed.
        quorum: the share of a round's sites that must reply.
        deadline: seconds that an exchange may take.
        evaluate_every: rounds between two evaluations at the sites; None: only at the end.
        scores: splits of which sites send scores, for the AUC over all sites together. A site sends them only if its
            settings have `tells = "scores"`.
    """

    problem: "Problem"
    algorithm: "Algorithm"
    load: "Callable[[Mapping[str, Any]], Federation]"
    rounds: int
    sites: int
    options: Mapping[str, Any] = {}
    quorum: float = 1.0
    deadline: float = 600.0
    evaluate_every: int | None = None
    scores: tuple[str, ...] = ()


def resolve(where: str) -> Deployment:
    """The deployment at "package.module:name"."""
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name or "deployment", None)
    if not isinstance(found, Deployment):
        raise TypeError(f"{where} must be a Deployment, not {type(found).__name__}")
    return found
