"""What a Flower app of FedStrata says: one `Deployment`, the same object on the server and at every site."""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a client app hands messages on, and must not wait for JAX
    from fedstrata.algorithm import Algorithm
    from fedstrata.data.federation import Federation
    from fedstrata.problems.base import Problem


class Deployment(NamedTuple):
    """The problem, the algorithm, how a site loads its own data, and the terms of the run.

    load: a function of the site's settings (what its SuperNode was given as `--node-config`); returns a federation
    of one client. options: as of `fs.run`: params, batch_size, sampling, cohort, weights, privacy, and seed.
    quorum: the share of a round's sites that must answer. deadline: seconds that an exchange may take. The sites say
    what the solution does on their data at the end, and every `evaluate_every` rounds; scores: splits of which their
    scores are asked for, for the AUC of all sites together. A site lets them go only with `tells = "scores"` among its
    own settings.
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
