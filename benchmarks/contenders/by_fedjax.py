"""FedJAX: its federated averaging with its default backend, one compiled step for each client and batch."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import child
import jax
import jax.numpy as jnp
import jobs
import numpy as np

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 uses this name, which JAX has dropped

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

NAMES = ("w1", "b1", "w2", "b2")


def loss(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["w1"].T + params["b1"])
    z = hidden @ params["w2"].T + params["b2"]
    right = jnp.take_along_axis(z, batch["y"][:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - right)


class Algorithm(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        self.clients = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(self.data.x, self.data.y, strict=True)]
        self.batches = fedjax.ShuffleRepeatBatchHParams(batch_size=job["batch"], num_epochs=1)
        self.algorithm = fed_avg.federated_averaging(
            jax.grad(loss), fedjax.optimizers.sgd(job["step_size"]), fedjax.optimizers.sgd(1.0), self.batches
        )
        start = {name: jnp.asarray(value) for name, value in zip(NAMES, self.data.start, strict=True)}
        self.state = self.algorithm.init(start)
        self.key, self.done = jax.random.key(0), 0
        self.note = (
            f"{child.versions('fedjax', 'jax')}, with `jax.tree_map` put back; XLA's threads on {child.CORES} cores"
        )

    def advance(self, rounds):
        for _ in range(rounds):
            keys = jax.random.split(jax.random.fold_in(self.key, self.done), len(self.clients))
            clients = [(i, data, keys[i]) for i, data in enumerate(self.clients)]
            self.state, _ = self.algorithm.apply(self.state, clients)
            self.done += 1
        jax.block_until_ready(self.state.params)

    def params(self):
        return [np.asarray(p) for p in map(self.state.params.get, NAMES)]

    def counted(self):
        """Counted from the batches of FedJAX's iterator for a round."""
        sizes = [len(batch["y"]) for data in self.clients for batch in data.shuffle_repeat_batch(self.batches)]
        return len(sizes) * self.done, sum(sizes) * self.done


if __name__ == "__main__":
    child.serve(Algorithm)
