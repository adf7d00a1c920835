"""MobileNetV3-Small against the published table, lax convolutions and a plain NumPy network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedstrata.models import MobileNetV3Small, load_model, save_model
from fedstrata.models.convolution import convolve, depthwise, group_norm, pointwise
from fedstrata.models.mobilenet import divisible

# Howard et al. (2019), Table 2: kernel, expansion, output channels, squeeze-and-excite, non-linearity, stride.
TABLE = """
3  16 16 yes RE 2
3  72 24 no  RE 2
3  88 24 no  RE 1
5  96 40 yes HS 2
5 240 40 yes HS 1
5 240 40 yes HS 1
5 120 48 yes HS 1
5 144 48 yes HS 1
5 288 96 yes HS 2
5 576 96 yes HS 1
5 576 96 yes HS 1
"""
ROWS = [
    (int(kernel), int(expanded), int(outputs), squeeze == "yes", activation, int(stride))
    for kernel, expanded, outputs, squeeze, activation, stride in map(str.split, TABLE.strip().splitlines())
]
TINY = MobileNetV3Small((9, 8, 2), outputs=3, width=0.05, stem_stride=1)


@functools.cache
def random_params(model):
    """Parameters that are nowhere special: no zeros or ones that could hide a mistake."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        inputs = leaf.shape[0] ** 2 if leaf.ndim == 3 else leaf.shape[-1]
        spread = (2 / inputs) ** 0.5 if leaf.ndim > 1 else 0.3
        return jnp.asarray(spread * rng.normal(size=leaf.shape) + (path[-1].key == "scale"))

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


IMAGES = jnp.asarray(np.random.default_rng(2).normal(size=(6, *TINY.shape)))
LABELS = jnp.array([0, 2, 2, 1, 0, 1])  # drawn by lot


@jax.jit  # one program for all tests that need it
@jax.value_and_grad
def loss_and_gradient(params):
    scores = jax.vmap(TINY, (None, 0))(params, IMAGES)
    return optax.softmax_cross_entropy_with_integer_labels(scores, LABELS).mean()


def same(one, two):
    """Equal bit for bit; in NumPy, which compiles nothing."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return jax.tree.structure(one) == jax.tree.structure(two) and all(np.array_equal(a, b) for a, b in pairs)


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


@pytest.mark.parametrize("outputs", [10, 1000])
def test_the_number_of_parameters_is_that_of_the_table(outputs):
    normalised = lambda weights, channels: weights + 2 * channels
    total, channels = normalised(3 * 3 * 3 * 16, 16), 16
    for kernel, expanded, out, squeeze, _, _ in ROWS:
        if expanded != channels:
            total += normalised(channels * expanded, expanded)
        total += normalised(kernel**2 * expanded, expanded)
        if squeeze:
            few = {16: 8, 96: 24, 240: 64, 120: 32, 144: 40, 288: 72, 576: 144}[expanded]  # a quarter, in eights
            total += (expanded + 1) * few + (few + 1) * expanded
        total += normalised(expanded * out, out)
        channels = out
    total += normalised(96 * 576, 576) + (576 + 1) * 1024 + (1024 + 1) * outputs
    assert count(MobileNetV3Small(outputs=outputs)) == total
    assert total == 2_542_856 - (1000 - outputs) * 1025  # the count that torchvision publishes for 1000 classes


def test_channel_counts_are_rounded_to_eights():
    for value in np.arange(1, 700) / 4:
        nearest = min(range(8, 200, 8), key=lambda m: (abs(m - value), -m))
        assert divisible(value) == nearest + 8 * (nearest < 0.9 * value)
    assert count(MobileNetV3Small(width=0.25)) < count(MobileNetV3Small(width=0.5)) / 2


def test_leaves_are_named_by_what_they_are():
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(MobileNetV3Small().init, jax.random.key(0)))
    kinds = {(path[-1].key, leaf.ndim > 1) for path, leaf in leaves}
    assert kinds == {("weight", True), ("bias", False), ("scale", False), ("shift", False)}


def lax_convolution(image, kernel, stride, groups=1):
    half = (kernel.shape[0] - 1) // 2
    return jax.lax.conv_general_dilated(
        image[None],
        kernel,
        (stride, stride),
        ((half, half), (half, half)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )[0]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("size", [(7, 6), (2, 3), (1, 1)])
def test_convolutions_equal_those_of_lax(size, kernel, stride):
    rng = np.random.default_rng(0)
    image, filters = jnp.asarray(rng.normal(size=(*size, 4))), jnp.asarray(rng.normal(size=(kernel, kernel, 4)))
    full, single = jnp.asarray(rng.normal(size=(3, 4 * kernel**2))), jnp.asarray(rng.normal(size=(3, 4)))

    @jax.jit
    def ours():
        return depthwise(filters, image, stride), convolve(full, image, kernel, stride), pointwise(single, image)

    @jax.jit
    def theirs():
        square = full.reshape(3, kernel, kernel, 4).transpose(1, 2, 3, 0)
        return (
            lax_convolution(image, filters[:, :, None], stride, groups=4),
            lax_convolution(image, square, stride),
            lax_convolution(image, single.T[None, None], 1),
        )

    for found, wanted in zip(ours(), theirs(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


def test_convolutions_and_their_gradients_are_the_same_for_every_client():
    rng = np.random.default_rng(0)
    filters, images = jnp.asarray(rng.normal(size=(2, 5, 5, 4))), jnp.asarray(rng.normal(size=(2, 3, 6, 5, 4)))
    ours = lambda w, x: jnp.sum(depthwise(w, x, 2) ** 3)
    theirs = lambda w, x: jnp.sum(lax_convolution(x, w[:, :, None], 2, groups=4) ** 3)
    gradient = lambda f: jax.vmap(jax.vmap(jax.grad(f, (0, 1)), (None, 0)))
    found = jax.jit(gradient(ours))(filters, images)
    for client in range(2):
        for example in range(3):
            wanted = jax.jit(jax.grad(theirs, (0, 1)))(filters[client], images[client, example])
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a[client, example], b, rtol=1e-9, atol=1e-9)


def naive_group_norm(scale, shift, image, groups):
    out = np.empty(image.shape)
    size = image.shape[-1] // groups
    for start in range(0, image.shape[-1], size):
        part = np.asarray(image, np.float64)[..., start : start + size]
        out[..., start : start + size] = (part - part.mean()) / np.sqrt(part.var() + 1e-3)
    return np.asarray(scale, np.float64) * out + np.asarray(shift, np.float64)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("size", [(3, 5), (1, 1)])
def test_group_norm_equals_a_naive_one(size, groups):
    rng = np.random.default_rng(0)
    scale, shift, image = rng.normal(size=12), rng.normal(size=12), 3 + 2 * rng.normal(size=(*size, 12))
    wanted = naive_group_norm(scale, shift, image, groups)
    found = jax.jit(group_norm, static_argnums=3)(scale, shift, image, groups)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


def test_group_norm_of_narrow_numbers_takes_wide_statistics():
    """The result may be off by its own rounding, 2^-8 of the largest numbers, but not by that of the mean."""
    rng = np.random.default_rng(0)
    image = jnp.asarray(20 + rng.normal(size=(16, 16, 8)), jnp.bfloat16)
    one, zero = jnp.ones(8, jnp.bfloat16), jnp.zeros(8, jnp.bfloat16)
    found = jax.jit(group_norm, static_argnums=3)(one, zero, image, 1)
    assert found.dtype == jnp.bfloat16
    wanted = naive_group_norm(one, zero, image, 1)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=2**-8 * np.abs(wanted).max())


def plain_convolution(image, kernel, stride):
    """In NumPy; a kernel of three dimensions has one filter for each channel."""
    half = (kernel.shape[0] - 1) // 2
    padded = np.pad(image, ((half, half), (half, half), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[:2], axis=(0, 1))[::stride, ::stride]
    return np.einsum("hwcij,ijc->hwc" if kernel.ndim == 3 else "hwcij,ijco->hwo", windows, kernel, optimize=True)


def plain_network(model, params, image):
    """The published network in NumPy, straight from the table."""
    swish = lambda x: x * np.clip(x + 3, 0, 6) / 6
    line = lambda p, x: np.asarray(p["weight"]) @ x + np.asarray(p["bias"])

    def normalise(p, x):
        most = max(g for g in range(1, model.groups + 1) if x.shape[-1] % g == 0 and x.shape[-1] // g >= 8)
        return naive_group_norm(p["scale"], p["shift"], x, most)

    def convolution(p, x, kernel, stride=1):
        weight = np.asarray(p["weight"]).reshape(-1, kernel, kernel, x.shape[-1]).transpose(1, 2, 3, 0)
        return normalise(p, plain_convolution(x, weight, stride))

    x, residuals = swish(convolution(params["stem"], image, 3, model.stem_stride)), 0
    for p, (kernel, _, _, squeeze, activation, stride) in zip(params["bottlenecks"], ROWS, strict=True):
        act = swish if activation == "HS" else lambda x: np.maximum(x, 0)
        before = x
        if "expand" in p:
            x = act(convolution(p["expand"], x, 1))
        weight = np.asarray(p["depthwise"]["weight"])
        assert weight.shape[0] == kernel
        x = act(normalise(p["depthwise"], plain_convolution(x, weight, stride)))
        assert squeeze == ("squeeze" in p)
        if squeeze:
            gate = line(p["excite"], np.maximum(line(p["squeeze"], x.mean((0, 1))), 0))
            x = x * np.clip(gate / 6 + 0.5, 0, 1)
        x = convolution(p["project"], x, 1)
        if stride == 1 and x.shape == before.shape:
            x, residuals = x + before, residuals + 1
    x = swish(convolution(params["last"], x, 1)).mean((0, 1))
    return line(params["output"], swish(line(params["hidden"], x))), residuals


@pytest.mark.parametrize(
    ("model", "residuals"),
    [
        # Rows 3, 5, 6, 8, 10 and 11 keep their channels; at a twentieth of the width row 7 does too.
        (MobileNetV3Small((33, 20, 3), outputs=4), 6),
        (TINY, 7),
        (MobileNetV3Small((9, 8, 2), outputs=3, width=0.05, groups=1), 7),
    ],
    ids=["published", "tiny", "layer normalisation"],
)
def test_the_network_equals_a_plain_one(model, residuals):
    params, image = random_params(model), np.random.default_rng(1).normal(size=model.shape)
    wanted, found = plain_network(model, params, image)
    assert found == residuals
    np.testing.assert_allclose(jax.jit(model)(params, jnp.asarray(image)), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_parameters_decide_the_type(dtype):
    model = MobileNetV3Small((28, 28, 1), outputs=7)
    params = jax.eval_shape(lambda key: model.init(key, dtype), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    for shape, kind in [((28, 28, 1), np.float32), ((28, 28), np.uint8)]:
        out = jax.eval_shape(model, params, jax.ShapeDtypeStruct(shape, kind))
        assert (out.shape, out.dtype) == ((7,), jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_narrow_numbers_give_nearly_the_same_outputs(dtype):
    """Some forty layers, each of which may round by the type's half unit and pass on what came before."""
    params, forward = random_params(TINY), jax.jit(TINY)
    wanted = np.asarray(forward(params, IMAGES[0]))
    narrow = jax.tree.map(lambda a: np.asarray(a).astype(dtype), params)
    error = np.asarray(forward(narrow, IMAGES[0]), np.float64) - wanted
    assert 0 < np.linalg.norm(error) < 40 * jnp.finfo(dtype).eps * np.linalg.norm(wanted)


def test_the_start_follows_he_and_differs_everywhere():
    model = MobileNetV3Small(width=0.5)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        layer, name = path[-2].key, path[-1].key
        if name != "weight":
            np.testing.assert_array_equal(leaf, float(name == "scale"))
            continue
        inputs = leaf.shape[0] * leaf.shape[1] if layer == "depthwise" else leaf.shape[1]
        gain = 1 if layer in ("output", "excite") else 2
        # The mean square of n normal numbers of variance 1 has the variance 2 / n.
        assert np.mean(np.square(leaf)) * inputs / gain == pytest.approx(1, abs=5 * (2 / leaf.size) ** 0.5), path
    one, two = (params["bottlenecks"][i]["project"]["weight"].ravel() for i in (4, 5))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / one.size**0.5
    assert same(params, model.init(jax.random.key(0)))
    assert not same(params, model.init(jax.random.key(1)))


@pytest.mark.slow
def test_the_gradient_equals_finite_differences_in_every_leaf():
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(random_params(TINY))
    gradient = jax.tree.leaves(loss_and_gradient(tree.unflatten(leaves))[1])
    live = 0
    for i, leaf in enumerate(leaves):
        direction = rng.normal(size=leaf.shape)
        shifted = lambda h: tree.unflatten([*leaves[:i], np.asarray(leaf) + h * direction, *leaves[i + 1 :]])  # noqa: B023
        up, down = (float(loss_and_gradient(shifted(h))[0]) for h in (1e-6, -1e-6))
        slope = float(np.vdot(gradient[i], direction))
        assert (up - down) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7)
        live += abs(slope) > 1e-5
    assert live > 0.9 * len(leaves)


def test_a_tiny_network_learns_a_handful_of_images():
    """Labels drawn by lot cannot be guessed, so a loss far below log 3 was learnt."""
    params = jax.tree.map(np.asarray, TINY.init(jax.random.key(0)))
    first, _ = loss_and_gradient(params)
    for _ in range(60):
        _, gradient = loss_and_gradient(params)
        params = jax.tree.map(lambda a, g: a - 0.1 * np.asarray(g), params, gradient)
    assert loss_and_gradient(params)[0] < min(np.log(3), first) / 3


def test_a_saved_network_comes_back_exactly(tmp_path):
    params = random_params(TINY)
    loaded = load_model(save_model(tmp_path / "m.npz", TINY, params))
    assert loaded.model == TINY
    assert same(loaded.params, params)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MobileNetV3Small((32, 32)), r"shape must be \(height, width, channels\), got \(32, 32\)"),
        (lambda: MobileNetV3Small((32, 0, 3)), r"MobileNetV3Small: shape\[1\] must be"),
        (lambda: MobileNetV3Small(outputs=0), "outputs must be a whole number"),
        (lambda: MobileNetV3Small(groups=3), "groups must be 1, 2, 4 or 8.*got 3"),
        (lambda: MobileNetV3Small(width=0.0), "width must be a number above 0.*got 0.0"),
        (lambda: MobileNetV3Small(width=float("nan")), "width must be a number above 0.*got nan"),
        (lambda: MobileNetV3Small(width="half"), "width must be a number above 0.*got 'half'"),  # type: ignore[arg-type]
        (lambda: MobileNetV3Small(stem_stride=2.0), "stem_stride must be a whole number"),  # type: ignore[arg-type]
        (lambda: MobileNetV3Small(stem_stride=4), "stem_stride must be 1 or 2.*got 4"),
        (lambda: TINY(random_params(TINY), jnp.zeros((2, 9, 8, 2))), "MobileNetV3Small.*is x a whole batch"),
    ],
)
def test_mistakes_are_explained(build, message):
    with pytest.raises(ValueError, match=message):
        build()
