"""Clients all at once, one by one or in chunks: dense and convolutional networks, float32 and bfloat16.

The choice of `execution="auto"` is marked. On a CPU the script also times a convolution inside a loop over local steps
against the same steps unrolled: XLA's convolution, and the library's, which uses patches.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
import harness
from fedstrata.models import convolution
from fedstrata.simulate.autotune import choose
from harness import prepare

WAYS = ("vmap", "map", 8)


def task(shape, examples, clients):
    rng = np.random.default_rng(0)
    x = rng.random((clients * examples, *shape), dtype=np.float32)
    y = rng.integers(0, 10, len(x)).astype(np.int32)
    return fs.Federation.from_offsets({"x": x, "y": y}, np.arange(clients + 1) * examples)


def networks(small):
    """Title: model, dtype of its parameters, shape of an example, batch, clients."""
    width, clients = (16, 20) if small else (64, 50)
    deep = {"shape": (32, 32, 3), "outputs": 10, "width": 8 if small else 64}
    for kind in ("float32", "bfloat16"):
        yield f"MLP 784-{width}-10, {kind}", fs.models.MLP((784, width, 10)), kind, (784,), 32, clients
        yield f"CNN, {kind}", fs.models.CNN((32, 32, 3), (width // 2, width)), kind, (32, 32, 3), 10, clients
        model = fs.models.ResNet18(**deep, compute=kind)
        yield f"ResNet-18 of width {deep['width']}, {kind}", model, "float32", (32, 32, 3), 4 if small else 32, 16


def program(model, dtype, federation, batch, how):
    problem = fs.Average(fs.losses.Classification(model))
    options = {"rounds": 10**6, "evaluate_every": 10**6, "stationarity": False, "batch_size": batch}
    start = model.init(jax.random.key(0), jnp.dtype(dtype))
    job = prepare(problem, fs.FedAvg(0.01, 5), federation, params=start, execution=how, **options)
    box = [job.begin()[0]]

    def advance():
        box[0] = job.advance(box[0], 0, 1, in_place=True)[0]
        return box[0].shared

    return advance, job


def executions(small, repeats):
    rows = []
    for title, model, dtype, shape, batch, clients in networks(small):
        federation = task(shape, 50, clients)
        built = {how: program(model, dtype, federation, batch, how) for how in WAYS}
        took = harness.interleaved({str(how): b[0] for how, b in built.items()}, repeats)
        chosen, why = choose(built["vmap"][1])
        best = min(np.median(t) for t in took.values())
        cells = [f"{harness.spread(t)}{' ←' if name == str(chosen) else ''}" for name, t in took.items()]
        lost = np.median(took[str(chosen)]) / best
        rows.append([f"{title}, {clients} clients, batch {batch}", *cells, f"{lost:.2f}", why.split(":")[0]])
    head = ["network", "at once (ms per round)", "one by one", "chunks of 8", "chosen / best", "reason"]
    return harness.table(head, rows)


def loops(repeats):
    """Five steps of one convolution 16 → 32 on 8 images of 16 × 16, in a loop and unrolled."""
    key = jax.random.key(0)
    images, weight = jax.random.normal(key, (8, 16, 16, 16)), 0.05 * jax.random.normal(key, (32, 9 * 16))

    def steps(convolve, unroll):
        def loss(w):
            return jnp.mean(jnp.square(jax.vmap(lambda image: convolve(w, image))(images)))

        step = lambda w, _: (w - 0.1 * jax.grad(loss)(w), None)
        run = jax.jit(lambda w: jax.lax.scan(step, w, length=5, unroll=unroll)[0])
        return lambda: run(weight)

    ways = {
        "XLA's convolution": lambda w, image: convolution.grouped(w, image, 3, 1, 1),
        "patches": lambda w, image: convolution.patched(w, image, 3, 1, 1),
    }
    forms = {"in a loop": 1, "unrolled": 5}
    contenders = {f"{way}, {form}": steps(f, n) for way, f in ways.items() for form, n in forms.items()}
    took = harness.interleaved(contenders, repeats)
    base = took["XLA's convolution, unrolled"]
    rows = [[name, harness.spread(times), f"{harness.ratio(base, times)[0]:.2f}"] for name, times in took.items()]
    return harness.table(["five steps", "ms: median [quartiles]", "relative to XLA's, unrolled"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--draft", action="store_true", help="print only")
    given, small = parser.parse_args(), jax.default_backend() == "cpu"
    body = f'FedAvg, 5 local steps. ← marks the choice of `execution="auto"`.\n\n{executions(small, given.repeats)}'
    if small:
        body += f"\n\nA 3 × 3 convolution, 16 → 32 channels, 8 images of 16 × 16:\n\n{loops(given.repeats)}"
    print(body) if given.draft else harness.page(__file__, "How clients are executed", body)


if __name__ == "__main__":
    main()
