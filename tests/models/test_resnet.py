"""ResNet-18, its normalisations and its files, against a plain network on torchvision's names and against torch."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedstrata.models import MLP, load_model, save_model
from fedstrata.models.convolution import group_norm, max_pool, mean_pool
from fedstrata.models.norm import frozen_norm
from fedstrata.models.pretrained import load_pretrained
from fedstrata.models.resnet import ResNet18

TINY = ResNet18((9, 8, 2), outputs=3, norm="batch", width=2)
LARGE = ResNet18((9, 8, 2), outputs=3, norm="batch", width=2, stem="imagenet")  # the large stem on the small images
GROUP = ResNet18((9, 8, 2), outputs=3, width=4, groups=4)
IMAGES = np.random.default_rng(2).normal(size=(5, *TINY.shape))


def torch_state(model, statistics=True, seed=0):
    """Random arrays under the names and in the layout of torchvision; nowhere zero or one."""
    rng, state = np.random.default_rng(seed), {}

    def convolution(name, outputs, inputs, kernel):
        spread = (2 / (inputs * kernel**2)) ** 0.5
        state[f"{name}.weight"] = spread * rng.normal(size=(outputs, inputs, kernel, kernel))

    def norm(name, channels):
        state[f"{name}.weight"] = 1 + 0.3 * rng.normal(size=channels)
        state[f"{name}.bias"] = 0.3 * rng.normal(size=channels)
        if statistics:
            state[f"{name}.running_mean"] = 0.3 * rng.normal(size=channels)
            state[f"{name}.running_var"] = rng.uniform(0.5, 2, size=channels)
            state[f"{name}.num_batches_tracked"] = np.array(7)

    channels = model.width
    convolution("conv1", channels, model.shape[2], 7 if model.stem == "imagenet" else 3)
    norm("bn1", channels)
    for stage in range(4):
        wide = model.width * 2**stage
        for block in range(2):
            at = f"layer{stage + 1}.{block}"
            convolution(f"{at}.conv1", wide, channels, 3)
            norm(f"{at}.bn1", wide)
            convolution(f"{at}.conv2", wide, wide, 3)
            norm(f"{at}.bn2", wide)
            if stage and not block:
                convolution(f"{at}.downsample.0", wide, channels, 1)
                norm(f"{at}.downsample.1", wide)
            channels = wide
    state["fc.weight"] = rng.normal(size=(model.outputs, channels)) / channels**0.5
    state["fc.bias"] = rng.normal(size=model.outputs)
    return state


def plain_network(state, images, ops, large=False):
    """He et al. (2016), Table 1 and Figure 3, on a batch of images (n, channels, height, width)."""
    unit = lambda conv, bn, x, stride=1: ops.norm(bn, ops.conv(x, state[f"{conv}.weight"], stride))
    x = ops.relu(unit("conv1", "bn1", images, 2 if large else 1))
    x = ops.pool(x) if large else x
    for stage in range(1, 5):
        for block in range(2):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and not block else 1
            inside = ops.relu(unit(f"{at}.conv1", f"{at}.bn1", x, stride))
            inside = unit(f"{at}.conv2", f"{at}.bn2", inside)
            x = unit(f"{at}.downsample.0", f"{at}.downsample.1", x, stride) if stride == 2 else x
            x = ops.relu(x + inside)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


def numpy_conv(x, weight, stride):
    half = (weight.shape[-1] - 1) // 2
    found = jax.lax.conv_general_dilated(jnp.asarray(x), jnp.asarray(weight), (stride, stride), [(half, half)] * 2)
    return np.asarray(found)


def numpy_pool(x):
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    rows, columns = range(0, x.shape[2], 2), range(0, x.shape[3], 2)
    return np.stack([np.stack([padded[:, :, i : i + 3, j : j + 3].max((2, 3)) for j in columns], -1) for i in rows], -2)


def numpy_ops(state, mode, groups=1):
    """mode: stored statistics, those of the batch at hand, or those of groups of channels in one image."""
    column = lambda vector: vector.reshape(1, -1, 1, 1)

    def norm(at, x):
        if mode == "stored":
            mean, variance = column(state[f"{at}.running_mean"]), column(state[f"{at}.running_var"])
        elif mode == "batch":
            mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        else:
            number = min(groups, x.shape[1] // 2)
            parts = x.reshape(len(x), number, -1)
            each = lambda value: np.repeat(value, x.shape[1] // number, axis=1).reshape(*x.shape[:2], 1, 1)
            mean, variance = each(parts.mean(2)), each(parts.var(2))
        return column(state[f"{at}.weight"]) * (x - mean) / np.sqrt(variance + 1e-5) + column(state[f"{at}.bias"])

    return SimpleNamespace(conv=numpy_conv, norm=norm, relu=lambda x: np.maximum(x, 0), pool=numpy_pool)


def channels_first(images):
    return np.asarray(images).transpose(0, 3, 1, 2)


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


@functools.cache
def random_params(model):
    """Parameters that are nowhere special: no zeros or ones that could hide a mistake."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if leaf.ndim > 1:
            return np.asarray((2 / leaf.shape[1]) ** 0.5 * rng.normal(size=leaf.shape))
        return np.asarray(0.3 * rng.uniform(-1, 1, size=leaf.shape) + (path[-1].key in ("scale", "variance")))

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def named(tree):
    return [(path[-1].key, np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def split(tree):
    """The arrays that are statistics, and the others."""
    leaves = named(tree)
    own = [leaf for name, leaf in leaves if name in ("mean", "variance")]
    return own, [leaf for name, leaf in leaves if name not in ("mean", "variance")]


def loss(model, params, images):
    return jnp.mean(jnp.square(jax.vmap(model, (None, 0))(params, images) - 1))


gradient_of_tiny = jax.jit(jax.grad(functools.partial(loss, TINY)))


# The counts that torchvision publishes, and the usual one of the variant for CIFAR-10.
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("shape", "outputs", "total"), [((32, 32, 3), 10, 11_173_962), ((224, 224, 3), 1000, 11_689_512)]
)
def test_the_number_of_trained_parameters_is_the_published_one(shape, outputs, total, norm):
    params = jax.eval_shape(ResNet18(shape, outputs, norm).init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    kinds = {"weight": 0, "bias": 0, "scale": 0, "shift": 0, "mean": 0, "variance": 0}
    for path, leaf in leaves:
        kinds[path[-1].key] += leaf.size
    assert sum(size for name, size in kinds.items() if name not in ("mean", "variance")) == total
    statistics = 4800 if norm == "batch" else 0  # 64 + 4 x (64 + 128 + 256 + 512) channels, and 896 of shortcuts
    assert kinds["scale"] == kinds["shift"] == 64 + 4 * 960 + 896 == 4800
    assert kinds["mean"] == kinds["variance"] == statistics


def test_the_stem_follows_the_size_of_the_images():
    kernel = lambda **options: ResNet18(**options).stem_kernel
    assert [kernel(shape=(n, 20, 3)) for n in (32, 64, 65)] == [3, 3, 7]
    assert kernel(shape=(20, 65, 3)) == kernel(stem="imagenet") == 7
    assert kernel(shape=(224, 224, 3), stem="small") == 3


@pytest.mark.parametrize("model", [TINY, LARGE], ids=["small", "imagenet"])
def test_a_loaded_network_equals_a_plain_one(model, stored):
    state = torch_state(model)
    wanted = plain_network(state, channels_first(IMAGES), numpy_ops(state, "stored"), large=model is LARGE)
    found = forward(model)(load_pretrained(stored(state), model), IMAGES)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_network_with_groups_equals_a_plain_one(stored):
    state = torch_state(GROUP, statistics=False)
    wanted = plain_network(state, channels_first(IMAGES), numpy_ops(state, "group", GROUP.groups))
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
        pool=lambda x: f.max_pool2d(x, 3, stride=2, padding=1),
    )
    images = torch.from_numpy(channels_first(IMAGES).copy())
    wanted = plain_network(tensors, images, ops, large=model is LARGE).numpy()
    found = forward(model)(load_pretrained(stored(state), model), IMAGES)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(7, 6), (2, 3), (1, 1)])
def test_pooling_equals_that_of_lax(size):
    image = jnp.asarray(np.random.default_rng(0).normal(size=(*size, 3)) - 2)
    wanted = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (3, 3, 1), (2, 2, 1), ((1, 1), (1, 1), (0, 0)))
    np.testing.assert_array_equal(max_pool(image, 3, 2), wanted)
    if min(size) > 1:
        wanted = jax.lax.reduce_window(image, 0.0, jax.lax.add, (2, 2, 1), (2, 2, 1), "VALID") / 4
        np.testing.assert_allclose(mean_pool(image), wanted, rtol=1e-12)


@pytest.mark.parametrize("kind", ["group", "frozen"])
def test_a_narrow_image_is_scaled_in_the_type_of_the_parameters(kind):
    """Only the result is rounded: scales between 1 and 1 + 2^-9 would all be 1 in bfloat16, and near a result of 0
    the rounding of what is shifted there would show."""
    rng = np.random.default_rng(0)
    image = jnp.asarray(20 + rng.normal(size=(16, 16, 4)), jnp.bfloat16)
    wide = np.asarray(image, np.float64)
    scale, shift = jnp.asarray(1 + rng.uniform(0, 2**-9, 4), jnp.float32), jnp.full(4, -1.0, jnp.float32)
    if kind == "group":
        found = group_norm(scale, shift, image, 1, 1e-5)
        normal = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5)
    else:
        layer = {
            "scale": scale,
            "shift": shift,
            "mean": jnp.full(4, 20, jnp.float32),
            "variance": jnp.ones(4, jnp.float32),
        }
        found = frozen_norm(layer, image)
        normal = (wide - 20) / np.sqrt(1 + 1e-5)
    assert found.dtype == jnp.bfloat16
    wanted = np.asarray(scale, np.float64) * normal - 1
    # Rounded once, at the end: half a unit of bfloat16, relative to the result itself even where it is small.
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.slow
def test_every_client_has_its_own_weights_and_what_is_not_kept_changes_nothing():
    lean = ResNet18(TINY.shape, 3, "batch", width=2, remat=True)
    clients = jax.tree.map(lambda a: np.stack([a, 0.9 * a[::-1]]), random_params(TINY))
    images = np.stack([IMAGES, IMAGES[::-1] + 0.1])
    found = jax.jit(jax.vmap(jax.grad(functools.partial(loss, lean))))(clients, images)
    for i in range(2):
        wanted = gradient_of_tiny(jax.tree.map(lambda a: a[i], clients), images[i])  # noqa: B023
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-8, atol=1e-10)


def kept(model):
    """The size of what the forward pass keeps for the backward pass."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((8, *model.shape), jnp.float32)
    backward = jax.eval_shape(lambda p, x: jax.vjp(lambda p: loss(model, p, x), p)[1], params, images)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    return sum(leaf.size for leaf in jax.tree.leaves(backward)) - weights


def test_remat_keeps_far_less():
    """3x3 patches of an image are nine times its size, and each product's result is no larger than one image."""
    plain, lean = (ResNet18((32, 32, 3), width=4, remat=remat) for remat in (False, True))
    assert kept(lean) < kept(plain) / 4


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_bfloat16_is_for_products_and_activations_only(norm):
    model = ResNet18((32, 32, 3), outputs=2, norm=norm, compute="bfloat16")
    params = jax.eval_shape(lambda key: model.init(key, jnp.float32), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    found = jax.make_jaxpr(model)(params, jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8))
    assert found.out_avals[0].dtype == jnp.float32
    every = list(equations(found.jaxpr))
    products = [e.invars[0].aval.dtype for e in every if e.primitive.name == "dot_general"]
    assert products == [jnp.bfloat16] * 20 + [jnp.float32]  # 1 + 16 convolutions and 3 shortcuts, then the outputs
    for e in every:
        if e.primitive.name in ("reduce_sum", "rsqrt"):
            assert e.invars[0].aval.dtype == jnp.float32


def test_bfloat16_gives_nearly_the_same_outputs_and_wide_gradients():
    """Some twenty layers, each of which may round by the type's half unit and pass on what came before."""
    exact, narrow = TINY, ResNet18(TINY.shape, 3, "batch", width=2, compute="bfloat16")
    params = jax.tree.map(lambda a: a.astype(jnp.float32), random_params(exact))
    images = jnp.asarray(IMAGES, jnp.float32)
    wanted, found = (forward(model)(params, images) for model in (exact, narrow))
    assert wanted.dtype == found.dtype == jnp.float32
    error = np.linalg.norm(found - wanted)
    assert 0 < error < 20 * float(jnp.finfo(jnp.bfloat16).eps) * np.linalg.norm(wanted)
    gradient = jax.eval_shape(jax.grad(functools.partial(loss, narrow)), params, images)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_parameters_decide_the_type(dtype):
    model = ResNet18((28, 28, 1), outputs=7)
    params = jax.eval_shape(lambda key: model.init(key, dtype), jax.random.key(0))
    for shape, kind in [((28, 28, 1), np.float32), ((28, 28), np.uint8)]:
        out = jax.eval_shape(model, params, jax.ShapeDtypeStruct(shape, kind))
        assert (out.shape, out.dtype) == ((7,), jnp.dtype(dtype))


def test_statistics_are_constants_for_gradients():
    params, images = random_params(TINY), jnp.asarray(IMAGES)
    gradient = gradient_of_tiny(params, images)
    statistics, trained = split(gradient)
    assert all(np.all(leaf == 0) for leaf in statistics)
    assert all(np.any(leaf != 0) for leaf in trained)
    # They do matter for the outputs: a zero gradient is the policy, not a missing dependence.
    moved = jax.tree_util.tree_map_with_path(lambda path, a: a + 0.5 if path[-1].key == "mean" else a, params)
    assert np.abs(np.subtract(forward(TINY)(moved, images), forward(TINY)(params, images))).max() > 1e-2


@pytest.mark.parametrize("model", [TINY, LARGE], ids=["small", "imagenet"])
def test_with_statistics_normalises_every_layer(model, stored):
    state = torch_state(model)
    ops = numpy_ops(state, "batch")
    seen = {}

    def norm(at, x):
        seen[at] = x
        return ops.norm(at, x)

    recording = SimpleNamespace(conv=ops.conv, norm=norm, relu=ops.relu, pool=ops.pool)
    wanted = plain_network(state, channels_first(IMAGES), recording, large=model is LARGE)
    loaded = load_pretrained(stored(state), model)
    params = model.with_statistics(loaded, IMAGES)
    np.testing.assert_allclose(forward(model)(params, IMAGES), wanted, rtol=1e-8, atol=1e-8)
    for one, two in zip(split(params)[1], split(loaded)[1], strict=True):
        np.testing.assert_array_equal(one, two)
    layers = [(params["stem"], seen["bn1"]), (params["stages"][2][0]["shortcut"], seen["layer3.0.downsample.1"])]
    for layer, x in [*layers, (params["stages"][1][1]["second"], seen["layer2.1.bn2"])]:
        plain = layer | {"scale": jnp.ones_like(layer["scale"]), "shift": jnp.zeros_like(layer["shift"])}
        normal = jax.vmap(frozen_norm, (None, 0))(plain, jnp.asarray(x.transpose(0, 2, 3, 1)))
        np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-9)
        np.testing.assert_allclose(normal.var((0, 1, 2)), 1, atol=1e-3)  # 1e-5 stands under the root


def test_statistics_do_not_depend_on_the_old_ones():
    params = random_params(TINY)
    spoilt = jax.tree_util.tree_map_with_path(
        lambda path, a: np.full(a.shape, 1e3) if path[-1].key in ("mean", "variance") else a, params
    )
    for a, b in zip(*(split(TINY.with_statistics(p, IMAGES))[0] for p in (params, spoilt)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_start_follows_he_and_differs_everywhere():
    params = ResNet18((8, 8, 3), width=8, norm="batch").init(jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, leaf = path[-1].key, np.asarray(leaf)
        if name != "weight":
            np.testing.assert_array_equal(leaf, float(name in ("scale", "variance")))
            continue
        gain = 1 if path[-2].key == "output" else 2
        # The mean square of n normal numbers of variance 1 has the variance 2 / n.
        spread = np.mean(np.square(leaf)) * leaf.shape[1] / gain
        assert spread == pytest.approx(1, abs=5 * (2 / leaf.size) ** 0.5), path
    one, two = (np.ravel(params["stages"][3][1][name]["weight"]) for name in ("first", "second"))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / one.size**0.5


def test_a_saved_network_comes_back_exactly(tmp_path):
    params = random_params(TINY)
    loaded = load_model(save_model(tmp_path / "m.npz", TINY, params), TINY)
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_number_of_outputs_replaces_the_last_layer(stored):
    state = torch_state(TINY)
    other = ResNet18(TINY.shape, 5, "batch", width=2)
    key = jax.random.key(3)
    found, same = load_pretrained(stored(state), other, key), load_pretrained(stored(state), TINY, key)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(found["output"][name], other.init(key)["output"][name])
        np.testing.assert_array_equal(same["output"][name], state[f"fc.{name}"])
    np.testing.assert_array_equal(found["stem"]["scale"], state["bn1.weight"])
    float32 = load_pretrained(stored(state), TINY, dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(float32)} == {jnp.dtype("float32")}


def without(state, *names):
    return {name: array for name, array in state.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (lambda s: without(s, "layer2.0.conv1.weight"), TINY, r"missing: layer2\.0\.conv1\.weight$"),
        (lambda s: s | {"layer5.0.conv1.weight": np.ones(2)}, TINY, r"unexpected: layer5\.0\.conv1\.weight$"),
        (lambda s: s | {"bn1.bias": np.ones(3)}, TINY, r"wrong shape: bn1\.bias of shape \(3,\) instead of \(2,\)$"),
        (lambda s: s, LARGE, r'conv1\.weight of shape \(2, 2, 3, 3\) instead of \(2, 2, 7, 7\); .*stem="imagenet"'),
        (lambda s: s | {"bn1.bias": np.ones(2, int)}, TINY, r"not floating-point: bn1\.bias of int64$"),
        (
            lambda s: s,
            ResNet18(TINY.shape, 3, width=2),
            r'unexpected: bn1.running_mean, .* and 35 more; .*norm="batch"',
        ),
        (lambda s: torch_state(TINY, statistics=False), TINY, r'missing: .*bn1\.running_mean.* more; .*norm="group"'),
        (lambda s: s | {"fc.weight": np.ones((3, 7))}, TINY, r"fc\.weight of shape \(3, 7\) instead of \(3, 16\)$"),
        (lambda s: s | {"fc.weight": np.ones((4, 16))}, TINY, r"fc\.bias of shape \(3,\) instead of \(4,\)$"),
    ],
)
def test_files_that_do_not_fit_are_explained(change, model, message, stored):
    with pytest.raises(ValueError, match=message):
        load_pretrained(stored(change(torch_state(TINY))), model)


def test_files_of_other_kinds(tmp_path):
    path = tmp_path / "w.npz"
    with pytest.raises(FileNotFoundError):
        load_pretrained(path, TINY)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"is not an \.npz of arrays"):
        load_pretrained(path, TINY)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ValueError, match=r"is not an \.npz of arrays"):
        load_pretrained(path, TINY)
    np.savez(path, **torch_state(TINY))
    with pytest.raises(TypeError, match="must be a ResNet18 or a DenseNet121, got MLP"):
        load_pretrained(path, MLP((2, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ResNet18((32, 32)), r"ResNet18: shape must be \(height, width, channels\), got \(32, 32\)"),
        (lambda: ResNet18((32, 0, 3)), r"ResNet18: shape\[1\] must be"),
        (lambda: ResNet18(outputs=0), "outputs must be a whole number"),
        (lambda: ResNet18(width=0), "width must be a whole number"),
        (lambda: ResNet18(groups=0), "groups must be a whole number"),
        (lambda: ResNet18(norm="layer"), "unknown ResNet18.norm 'layer'"),  # type: ignore[arg-type]
        (lambda: ResNet18(stem="large"), "unknown ResNet18.stem 'large'"),  # type: ignore[arg-type]
        (lambda: ResNet18(compute="float16"), "unknown ResNet18.compute 'float16'; did you mean"),  # type: ignore[arg-type]
        (lambda: TINY(random_params(TINY), jnp.asarray(IMAGES)), "ResNet18.*is x a whole batch"),
        (lambda: GROUP.with_statistics({}, IMAGES), 'with_statistics needs norm="batch"'),
        (lambda: TINY.with_statistics({}, IMAGES[:0]), "a batch of at least one image"),
    ],
)
def test_mistakes_are_explained(build, message):
    with pytest.raises(ValueError, match=message):
        build()
