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


def check_deployment(deployment: Deployment) -> None:
    """Refuse a deployment that could never run, before its server waits for sites.

    Args:
        deployment: of the app, with the sites and rounds of the command.

    Raises:
        ValueError: an option is unknown or wrong. Also a TypeError.
    """
    from fedstrata.base.errors import unknown
    from fedstrata.deploy.agreement import agree, start_point
    from fedstrata.engine.checks import check_parameters, check_solves
    from fedstrata.engine.participation import selection
    from fedstrata.models.base import Model
    from fedstrata.models.saved import check_storable
    from fedstrata.problems.base import model_of

    problem, algorithm, _, rounds, sites, options, quorum, deadline, every, scores = deployment
    known = [p.name for p in signature(agree).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise unknown("option of the deployment", str(name), known)
    whole = lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1
    names = sites if isinstance(sites, tuple | list) and all(isinstance(name, str) for name in sites) else ()
    if not whole(sites) and not (names and len(set(names)) == len(names)):
        raise ValueError(f"the deployment has sites={sites!r}; give a number >= 1, or a tuple of different names")
    for name, value in (("rounds", rounds), ("evaluate_every", 1 if every is None else every)):
        if not whole(value):
            raise ValueError(f"the deployment has {name}={value!r}; give a whole number >= 1")
    if not 0 < quorum <= 1:
        raise ValueError(f"the deployment has quorum={quorum!r}; give a share of the sites: > 0 and <= 1")
    if not deadline > 0:
        raise ValueError(f"the deployment has deadline={deadline!r}; give seconds > 0")
    if isinstance(scores, str):
        raise ValueError(f"the deployment has scores={scores!r}; give a tuple of splits: scores=({scores!r},)")
    check_solves(algorithm, problem)
    selection(options.get("cohort")).check(deployment.site_count)
    x0 = start_point(problem, options.get("params"), options.get("seed", 0))
    check_parameters(x0)
    if isinstance(model_of(problem), Model):
        check_storable(x0.tree)


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
