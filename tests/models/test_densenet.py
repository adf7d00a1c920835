"""DenseNet-121 against the published counts, a plain network on torchvision's names, and torch."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import fedstrata as fs
from fedstrata.models import load_model, save_model
from fedstrata.models.densenet import DenseNet121
from fedstrata.models.norm import group_count
from fedstrata.models.pretrained import load_pretrained
from fedstrata.problems.losses import Classification

SHAPE, BLOCKS, GROWTH, WIDTH = (9, 11, 2), (2, 1, 2), 2, 6
build = functools.partial(DenseNet121, SHAPE, 3, width=WIDTH, blocks=BLOCKS, growth=GROWTH)
TINY, GROUP = build("batch"), build(groups=3)
LARGE = DenseNet121((13, 19, 2), 3, "batch", stem="imagenet", width=WIDTH, blocks=BLOCKS, growth=GROWTH)


def torch_state(model, statistics=True):
    """Random arrays under the names and in the layout of torchvision; nowhere zero or one."""
    rng, state = np.random.default_rng(0), {}

    def convolution(name, outputs, inputs, kernel):
        spread = (2 / (inputs * kernel**2)) ** 0.5
        state[f"features.{name}.weight"] = spread * rng.normal(size=(outputs, inputs, kernel, kernel))

    def norm(name, channels):
        state[f"features.{name}.weight"] = 1 + 0.3 * rng.normal(size=channels)
        state[f"features.{name}.bias"] = 0.3 * rng.normal(size=channels)
        if statistics:
            state[f"features.{name}.running_mean"] = 0.3 * rng.normal(size=channels)
            state[f"features.{name}.running_var"] = rng.uniform(0.5, 2, size=channels)
            state[f"features.{name}.num_batches_tracked"] = np.array(7)

    channels = WIDTH
    convolution("conv0", channels, SHAPE[2], 7 if model.stem == "imagenet" else 3)
    norm("norm0", channels)
    for i, length in enumerate(BLOCKS, start=1):
        for j in range(1, length + 1):
            at = f"denseblock{i}.denselayer{j}"
            norm(f"{at}.norm1", channels)
            convolution(f"{at}.conv1", 4 * GROWTH, channels, 1)
            norm(f"{at}.norm2", 4 * GROWTH)
            convolution(f"{at}.conv2", GROWTH, 4 * GROWTH, 3)
            channels += GROWTH
        if i < len(BLOCKS):
            norm(f"transition{i}.norm", channels)
            convolution(f"transition{i}.conv", channels // 2, channels, 1)
            channels //= 2
    norm(f"norm{len(BLOCKS) + 1}", channels)
    state["classifier.weight"] = rng.normal(size=(model.outputs, channels)) / channels**0.5
    state["classifier.bias"] = rng.normal(size=model.outputs)
    return state


def plain_network(state, images, ops, large=False):
    """Huang et al. (2017), Table 1 with bottlenecks, on a batch of images (n, channels, height, width)."""
    active = lambda at, x: ops.relu(ops.norm(f"features.{at}", x))
    conv = lambda at, x, stride=1: ops.conv(x, state[f"features.{at}.weight"], stride)
    x = active("norm0", conv("conv0", images, 2 if large else 1))
    x = ops.largest(x) if large else x
    for i, length in enumerate(BLOCKS, start=1):
        for j in range(1, length + 1):
            at = f"denseblock{i}.denselayer{j}"
            inside = conv(f"{at}.conv1", active(f"{at}.norm1", x))
            x = ops.join([x, conv(f"{at}.conv2", active(f"{at}.norm2", inside))])
        if i < len(BLOCKS):
            x = ops.average(conv(f"transition{i}.conv", active(f"transition{i}.norm", x)))
    x = active(f"norm{len(BLOCKS) + 1}", x)
    return x.mean((2, 3)) @ state["classifier.weight"].T + state["classifier.bias"]


def numpy_ops(state, mode):
    """mode: stored statistics, those of the batch at hand, or those of groups of channels in one image."""
    column = lambda vector: vector.reshape(1, -1, 1, 1)

    def norm(at, x):
        if mode == "stored":
            mean, variance = column(state[f"{at}.running_mean"]), column(state[f"{at}.running_var"])
        elif mode == "batch":
            mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        else:
            channels = x.shape[1]
            number = next(n for n in range(GROUP.groups, 0, -1) if channels % n == 0 and channels // n > 1)
            parts = x.reshape(len(x), number, -1)
            each = lambda value: np.repeat(value, channels // number, axis=1).reshape(len(x), channels, 1, 1)
            mean, variance = each(parts.mean(2)), each(parts.var(2))
        return column(state[f"{at}.weight"]) * (x - mean) / np.sqrt(variance + 1e-5) + column(state[f"{at}.bias"])

    def conv(x, weight, stride):
        half = (weight.shape[-1] - 1) // 2
        return np.asarray(
            jax.lax.conv_general_dilated(jnp.asarray(x), jnp.asarray(weight), (stride, stride), [(half, half)] * 2)
        )

    def windows(x, size, function):
        rows, columns = range(0, x.shape[2] - size + 1, 2), range(0, x.shape[3] - size + 1, 2)
        row = lambda i: np.stack([function(x[:, :, i : i + size, j : j + size]) for j in columns], -1)
        return np.stack([row(i) for i in rows], -2)

    pad = lambda x: np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    return SimpleNamespace(
        conv=conv,
        norm=norm,
        relu=lambda x: np.maximum(x, 0),
        largest=lambda x: windows(pad(x), 3, lambda part: part.max((2, 3))),
        average=lambda x: windows(x, 2, lambda part: part.mean((2, 3))),
        join=lambda parts: np.concatenate(parts, 1),
    )


def images_for(model):
    return np.random.default_rng(2).normal(size=(5, *model.shape))


def channels_first(images):
    return np.asarray(images).transpose(0, 3, 1, 2)


IMAGES = images_for(TINY)


@pytest.fixture
def stored(tmp_path):
    """Writes arrays as the file that `load_pretrained` reads."""

    def write(state):
        np.savez(tmp_path / "weights.npz", **state)
        return tmp_path / "weights.npz"

    return write


@functools.cache
def forward(model):
    return jax.jit(jax.vmap(model, (None, 0)))


def is_statistic(path):
    return path[-1].key in ("mean", "variance")


# What torchvision publishes, and the same with the small stem: 3 x 64 kernels of 9 instead of 49 numbers.
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("shape", "outputs", "total"),
    [((224, 224, 3), 1000, 7_978_856), ((32, 32, 3), 10, 7_978_856 - 40 * 3 * 64 - 990 * 1025)],
)
def test_the_number_of_trained_parameters_is_the_published_one(shape, outputs, total, norm):
    params = jax.eval_shape(DenseNet121(shape, outputs, norm).init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert sum(leaf.size for path, leaf in leaves if not is_statistic(path)) == total
    size = lambda *names: sum(leaf.size for path, leaf in leaves if path[-1].key in names)
    assert size("mean", "variance") == (size("scale", "shift") if norm == "batch" else 0)


def test_there_are_121_layers_with_weights():
    params = jax.eval_shape(DenseNet121().init, jax.random.key(0))
    assert sum(path[-1].key == "weight" for path, _ in jax.tree_util.tree_leaves_with_path(params)) == 121


def test_groups_of_the_published_widths_are_32():
    """All channel counts are multiples of 32, and at least 64."""
    params = jax.eval_shape(DenseNet121().init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert {group_count(leaf.size, 32) for path, leaf in leaves if path[-1].key == "scale"} == {32}


@pytest.mark.parametrize("model", [TINY, LARGE], ids=["small", "imagenet"])
def test_a_loaded_network_equals_a_plain_one(model, stored):
    state = torch_state(model)
    wanted = plain_network(state, channels_first(images_for(model)), numpy_ops(state, "stored"), large=model is LARGE)
    found = forward(model)(load_pretrained(stored(state), model), images_for(model))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_network_with_groups_equals_a_plain_one(stored):
    state = torch_state(GROUP, statistics=False)
    wanted = plain_network(state, channels_first(IMAGES), numpy_ops(state, "group"))
    found = forward(GROUP)(load_pretrained(stored(state), GROUP), IMAGES)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", [TINY, LARGE], ids=["small", "imagenet"])
def test_a_loaded_network_equals_one_of_torch(model, stored):
    torch = pytest.importorskip("torch")
    state = torch_state(model)
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
    f = torch.nn.functional
    stats = lambda at: (tensors[f"{at}.{name}"] for name in ("running_mean", "running_var", "weight", "bias"))
    ops = SimpleNamespace(
        conv=lambda x, weight, stride: f.conv2d(x, weight, stride=stride, padding=(weight.shape[-1] - 1) // 2),
        norm=lambda at, x: f.batch_norm(x, *stats(at), training=False, eps=1e-5),
        relu=f.relu,
        largest=lambda x: f.max_pool2d(x, 3, stride=2, padding=1),
        average=lambda x: f.avg_pool2d(x, 2, stride=2),
        join=lambda parts: torch.cat(parts, 1),
    )
    images = torch.from_numpy(channels_first(images_for(model)).copy())
    wanted = plain_network(tensors, images, ops, large=model is LARGE).numpy()
    found = forward(model)(load_pretrained(stored(state), model), images_for(model))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_names_of_older_files_are_understood(stored):
    state = torch_state(TINY)
    old = {re.sub(r"(denselayer\d+\.(norm|conv))([12])", r"\1.\3", name): array for name, array in state.items()}
    assert old.keys() != state.keys()
    new, same = load_pretrained(stored(state), TINY), load_pretrained(stored(old), TINY)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_number_of_outputs_replaces_the_last_layer(stored):
    state = torch_state(TINY)
    other, key = DenseNet121(SHAPE, 1, "batch", width=WIDTH, blocks=BLOCKS, growth=GROWTH), jax.random.key(3)
    found = load_pretrained(stored(state), other, key)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(found["output"][name], other.init(key)["output"][name])
    np.testing.assert_array_equal(found["last"]["shift"], state["features.norm4.bias"])


def test_with_statistics_equals_normalising_by_the_batch(stored):
    state = torch_state(TINY)
    wanted = plain_network(state, channels_first(IMAGES), numpy_ops(state, "batch"))
    params = TINY.with_statistics(load_pretrained(stored(state), TINY), IMAGES)
    np.testing.assert_allclose(forward(TINY)(params, IMAGES), wanted, rtol=1e-8, atol=1e-8)


def loss(model, params, images):
    return jnp.mean(jnp.square(jax.vmap(model, (None, 0))(params, images) - 1))


@pytest.mark.slow
def test_gradients_of_clients_with_and_without_remat(stored):
    """Own weights under `vmap`, and what is not kept, change nothing; statistics have gradients of zero."""
    params, lean = load_pretrained(stored(torch_state(TINY)), TINY), build("batch", remat=True)
    clients = jax.tree.map(lambda a: np.stack([a, 0.9 * a[::-1]]), params)
    images = np.stack([IMAGES, IMAGES[::-1] + 0.1])
    found = jax.jit(jax.vmap(jax.grad(functools.partial(loss, lean))))(clients, images)
    alone = jax.jit(jax.grad(functools.partial(loss, TINY)))
    live = []
    for i in range(2):
        wanted = jax.tree_util.tree_leaves_with_path(alone(jax.tree.map(lambda a: a[i], clients), images[i]))  # noqa: B023
        for a, (path, b) in zip(jax.tree.leaves(found), wanted, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-8, atol=1e-10)
            if is_statistic(path):
                assert np.all(b == 0)
            else:
                live.append(np.any(np.abs(b) > 1e-6))
    assert np.mean(live) > 0.8  # a few channels may be off for all of five images


@pytest.mark.slow
def test_a_federated_run_leaves_statistics_as_they_are():
    model, rng = DenseNet121((6, 6, 1), 2, "batch", width=4, blocks=(1,), growth=2), np.random.default_rng(0)
    start = model.with_statistics(model.init(jax.random.key(0)), rng.normal(size=(8, 6, 6, 1)))
    clients = [{"x": rng.normal(size=(6, 6, 6, 1)), "y": rng.integers(0, 2, 6)} for _ in range(3)]
    data, rule = fs.Federation.from_clients(clients), fs.FedAvg(0.02, local_steps=2)
    result = fs.run(fs.Average(Classification(model)), rule, data, rounds=2, params=start)
    after = jax.tree.leaves(result.solution())
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(start), after, strict=True):
        if is_statistic(path):
            assert np.abs(np.asarray(a) - float(path[-1].key == "variance")).max() > 1e-3  # not those of `init`
            np.testing.assert_allclose(b, a, rtol=1e-14)
        else:
            assert np.abs(b - a).max() > 1e-6, path


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_bfloat16_is_for_products_and_activations_only():
    model = DenseNet121((32, 32, 3), blocks=(1, 2), growth=4, compute="bfloat16")
    params = jax.eval_shape(lambda key: model.init(key, jnp.float32), jax.random.key(0))
    found = jax.make_jaxpr(model)(params, jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8))
    assert found.out_avals[0].dtype == jnp.float32
    every = list(equations(found.jaxpr))
    products = [e.invars[0].aval.dtype for e in every if e.primitive.name == "dot_general"]
    assert products == [jnp.bfloat16] * 8 + [jnp.float32]  # the stem, 2 in each of 3 layers, a transition; the outputs
    sums = [e.invars[0].aval.dtype for e in every if e.primitive.name in ("reduce_sum", "rsqrt")]
    assert set(sums) == {jnp.dtype("float32")}


def test_bfloat16_gives_nearly_the_same_outputs(stored):
    """A dozen layers, each of which may round by the type's half unit and pass on what came before."""
    params = load_pretrained(stored(torch_state(TINY)), TINY, dtype=jnp.float32)
    images = jnp.asarray(IMAGES, jnp.float32)
    wanted, found = (forward(model)(params, images) for model in (TINY, build("batch", compute="bfloat16")))
    assert wanted.dtype == found.dtype == jnp.float32
    error = np.linalg.norm(found - wanted)
    assert 0 < error < 12 * float(jnp.finfo(jnp.bfloat16).eps) * np.linalg.norm(wanted)


def test_what_remat_keeps_does_not_grow_with_the_square_of_a_block():
    """Joined images of a block of n layers hold about n^2 / 2 growths of channels, the results of products 5 n."""

    def kept(length, remat):
        model = DenseNet121((16, 16, 1), width=4, blocks=(length,), growth=2, remat=remat)
        params = jax.eval_shape(model.init, jax.random.key(0))
        images = jax.ShapeDtypeStruct((8, *model.shape), jnp.float32)
        backward = jax.eval_shape(lambda p, x: jax.vjp(lambda p: loss(model, p, x), p)[1], params, images)
        return sum(leaf.size for leaf in jax.tree.leaves(backward)) - sum(p.size for p in jax.tree.leaves(params))

    assert kept(6, True) < kept(6, False) / 6
    assert kept(6, True) < 2 * kept(3, True)
    assert kept(6, False) > 2 * kept(3, False)


def test_a_saved_network_comes_back_exactly(tmp_path):
    params = TINY.init(jax.random.key(0))
    loaded = load_model(save_model(tmp_path / "m.npz", TINY, params), TINY)
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseNet121((32, 32)), r"DenseNet121: shape must be \(height, width, channels\), got \(32, 32\)"),
        (lambda: DenseNet121(blocks=()), "blocks needs at least one"),
        (lambda: DenseNet121(blocks=(2, 0)), r"blocks\[1\] must be a whole number"),
        (lambda: DenseNet121(growth=0), "growth must be a whole number"),
        (lambda: DenseNet121((7, 32, 3)), "7x32 pixels are halved to nothing"),
        (lambda: DenseNet121((28, 28, 3), stem="imagenet"), '28x28 pixels are halved.*use stem="small"'),
        (lambda: TINY({"output": {"weight": jnp.ones(1)}}, jnp.asarray(IMAGES)), "DenseNet121.*is x a whole batch"),
    ],
)
def test_mistakes_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()
