"""The methods with li2022's settings. Each has one step size to tune. Choices that the paper leaves open are here.

FedBiO: η = 0.1 as published, γ tuned. FedBiOAcc: δ = 0.1, u = 1, c = 1 as published; σ = 0, so that α = 0.1, and η = 1,
γ tuned, which makes its steps those of FedBiO. All bilevel methods estimate the hypergradient by eq. (4) with 20
Hessians and the step 0.5, and use the tuned step in stage two as well. FCFL: the limit 0.05 of its public code, and
its share of rounds for stage one. FedMinMax: risks of the batch, the last iterate, clients weighted by size.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm

LOCAL_STEPS = 5
SINGLE = ("FedAvg", "FedReg", "FedMinMax", "FCFL")
BILEVEL = ("FedBiO", "FedBiOAcc", "TrackedBiO")
PAPER = (*SINGLE, "FedBiO", "FedBiOAcc")  # of li2022's Table 1; TrackedBiO is this library's
METHODS = (*SINGLE, *BILEVEL)
EVERY_STEP = ("FedMinMax", "FCFL")  # average after every step
STAGE_ONE = 0.4  # FCFL's share of rounds: 800 of 2,000
DELTA = 0.1  # FedBiOAcc's α
HYPERGRADIENT = {"step": 0.5, "terms": 20}


def settings(name: str, step: float, steps: int) -> dict[str, Any]:
    """Hyper-parameters for one step size and number of local steps, without the hypergradient."""
    if name == "FCFL":
        return {"step_size": step, "stage_one": round(STAGE_ONE * steps)}
    if name == "FedMinMax":
        return {"step_size": step, "whole_risks": False}
    if name == "FedBiOAcc":
        return {"step_size": 1.0, "lower_step_size": step / DELTA, "local_steps": LOCAL_STEPS, "delta": DELTA}
    if name in BILEVEL:
        return {"step_size": 0.1, "lower_step_size": step, "local_steps": LOCAL_STEPS}
    return {"step_size": step, "local_steps": LOCAL_STEPS}


def method(name: str, step: float, steps: int) -> "Algorithm":
    from fedstrata import algorithms
    from fedstrata.algorithms import bilevel, fair

    homes: list[Any] = [algorithms, bilevel, fair]
    kind = next(getattr(home, name) for home in homes if hasattr(home, name))
    return kind(**settings(name, step, steps), **estimator(name))


def estimator(name: str) -> dict[str, Any]:
    """The hypergradient estimator of a bilevel method."""
    from fedstrata.problems.hypergradients import Neumann

    return {"hypergradient": Neumann(**HYPERGRADIENT)} if name in BILEVEL else {}


def rounds(name: str, steps: int) -> int:
    return steps if name in EVERY_STEP else steps // LOCAL_STEPS


def weighting(name: str) -> dict[str, Any]:
    """FedMinMax weighs all examples equally; the other papers weigh all clients equally."""
    return {"weights": "size"} if name == "FedMinMax" else {}
