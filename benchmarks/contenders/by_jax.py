"""JAX by hand: all rounds in one compiled loop, clients vectorised, at once or in chunks."""

import child
import jax
import jax.numpy as jnp
import jobs
import numpy as np


def loss(params, x, y):
    w1, b1, w2, b2 = params
    z = jax.nn.relu(x @ w1.T + b1) @ w2.T + b2
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, y[:, None], axis=1)[:, 0])


class ByHand(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        clients, examples, batch, steps = (job[name] for name in ("clients", "examples", "batch", "steps"))
        self.x, self.y = jnp.asarray(self.data.x).reshape(-1, 784), jnp.asarray(self.data.y).reshape(-1)
        self.shared = [jnp.asarray(a) for a in self.data.start]
        self.done = 0

        def client(params, key, start, x, y):
            def step(params, key):
                rows = start + jax.random.randint(key, (batch,), 0, examples)
                slopes = jax.grad(loss)(params, x[rows], y[rows])
                return jax.tree.map(lambda p, g: p - job["step_size"] * g, params, slopes), None

            return jax.lax.scan(step, params, jax.random.split(key, steps))[0]

        @jax.jit
        def rounds(params, first, last, key, x, y):
            def one(round, params):
                keys = jax.random.split(jax.random.fold_in(key, round), clients)
                of_one = lambda given: client(params, given[0], given[1], x, y)
                given = (keys, jnp.arange(clients) * examples)
                chunk = job["chunk"]
                moved = jax.lax.map(of_one, given, batch_size=chunk) if chunk else jax.vmap(of_one)(given)
                return jax.tree.map(lambda p: p.mean(0), moved)

            return jax.lax.fori_loop(first, last, one, params)

        self.rounds = rounds
        self.note = f"{child.versions('jax')}; XLA's threads on {child.CORES} cores"

    def advance(self, rounds):
        last = self.done + rounds
        self.shared = jax.block_until_ready(
            self.rounds(self.shared, self.done, last, jax.random.key(0), self.x, self.y)
        )
        self.done = last

    def params(self):
        return [np.asarray(p) for p in self.shared]

    def counted(self):
        steps = self.done * self.job["clients"] * self.job["steps"]
        return steps, steps * self.job["batch"]


if __name__ == "__main__":
    child.serve(ByHand)
