"""LibAUC's losses of a batch of scores and labels: value, gradients, and the time of both."""

# pyright: reportMissingImports=false
import time

import child
import numpy as np
import torch
from libauc import losses

# γ = 1: running means are those of the batch, so that a call does not depend on earlier ones.
MAKE = {
    "square": lambda n, q: losses.PairwiseAUCLoss("squared", hparam=1.0),
    "squared hinge": lambda n, q: losses.PairwiseAUCLoss("squared_hinge", hparam=1.0),
    "logistic": lambda n, q: losses.PairwiseAUCLoss("logistic", hparam=1.0),
    "min-max, v1": lambda n, q: _set(losses.AUCMLoss(margin=1.0, version="v1"), q),
    "min-max, v2": lambda n, q: _set(losses.AUCMLoss(margin=1.0, version="v2"), q),
    "KL-OPAUC": lambda n, q: losses.pAUC_DRO_Loss(n, gamma=1.0, margin=1.0, Lambda=q["lam"]),
    "average precision": lambda n, q: losses.APLoss(n, gamma=1.0, margin=1.0),
}


def _set(loss, q):
    with torch.no_grad():
        for name in ("a", "b", "alpha"):
            getattr(loss, name).fill_(q[name])
    return loss


class Losses:
    def __init__(self, job):
        threads = "one thread or one per core, whichever is faster in each timing"
        self.note = f"{child.versions('libauc', 'torch')}; {threads}"

    def prepare(self, loss, scores, labels, **options):
        self.scores = torch.tensor(np.array(scores, np.float32), requires_grad=True)
        self.labels = torch.tensor(np.array(labels, np.float32))
        self.index = torch.arange(len(labels))
        self.loss = MAKE[loss](len(labels), options)
        self.minmax = loss.startswith("min-max")

    def _once(self):
        self.scores.grad = None
        self.loss.zero_grad()
        more = {} if self.minmax else {"index": self.index}
        value = self.loss(self.scores, self.labels, **more)
        value.backward()
        return value

    def value(self):
        """The loss, and its gradients in the scores and, for the min-max form, in a, b and α."""
        found = float(self._once())
        slopes = [self.scores.grad.tolist()]
        if self.minmax:
            slopes += [float(getattr(self.loss, name).grad) for name in ("a", "b", "alpha")]
        return [found, slopes]

    def seconds(self, calls, checked_fast=False):
        """Seconds of a call, the best of one thread and one per core: with two some losses take six times longer.

        Every loss first looks for positives with Python's `sum`, row by row. checked_fast: with `torch.sum` instead.
        """
        vars(losses.auc)["sum"] = torch.sum if checked_fast else sum
        return min(self._with(threads, calls) for threads in (1, child.CORES))

    def _with(self, threads, calls):
        torch.set_num_threads(threads)
        for _ in range(2):
            self._once()
        began = time.perf_counter()
        for _ in range(calls):
            self._once()
        return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    child.serve(Losses)
