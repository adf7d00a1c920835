"""Architectures against NumPy, equinox and lax convolutions, under strict promotion in both float types."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata.models import CNN, MLP, Linear

MODELS = [
    (Linear(6, 3), (6,)),
    (Linear(6), (3, 2)),
    (MLP((6, 5, 4)), (6,)),
    (MLP((6, 5, 4, 2), activation="tanh"), (2, 3)),
    (MLP((6, 1), activation="sigmoid"), (6,)),
    (CNN((8, 9, 2), channels=(3, 4), outputs=5, hidden=7), (8, 9, 2)),
    (CNN((6, 6, 1), channels=(3,), outputs=2, kernel=5, hidden=4), (6, 6)),
]


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with (
        jax.enable_x64(request.param == "float64"),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield jnp.dtype(request.param)


def ids(case):
    return type(case).__name__ if isinstance(case, eqx.Module) else None


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape"), MODELS, ids=ids)
def test_outputs_and_gradients_have_the_parameters_type(model, shape, dtype):
    params = jax.jit(model.init)(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {dtype}
    for kind in (np.float32, np.int32, np.uint8):  # tracing is enough for types, and far quicker than compiling
        out = jax.eval_shape(model, params, jax.ShapeDtypeStruct(shape, kind))
        assert out.dtype == dtype
        assert out.ndim == 1
    x = jax.random.normal(jax.random.key(1), (2, *shape), jnp.float32)
    mean = lambda p: jnp.mean(jax.vmap(model, in_axes=(None, 0))(p, x))
    value, gradient = jax.jit(jax.value_and_grad(mean))(params)
    assert float(value) == pytest.approx(float(np.mean([model(params, row) for row in x])), abs=1e-5)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), gradient) == jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert jax.tree.leaves(jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.float32)))[0].dtype == jnp.float32


@pytest.mark.parametrize(("model", "shape"), MODELS, ids=ids)
def test_models_are_static_and_starts_depend_on_the_key_only(model, shape):
    assert jax.tree.leaves(model) == []
    init = jax.jit(model.init)
    one, two, other = (init(jax.random.key(k)) for k in (0, 0, 1))
    assert eqx.tree_equal(one, two)
    assert eqx.tree_equal(one, other) == isinstance(model, Linear)


def test_linear_is_a_matrix_product():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        weight, bias, x = rng.normal(size=(3, 6)), rng.normal(size=3), rng.normal(size=(2, 3))
        out = Linear(6, 3)({"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}, jnp.asarray(x))
        np.testing.assert_allclose(out, weight @ x.ravel() + bias, rtol=1e-13)


@pytest.mark.parametrize(("name", "function"), [("relu", jax.nn.relu), ("sigmoid", jax.nn.sigmoid), ("tanh", jnp.tanh)])
def test_mlp_equals_the_one_of_equinox(name, function):
    model = MLP((4, 8, 8, 3), activation=name)
    params = model.init(jax.random.key(1))
    params = [{"weight": p["weight"], "bias": p["bias"] + 0.1 * i} for i, p in enumerate(params, start=1)]
    other = eqx.nn.MLP(4, 3, width_size=8, depth=2, activation=function, key=jax.random.key(0))
    where = lambda m: [leaf for layer in m.layers for leaf in (layer.weight, layer.bias)]
    other = eqx.tree_at(where, other, [leaf for layer in params for leaf in (layer["weight"], layer["bias"])])
    x = jax.random.normal(jax.random.key(2), (4,))
    np.testing.assert_allclose(model(params, x), other(x), rtol=1e-5)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_cnn_equals_lax_convolution_and_pooling(kernel):
    with jax.enable_x64(True):
        model = CNN((9, 12, 2), channels=(3, 4), outputs=5, kernel=kernel, hidden=6)
        params = jax.tree.map(lambda a: a + 0.05, jax.jit(model.init)(jax.random.key(0)))
        x = jax.random.normal(jax.random.key(1), (9, 12, 2))
        h = x[None]
        for layer in params["convolutions"]:
            weight = layer["weight"].reshape(-1, kernel, kernel, h.shape[-1]).transpose(1, 2, 3, 0)
            h = jax.lax.conv_general_dilated(h, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = jax.nn.relu(h + layer["bias"].reshape(1, 1, 1, -1))
            h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        h = jax.nn.relu(params["hidden"]["weight"] @ h.reshape(-1) + params["hidden"]["bias"])
        np.testing.assert_allclose(jax.jit(model)(params, x), params["output"]["weight"] @ h + params["output"]["bias"])


def test_start_keeps_the_scale_of_activations():
    """He et al.: with variance 2 / inputs, E[a²] is the same after every relu layer."""
    model = MLP((400, 400, 400, 400, 400))
    params = model.init(jax.random.key(0))
    h = jax.random.normal(jax.random.key(1), (400,))
    for layer in params[:-1]:
        h = jax.nn.relu(layer["weight"] @ h)
        assert float(jnp.mean(h**2)) == pytest.approx(1.0, rel=0.5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Linear(0, 2), "Linear: features must be"),
        (lambda: Linear(3, 2.0), "outputs must be a whole number"),  # type: ignore[arg-type]
        (lambda: MLP((3,)), "at least inputs and outputs"),
        (lambda: MLP((3, -1)), r"sizes\[1\]"),
        (lambda: MLP((3, 2), activation="rely"), "did you mean relu"),  # type: ignore[arg-type]
        (lambda: CNN((28, 28)), r"\(height, width, channels\)"),
        (lambda: CNN((28, 28, 1), kernel=4), "kernel must be odd"),
        (lambda: CNN((3, 28, 1)), "halve 3x28 pixels to nothing"),
        (lambda: CNN((28, 28, 1), channels=()), "at least one convolution"),
        (lambda: Linear(3)(Linear(3).init(), jnp.zeros((5, 3))), "is x a whole batch"),
    ],
)
def test_mistakes_are_explained(build, message):
    with pytest.raises(ValueError, match=message):
        build()
