"""Losses against optax and scikit-learn, under strict promotion in both float types."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error

from fedstrata.data.federation import Federation
from fedstrata.models import MLP, Linear
from fedstrata.problems.losses import Classification, Regression

output = lambda params, x: params  # a "model" whose outputs are its parameters
ours_and_gradient = jax.jit(jax.value_and_grad(Classification(output)))
optax_softmax = jax.jit(jax.value_and_grad(optax.softmax_cross_entropy_with_integer_labels))
optax_logistic = jax.jit(jax.value_and_grad(optax.sigmoid_binary_cross_entropy))
ROWS = 40


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with (
        jax.enable_x64(request.param == "float64"),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield jnp.dtype(request.param)


def data(classes: int, dtype, seed: int = 0):
    rng = np.random.default_rng(seed)
    examples = {
        "x": jnp.asarray(rng.normal(size=(ROWS, 5)), dtype),
        "y": jnp.asarray(np.arange(ROWS) % classes, jnp.int32),
    }
    outputs = classes if classes > 2 else 1
    params = {
        "weight": jnp.asarray(rng.normal(size=(outputs, 5)), dtype),
        "bias": jnp.asarray(rng.normal(size=outputs), dtype),
    }
    return Linear(5, outputs), params, examples


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_cross_entropy_and_accuracy_equal_sklearn(classes, dtype):
    model, params, examples = data(classes, dtype)
    loss = Classification(model)
    values = jax.vmap(loss, in_axes=(None, 0))(params, examples)
    assert values.dtype == dtype
    z = np.asarray(jax.vmap(model, in_axes=(None, 0))(params, examples["x"]), np.float64)
    z = np.concatenate([np.zeros_like(z), z], axis=1) if classes == 2 else z
    chances = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-12
    assert float(values.mean()) == pytest.approx(log_loss(examples["y"], chances), rel=tolerance)
    hits = jax.vmap(loss.metrics["accuracy"], in_axes=(None, 0))(params, examples)
    assert hits.dtype == dtype
    assert float(hits.mean()) == pytest.approx(accuracy_score(examples["y"], z.argmax(axis=1)))


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4), st.integers(0, 3))
def test_values_and_gradients_equal_optax(scores, label):
    z, y = jnp.asarray(scores, jnp.float32), jnp.int32(label)
    ours = ours_and_gradient(z, {"x": z, "y": y})
    theirs = optax_softmax(z, y)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-2)  # rounding of scores of size 1e4 is 1e-3
        assert np.isfinite(a).all()


@settings(deadline=None)
@given(st.floats(-1e4, 1e4, width=32), st.integers(0, 1))
def test_logistic_loss_equals_optax_at_any_size(score, label):
    z, y = jnp.float32(score), jnp.int32(label)
    ours = ours_and_gradient(z, {"x": z, "y": y})
    theirs = optax_logistic(z, jnp.float32(label))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_output_with_or_without_an_axis_is_the_same():
    example = {"x": jnp.zeros(1), "y": jnp.int32(1)}
    loss = Classification(output)
    assert loss(jnp.array(0.3), example) == loss(jnp.array([0.3]), example)
    assert loss.accuracy(jnp.array([0.3]), example) == 1
    assert loss.accuracy(jnp.array([-0.3]), example) == 0


@pytest.mark.parametrize("classes", [2, 7])
def test_the_label_costs_no_gather_or_scatter(classes):
    model, params, examples = data(classes, jnp.float32)
    mean = lambda p, e: jnp.mean(jax.vmap(Classification(model), in_axes=(None, 0))(p, e))
    clients = jax.tree.map(lambda a: jnp.stack([a, a]), (params, examples))
    text = jax.jit(jax.vmap(jax.grad(mean))).lower(*clients).as_text()
    assert "gather" not in text
    assert "scatter" not in text


def test_squared_error_equals_sklearn(dtype):
    model, params, examples = data(3, dtype)
    targets = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 3)), dtype)
    loss = Regression(model)
    examples = {**examples, "y": targets}
    z = jax.vmap(model, in_axes=(None, 0))(params, examples["x"])
    values = jax.vmap(loss, in_axes=(None, 0))(params, examples)
    errors = jax.vmap(loss.metrics["mse"], in_axes=(None, 0))(params, examples)
    assert values.dtype == errors.dtype == dtype
    wanted = mean_squared_error(targets, z)
    assert float(errors.mean()) == pytest.approx(wanted, rel=1e-5)
    assert float(values.mean()) == pytest.approx(0.5 * 3 * wanted, rel=1e-5)


def test_scalar_and_integer_targets_fit_one_output(dtype):
    params = {"weight": jnp.ones((1, 2), dtype), "bias": jnp.zeros(1, dtype)}
    value = Regression(Linear(2))(params, {"x": jnp.asarray([1, 2], dtype), "y": jnp.int32(5)})
    assert value.shape == ()
    assert float(value) == 2.0


@pytest.mark.parametrize("kind", [Classification, Regression])
def test_l2_adds_half_the_squared_norm(kind, dtype):
    model = MLP((5, 4, 1))
    params = model.init(jax.random.key(0))
    example = {"x": jnp.ones(5, dtype), "y": jnp.int32(1)}
    squares = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(params))
    for l2 in (0.3, jnp.float32(0.3)):  # a number, or an array made of it by a sweep
        difference = jax.jit(lambda p, e, l2=l2: kind(model, l2=l2)(p, e) - kind(model)(p, e))(params, example)
        assert difference.dtype == dtype
        assert float(difference) == pytest.approx(0.15 * squares, rel=1e-5)
    only_l2 = kind(lambda p, x: 0 * p[:1], l2=0.5)
    gradient = jax.grad(only_l2)(jnp.asarray([1, 2], dtype), {"x": None, "y": jnp.int32(0)})
    np.testing.assert_allclose(gradient, [0.5, 1])


def federation(labels, **options) -> Federation:
    clients = [{"x": np.ones((len(y), 2), np.float32), "y": np.asarray(y)} for y in labels]
    return Federation.from_clients(clients, **options)


def test_check_names_the_client_and_its_labels():
    params = Linear(2, 3).init()
    loss = Classification(Linear(2, 3))
    loss.check(params, federation([[0, 1], [2]]))
    wrong = federation([[0, 1], [2, 4, 3, 4], [5]], names=["north", "south", "east"], classes=6)
    with pytest.raises(
        ValueError,
        match=r"south has labels \[3, 4\], but the model's outputs separate only 3 labels, 0 to 2",
    ):
        loss.check(params, wrong)
    with pytest.raises(ValueError, match=r"split 'test': the pooled data has labels \[7\]"):
        loss.check(
            params, federation([[0, 1], [2]], classes=8, test={"x": np.ones((1, 2), np.float32), "y": np.array([7])})
        )


def test_check_of_one_output_wants_zeros_and_ones():
    loss, params = Classification(Linear(2)), Linear(2).init()
    loss.check(params, federation([[0, 1], [1]]))
    with pytest.raises(ValueError, match=r"client 1 has labels \[2\], but the model's outputs separate only 2 labels"):
        loss.check(params, federation([[0, 1], [1, 2]]))


def test_check_refuses_targets_of_another_kind():
    with pytest.raises(ValueError, match="one integer per example"):
        Classification(Linear(2, 3)).check(Linear(2, 3).init(), federation([[0.5, 1.5]]))
    with pytest.raises(ValueError, match="dictionary with 'x' and 'y'"):
        Classification(Linear(2, 3)).check(Linear(2, 3).init(), Federation.from_clients([{"x": np.ones((2, 2))}]))
    Regression(Linear(2)).check(Linear(2).init(), federation([[0.5, 1.5]]))
    with pytest.raises(ValueError, match=r"outputs of shape \(3,\), but one target has shape \(\)"):
        Regression(Linear(2, 3)).check(Linear(2, 3).init(), federation([[0.5, 1.5]]))
    with pytest.raises(ValueError, match="a vector of outputs"):
        Classification(lambda p, x: p).check(jnp.ones((2, 2)), federation([[0, 1]]))


def test_bad_options():
    with pytest.raises(ValueError, match="l2 must be finite and at least 0, got -1"):
        Classification(Linear(2), l2=-1.0)
    with pytest.raises(TypeError, match="model must be callable"):
        Regression(3)  # type: ignore[arg-type]
