"""The `Deployment`: what a Flower app of FedStrata declares, the same on the server and at every site."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a client app only passes messages on; importing JAX would slow it down
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.data.federation import Federation
    from fedstrata.deploy.agreement import Agreement
    from fedstrata.deploy.data_summary import DataSummary
    from fedstrata.problems.base import Problem


class Deployment(NamedTuple):
    """What is trained, how, and where a site's data come from.

    Args:
        problem: what is minimised.
        algorithm: the method.
        load: returns a site's data, a federation of one client. Its argument is the site's settings, which its
            SuperNode receives as `--node-config`.
        rounds: how many.
        sites: how many; or their names, if only sites of these names shall take part.
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
    sites: int | tuple[str, ...]
    options: Mapping[str, Any] = {}
    quorum: float = 1.0
    deadline: float = 600.0
    evaluate_every: int | None = None
    scores: tuple[str, ...] = ()

    @property
    def evaluations(self) -> int:
        """How many there are in a run."""
        return self.rounds // max(self.evaluate_every or self.rounds, 1) + 1

    @property
    def site_count(self) -> int:
        """How many sites take part."""
        return self.sites if isinstance(self.sites, int) else len(self.sites)


def resolve(where: str) -> Deployment:
    """The deployment at "package.module:name"."""
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name or "deployment", None)
    if not isinstance(found, Deployment):
        raise TypeError(f"{where} must be a Deployment, not {type(found).__name__}")
    return found


def agree_on(deployment: Deployment, run: str, summaries: "Sequence[DataSummary]") -> "Agreement":
    """The agreement of a run of this deployment.

    Args:
        deployment: what to run.
        run: its name.
        summaries: of all sites, in the order of their numbers.
    """
    from fedstrata.deploy.agreement import agree

    return agree(run, deployment.problem, deployment.algorithm, summaries, **deployment.options)


def settings_of(deployment: Deployment) -> dict[str, Any]:
    """All settings that determine the numbers of a run, as plain JSON. Its length, quorum and deadline do not."""
    from fedstrata.core.fingerprint import describe
    from fedstrata.core.hyperparameters import hyperparameters
    from fedstrata.deploy.agreement import agree

    words, algorithm = partial(describe, by_name=True), deployment.algorithm
    values = {f"{type(algorithm).__name__}.{k}": words(v) for k, v in hyperparameters(algorithm).items()}
    found = {"algorithm": type(algorithm).__name__, **values, "problem": words(deployment.problem)}
    defaults = {p.name: p.default for p in signature(agree).parameters.values() if p.kind is p.KEYWORD_ONLY}
    found |= {name: words(value) for name, value in {**defaults, **deployment.options}.items()}
    return json.loads(json.dumps(found))
