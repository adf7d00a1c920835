"""FedX2 on ResNet-18 in bfloat16, 16 clients with 32 + 32 images per step, against one model with batches of 1024.

Both process 1024 images of 32 × 32 per step. A federated step reads and writes 16 times as many weights. The single
model is trained by plain SGD with cross-entropy, once with XLA's convolutions and once with ours; the faster one is 1.
For a GPU; on a CPU use `--width 8 --clients 2`. Target: ≥ 0.55.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedstrata as fs
import harness
from fedstrata.models import norm
from harness import prepare

EXAMPLES = 256  # of a client, of each class


def own_convolution(weight, image, kernel, stride=1):
    """XLA's convolution, for one model."""
    filters = weight.reshape(-1, kernel, kernel, image.shape[-1])
    pad = [((kernel - 1) // 2,) * 2] * 2
    names = ("NHWC", "OHWI", "NHWC")
    return jax.lax.conv_general_dilated(image[None], filters, (stride, stride), pad, dimension_numbers=names)[0]


def one_model(model, images, labels, batch, steps, convolution=None):
    """`steps` steps of plain SGD on one model."""
    params = model.init(jax.random.key(0), jnp.float32)

    def loss(params, x, y):
        scores = jax.vmap(model, (None, 0))(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    @jax.jit
    def run(params, images, labels, key):
        def step(params, key):
            rows = jax.random.randint(key, (batch,), 0, len(labels))
            grad = jax.grad(loss)(params, images[rows], labels[rows])
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grad), None

        return jax.lax.scan(step, params, jax.random.split(key, steps))[0]

    usual, norm.convolve = norm.convolve, convolution or norm.convolve
    run(params, images, labels, jax.random.key(1))  # compiled with this convolution
    norm.convolve = usual
    return lambda: run(params, images, labels, jax.random.key(1))


def federated(problem, algorithm, federation, params, batch, execution):
    options = {"rounds": 10**6, "evaluate_every": 10**6, "stationarity": False, "evaluate": ()}
    job = prepare(problem, algorithm, federation, params=params, batch_size=batch, execution=execution, **options)
    box = [job.begin()[0]]

    def advance():
        box[0] = job.advance(box[0], 0, 1, in_place=True)[0]
        return box[0].shared

    return advance


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32, help="local steps a round")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--executions", default="vmap,8,map")
    parser.add_argument("--draft", action="store_true", help="print only")
    given = parser.parse_args()
    if jax.default_backend() == "cpu" and given.width > 16:
        print("for a GPU; on a CPU try --width 8 --clients 2 --draft")
        return
    clients, steps, batch = given.clients, given.steps, 32
    rng = np.random.default_rng(0)
    y = np.tile(np.repeat(np.array([1, 0], np.int32), EXAMPLES), clients)
    x = rng.random((len(y), 32, 32, 3), dtype=np.float32) + 0.1 * y[:, None, None, None]
    data = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(clients + 1) * 2 * EXAMPLES)
    shape = {"shape": (32, 32, 3), "width": given.width, "compute": "bfloat16"}
    scorer, classifier = fs.models.ResNet18(**shape, outputs=1), fs.models.ResNet18(**shape, outputs=2)
    pairwise = fs.Pairwise(scorer, fs.pair_losses.KLOPAUC(lam=1.0), metrics=(), objective_rows=64)
    average = fs.Average(fs.losses.Classification(classifier))
    images, labels, many = jnp.asarray(x), jnp.asarray(y), 2 * batch * clients
    contenders = {
        "one model, XLA's convolutions": one_model(classifier, images, labels, many, steps, own_convolution),
        "one model, our convolutions": one_model(classifier, images, labels, many, steps),
    }
    for execution in given.executions.split(","):
        how = int(execution) if execution.isdigit() else execution
        start = classifier.init(jax.random.key(0), jnp.float32)
        title = f"clients by {how}" if how != 8 else "clients in chunks of 8"
        contenders[f"FedAvg, {title}"] = federated(average, fs.FedAvg(0.01, steps), data, start, 2 * batch, how)
        start = scorer.init(jax.random.key(0), jnp.float32)
        contenders[f"FedX2, {title}"] = federated(pairwise, fs.FedX2(1e-4, steps), data.by_label(), start, batch, how)
    took = harness.interleaved(contenders, given.repeats)
    best = min(("one model, XLA's convolutions", "one model, our convolutions"), key=lambda t: np.median(took[t]))
    rows = []
    for title, times in took.items():
        middle, low, high = harness.ratio(times, took[best])
        rate = f"{many * steps / np.median(times):,.0f}"
        rows.append([title, harness.spread(times / steps), rate, f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    head = ["program", "ms per step: median [quartiles]", "images/s", "speed, one model = 1"]
    note = (
        f"ResNet-18 of width {given.width}, bfloat16, group normalisation; {clients} clients × (32 + 32) images of "
        f"32 × 32 per step, {steps} local steps per round, {given.repeats} rounds of each in turn. FedAvg takes the "
        "same 64 images with cross-entropy, which separates the cost of many clients from that of the algorithm."
    )
    body = note + "\n\n" + harness.table(head, rows)
    print(body) if given.draft else harness.page(__file__, "FedX2 on ResNet-18", body)


if __name__ == "__main__":
    main()
