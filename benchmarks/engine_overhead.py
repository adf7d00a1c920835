"""The engine's overhead: FedAvg in FedStrata against the same job written by hand in JAX.

MLP 784-32-10, 100 clients, 10 local steps, batch 64. Target: at least 0.95 of the hand-written rounds per second.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
import harness
from harness import prepare

CLIENTS, EXAMPLES, BATCH, STEPS, ROUNDS, STEP_SIZE = 100, 600, 64, 10, 10, 0.1


def loss(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    z = hidden @ params["w2"] + params["b2"]
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, y[:, None], axis=1)[:, 0])


def client(params, key, start, x, y):
    def step(params, key):
        rows = start + jax.random.randint(key, (BATCH,), 0, EXAMPLES)
        grads = jax.grad(loss)(params, x[rows], y[rows])
        return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, grads), None

    return jax.lax.scan(step, params, jax.random.split(key, STEPS))[0]


@jax.jit
def by_hand(params, key, x, y):
    def one_round(round, params):
        keys = jax.random.split(jax.random.fold_in(key, round), CLIENTS)
        starts = jnp.arange(CLIENTS) * EXAMPLES
        moved = jax.vmap(client, in_axes=(None, 0, 0, None, None))(params, keys, starts, x, y)
        return jax.tree.map(lambda p: p.mean(0), moved)

    return jax.lax.fori_loop(0, ROUNDS, one_round, params)


def ours(problem, federation, execution):
    options = {"rounds": 10**6, "evaluate_every": 10**6, "batch_size": BATCH, "execution": execution}
    job = prepare(problem, fs.FedAvg(STEP_SIZE, STEPS), federation, **options)
    carry = job.begin()[0]
    return lambda: job.advance(carry, 0, ROUNDS)[0]


def main():
    rng = np.random.default_rng(0)
    x = rng.random((CLIENTS * EXAMPLES, 784), dtype=np.float32)
    y = rng.integers(0, 10, CLIENTS * EXAMPLES).astype(np.int32)
    federation = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(CLIENTS + 1) * EXAMPLES)
    problem = fs.Average(fs.losses.Classification(fs.models.MLP((784, 32, 10))))
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    w1, w2 = 0.05 * jax.random.normal(k1, (784, 32)), 0.2 * jax.random.normal(k2, (32, 10))
    params = {"w1": w1, "b1": jnp.zeros(32), "w2": w2, "b2": jnp.zeros(10)}
    contenders = {"hand-written JAX (vmap)": partial(by_hand, params, k3, jnp.asarray(x), jnp.asarray(y))}
    contenders |= {f"FedStrata, {e}": ours(problem, federation, e) for e in ("vmap", "map", 8)}
    took = harness.interleaved(contenders, repeats=9)
    hand = took["hand-written JAX (vmap)"]
    rows = []
    for name, times in took.items():
        middle, low, high = harness.ratio(times, hand)
        rows.append([name, harness.spread(times / ROUNDS), f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    head = ["program", "ms per round: median [quartiles]", "rounds/s relative to hand-written"]
    note = (
        "FedAvg, MLP 784-32-10, 100 clients, 10 local steps, batch 64. Target: ≥ 0.95. "
        '"FedStrata, 8" computes clients in chunks of 8.'
    )
    harness.page(__file__, "Engine overhead", note + "\n\n" + harness.table(head, rows))


if __name__ == "__main__":
    main()
