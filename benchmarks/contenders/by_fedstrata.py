"""FedStrata: an executable, advanced by some rounds per call."""

import child
import jax
import jobs
import numpy as np

import fedstrata as fs
from fedstrata.models.base import Model
from fedstrata.models.convolution import convolve
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

LONG = 10**6  # rounds


class TwoConvolutions(Model):
    """The network of `jobs.cnn`, with the library's convolutions."""

    def init(self, key, dtype=None):
        raise NotImplementedError("start values are given")

    def __call__(self, params, x):
        for layer in params["convolutions"]:
            x = jax.nn.relu(convolve(layer["weight"], x, kernel=3, padding=0) + layer["bias"].reshape(1, 1, -1))
        x = x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2, -1).max(axis=(1, 3)).reshape(-1)
        hidden = jax.nn.relu(params["hidden"]["weight"] @ x + params["hidden"]["bias"])
        return params["output"]["weight"] @ hidden + params["output"]["bias"]


def mlp_start(start):
    return [{"weight": start[0], "bias": start[1]}, {"weight": start[2], "bias": start[3]}]


def cnn_start(start):
    """Weights with channels last, as patches and flattened images have them."""
    last = lambda w: np.moveaxis(w, 1, -1).reshape(w.shape[0], -1)
    layers = [{"weight": w, "bias": b} for w, b in zip(start[::2], start[1::2], strict=True)]
    hidden = layers[2] | {"weight": last(layers[2]["weight"].reshape(128, 64, 14, 14))}
    convolutions = [layer | {"weight": last(layer["weight"])} for layer in layers[:2]]
    return {"convolutions": convolutions, "hidden": hidden, "output": layers[3]}


class Prepared(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        model = fs.models.MLP((784, 32, 10)) if job["model"] == "mlp" else TwoConvolutions()
        start = (mlp_start if job["model"] == "mlp" else cnn_start)(self.data.start)
        x, y = (a.reshape(-1, *a.shape[2:]) for a in (self.data.x, self.data.y))
        owner = np.repeat(np.arange(job["clients"]), job["examples"])
        test = {"x": self.data.test_x, "y": self.data.test_y.astype(np.int32)} if job.get("test") else None
        federation = fs.Federation.from_arrays({"x": x, "y": y}, owner, test=test, classes=10)
        self.problem = fs.Average(fs.losses.Classification(model))
        self.every = job.get("evaluate_every")
        recorded = bool(self.every and job.get("records"))
        self.work = prepare(
            self.problem,
            fs.FedAvg(job["step_size"], job["steps"]),
            federation,
            RunOptions(
                rounds=LONG,
                params=start,
                batch_size=job["batch"],
                sampling=job.get("sampling", "replacement"),
                cohort=job.get("cohort"),
                evaluate_every=self.every if recorded else LONG,
                stationarity=False,
                execution=job.get("execution", "auto"),
            ),
        )
        self.carry, self.done = self.work.begin()[0], 0
        self.pieces = not recorded
        measure = lambda x: self.problem.evaluate_split(x, self.work.inputs.full, "test")
        self.measure = jax.jit(lambda carry: measure(jax.tree.map(lambda a: a[0], self.work.solutions(carry))))
        device = jax.devices()[0]
        where = f"XLA's threads on {child.CORES} cores" if device.platform == "cpu" else device.device_kind
        self.note = f"{child.versions('fedstrata', 'jax')}; {where}; clients by {self.work.context.execution}"

    def advance(self, rounds):
        last = self.done + rounds
        while self.done < last:
            stop = min(last, self.done + (self.every if self.every and self.pieces else rounds))
            self.carry = self.work.advance(self.carry, self.done, stop, in_place=True)[0]
            self.done = stop
            if self.every and self.pieces and self.done % self.every == 0:
                self.evaluate()
        jax.block_until_ready(self.carry.shared)

    def evaluate(self):
        return {name: float(value) for name, value in self.measure(self.carry).items()}

    def params(self):
        tree = self.work.solutions(self.carry).tree
        return [np.asarray(layer[name][0]) for layer in tree for name in ("weight", "bias")]

    def counted(self):
        steps = self.done * (self.job.get("cohort") or self.job["clients"]) * self.job["steps"]
        return steps, steps * self.job["batch"]


if __name__ == "__main__":
    child.serve(Prepared)
