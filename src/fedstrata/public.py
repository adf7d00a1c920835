"""The public names other than algorithms, by purpose. `fs.*`, `fedstrata list` and the stubs are generated from it.

Algorithms are not listed: they are found by subclass (`fedstrata.algorithms.known`).
"""

# Purpose -> module -> names.
PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "run and compare": {
        "fedstrata.simulate.run": ("run",),
        "fedstrata.simulate.tune": ("tune",),
        "fedstrata.simulate.estimate": ("estimate",),
        "fedstrata.simulate.profile": ("profile",),
        "fedstrata.simulate.options": ("RunOptions",),
        "fedstrata.simulate.result": ("Result", "DivergenceWarning"),
        "fedstrata.base.errors": ("SetupWarning",),
        "fedstrata.report": ("compare", "plot", "JsonLines"),
        "fedstrata.engine.checkpoint": ("CheckpointError",),
    },
    "problems": {
        "fedstrata.problems.average": ("Average",),
        "fedstrata.problems.regularized": ("Regularized",),
        "fedstrata.problems.nested": ("Nested",),
        "fedstrata.problems.compositions": ("risk_averse", "maml", "robust"),
        "fedstrata.problems.bilevel": ("Bilevel",),
        "fedstrata.problems.fair": ("Fair",),
        "fedstrata.problems.groups": ("GroupWarning",),
        "fedstrata.problems.pairwise.problem": ("Pairwise",),
        "fedstrata.problems.base": ("Problem", "Metric"),
        "fedstrata.algorithms.nested.base": ("CouplingWarning",),
    },
    "data": {
        "fedstrata": ("data",),
        "fedstrata.data": ("Federation", "Dirichlet"),
        "fedstrata.data.sampling": ("Epochs", "Replay", "Whole", "WithReplacement"),
        "fedstrata.problems.weighting": ("full_data",),
        "fedstrata.engine": ("participation",),
    },
    "models, losses and measures": {
        "fedstrata": ("models", "prox", "metrics"),
        "fedstrata.models": ("load_model", "save_model"),
        "fedstrata.problems": ("losses", "hypergradients"),
        "fedstrata.problems.pairwise": ("pair_losses",),
        "fedstrata.metrics": ("fairness",),
    },
    "privacy": {"fedstrata.engine.privacy": ("Privacy",)},
    "write an algorithm": {
        "fedstrata": ("algorithms",),
        "fedstrata.core.algorithm": ("Algorithm", "Cohort", "Phase"),
        "fedstrata.core.hyperparameters": ("real", "whole", "choice", "flag", "instance", "per_round"),
        "fedstrata.core.placement": ("Averaged", "Reported", "Gathered", "Pooled", "Broadcast", "Local", "Server"),
        "fedstrata.core.memory": ("PerExample", "Pool"),
        "fedstrata.core.vector": ("Vector", "where"),
        "fedstrata.core.levels": ("Levels",),
        "fedstrata.problems.base": ("Oracle", "SmoothOracle", "CompositeOracle"),
        "fedstrata.problems.nested": ("NestedOracle",),
        "fedstrata.problems.bilevel": ("BilevelOracle",),
        "fedstrata.problems.fair": ("FairOracle",),
        "fedstrata.problems.pairwise.oracle": ("PairwiseOracle",),
    },
    "experiments": {"fedstrata": ("experiments",)},
}
