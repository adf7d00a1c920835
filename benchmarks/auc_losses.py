"""Our pair losses against LibAUC's: values and gradients on the same scores, and the time of a call.

A call computes the loss of a batch and its gradient in the scores. A tenth of the batch are positives. Running means
are switched off (γ = 1) on both sides: u is that of the batch.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import environments
import fedstrata as fs
import harness
from fedstrata.core.vector import Vector
from fedstrata.data.shard import View

LAM, A, B, ALPHA = 2.0, 0.3, -0.2, 0.4
PAIR_LOSSES = {
    "square": fs.pair_losses.Square(),
    "squared hinge": fs.pair_losses.SquaredHinge(),
    "logistic": fs.pair_losses.Logistic(),
    "KL-OPAUC": fs.pair_losses.KLOPAUC(LAM),
    "average precision": fs.pair_losses.AveragePrecision(),
}
DIFFERENCES = {
    "square": "none",
    "squared hinge": "none",
    "logistic": "none; LibAUC's log(1 + exp(·)) overflows for scores 90 apart, ours does not",
    "min-max, v1": "LibAUC's α is ours plus the margin, and its value is ours plus p(1 − p). They are compared after "
    "that shift. LibAUC's optimiser keeps α ≥ 0",
    "min-max, v2": "should be v1 over p(1 − p), but LibAUC 2.0.1 has a parenthesis in the wrong place (its issue 74): "
    "the mean score of negatives is multiplied by 1 − p. FedStrata has v1 only",
    "KL-OPAUC": "none: both compute Σ (ℓ/u) L with ℓ/u held fixed, whose gradient is that of λ log u. LibAUC's "
    "exp(L/λ) overflows where L > 88 λ; ours is computed in logarithms",
    "average precision": "none: both compute Σ (u₁ − 1_{y'=1} u₂) s / u₂² with u held fixed. It is 0 with u of the "
    "batch and has the gradient of −u₁/u₂. LibAUC has no lower bound for u₂",
}


def rows(size):
    rng = np.random.default_rng(size)
    labels = (np.arange(size) % 10 == 0).astype(np.float32)
    return (rng.standard_normal(size) + 0.5 * labels).astype(np.float32), labels


def pair_value(loss, labels):
    """The mean of f'(u) ℓ over pairs, with u of the batch held fixed, as in the gradients of `fs.Pairwise`."""
    problem = fs.Pairwise(lambda params, example: params[example["i"]], loss)
    positive, negative = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    second = np.arange(len(labels)) if loss.labelled else negative
    weight = jnp.full(len(second), 1 / len(second), jnp.float32)

    def value(scores):
        first, others = scores[positive], scores[second]
        if loss.labelled:
            others = jnp.stack([others, jnp.asarray(labels)], axis=1)

        def of_one(score):
            u = None
            if not problem.linear:
                u = problem.inner_mean(jax.vmap(lambda other: loss(score, other))(others), weight)
            return jnp.mean(jax.vmap(lambda other: problem.term(u, score, other))(others))

        return jnp.mean(jax.vmap(of_one)(first))

    return value


def minmax_value(labels):
    """The min-max form of CODASCA's oracle, for one client with all rows, whose scores are the parameters."""
    index = np.arange(len(labels), dtype=np.int32)
    federation = fs.Federation.from_clients([{"i": index, "y": labels.astype(np.int32)}], classes=2).by_label()
    problem = fs.Pairwise(lambda params, example: params[example["i"]], fs.pair_losses.Square(), metrics=())
    problem = problem.bind(Vector(jnp.zeros(len(labels), jnp.float32)), federation)
    shard = {}
    for name in ("positives", "negatives"):
        split = federation[name]
        start, count = (jnp.asarray(a[0], jnp.int32) for a in (split.offsets, split.counts))
        shard[name] = View(jax.tree.map(jnp.asarray, split.examples), start, count, int(split.counts.max()))
    oracle = problem.oracle(shard, jax.random.key(0), client=0)
    p = float(labels.mean())

    def value(scores, a, b, alpha):
        return oracle.minmax(Vector((scores, a, b)), Vector(alpha - 1)) + p * (1 - p)

    return value


def ours(name, scores, labels):
    """A compiled function without arguments: value and gradients."""
    if name.startswith("min-max"):
        given = [jnp.asarray(v, jnp.float32) for v in (scores, A, B, ALPHA)]
        program = jax.jit(jax.value_and_grad(minmax_value(labels), argnums=(0, 1, 2, 3)))
    else:
        given = [jnp.asarray(scores)]
        program = jax.jit(jax.value_and_grad(pair_value(PAIR_LOSSES[name], labels), argnums=(0,)))
    return lambda: program(*given)


def seconds(function, calls):
    jax.block_until_ready(function())
    began = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(function())
    return (time.perf_counter() - began) / calls


def gap(found, expected):
    """The norm of the difference over the norm, all parts together."""
    found, expected = (np.concatenate([np.ravel(part).astype(np.float64) for part in v]) for v in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,256,1024,4096")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="calls timed together")
    parser.add_argument("--here", action="store_true", help="use this interpreter for LibAUC too")
    parser.add_argument("--draft", action="store_true", help="print only")
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    title = "LibAUC"
    children, lacking = environments.begin({title: ("by_libauc", "libauc", {})}, given.here)
    libauc = children.get(title)
    times, equal = {}, []
    for name in DIFFERENCES:
        for size in sizes:
            scores, labels = rows(size)
            program = ours(name, scores, labels)
            mine, theirs, lean = [], [], []
            if libauc:
                options = {"lam": LAM, "a": A, "b": B, "alpha": ALPHA}
                libauc.call("prepare", loss=name, scores=scores.tolist(), labels=labels.tolist(), **options)
                if size == sizes[0]:
                    value, slopes = libauc.call("value")
                    found, gradients = jax.tree.map(np.asarray, program())
                    p = float(labels.mean())
                    scale = p * (1 - p) if name == "min-max, v2" else 1.0
                    slopes = [np.multiply(scale, slope) for slope in slopes]
                    gaps = abs(float(found) - scale * value), gap(gradients, slopes)
                    equal.append([name, *(f"{g:.1e}" for g in gaps), DIFFERENCES[name]])
            for _ in range(given.repeats):
                mine.append(seconds(program, given.calls))
                if libauc:
                    theirs.append(libauc.call("seconds", calls=given.calls))
                    lean.append(libauc.call("seconds", calls=given.calls, checked_fast=True))
            times[name, size] = np.array(mine), np.array(theirs), np.array(lean)
    if libauc:
        libauc.close()
    head = ["loss", "batch", "ours, µs per call: median [quartiles]", "LibAUC, µs", "our speed-up"]
    head += ["LibAUC with a fast check, µs", "our speed-up"]
    table = []
    for (name, size), (mine, *others) in times.items():
        cells = []
        for other in others:
            cells += [harness.spread(other, 1e6), "{:.1f} [{:.1f}, {:.1f}]".format(*harness.ratio(mine, other))]
        table.append([name, size, harness.spread(mine, 1e6), *(cells if libauc else [""] * 4)])
    note = (
        "One call computes the loss of a batch of scores and its gradient in the scores (min-max form: also in a, b "
        "and α). A tenth of the batch are positives. Running means are those of the batch (γ = 1). Our losses are "
        "compiled; LibAUC's run eagerly. Each of LibAUC's losses first looks for positives with Python's `sum`, row by "
        'row. At large batches this check takes from half to nearly all of the time. The columns "with a fast check" '
        "use `torch.sum` instead and so compare the losses themselves. "
        f"Values and gradients are compared at batch {sizes[0]}, in float32, gradients by the norm of the difference "
        "over the norm."
    )
    compared = harness.table(
        ["loss", "difference of values", "relative difference of gradients", "difference of definitions"], equal
    )
    body = "\n\n".join([note, compared, harness.table(head, table), environments.notes(children, lacking)])
    if given.draft:
        print(body)
        return
    if libauc:
        _plot(times, sizes)
        body += "\n\n![Time of a call](../images/bench_auc_losses.png)"
    harness.page(__file__, "Pair losses: FedStrata and LibAUC", body)


def _plot(times, sizes):
    series = ((0, "#0072B2", "FedStrata"), (1, "#D55E00", "LibAUC"), (2, "#E69F00", "LibAUC with a fast check"))
    names = [name for name in DIFFERENCES if name != "min-max, v2"]
    figure, panels = plt.subplots(2, 3, figsize=(9, 5), sharex=True, sharey=True, layout="constrained")
    for name, axes in zip(names, panels.flat, strict=True):
        for who, colour, label in series:
            low, middle, high = np.array([np.quantile(1e6 * times[name, s][who], [0.25, 0.5, 0.75]) for s in sizes]).T
            axes.fill_between(sizes, low, high, color=colour, alpha=0.25, linewidth=0)
            axes.plot(sizes, middle, color=colour, marker="o", markersize=3, label=label)
        axes.set(title=name, xscale="log", yscale="log", xticks=sizes, xticklabels=[str(s) for s in sizes])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel("rows in the batch")
    figure.supylabel("µs per call (median and quartiles)")
    figure.savefig(harness.IMAGES / "bench_auc_losses.png", dpi=150)


if __name__ == "__main__":
    main()
