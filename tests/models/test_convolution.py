"""A convolution is one function, however a device does it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata.models.convolution import better_grouped, convolve, grouped, patched


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (5, 1, 0), (1, 2, 0), (3, 1, 0)])
def test_grouped_and_patched_agree_with_the_definition(kernel, stride, padding):
    """Values, and both gradients, with different weights for each of three clients."""
    rng = np.random.default_rng(0)
    images, weights = rng.normal(size=(3, 2, 6, 7, 4)), rng.normal(size=(3, 5, kernel * kernel * 4))
    over = lambda f: jax.vmap(jax.vmap(lambda w, image: f(w, image, kernel, stride, padding), (None, 0)))
    found = {}
    for form in (grouped, patched):
        value = over(form)(weights, images)
        slopes = jax.grad(lambda w, x, f=form: jnp.sum(jnp.sin(over(f)(w, x))), argnums=(0, 1))(weights, images)
        found[form] = (value, *slopes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), *found.values())
    wide = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding), (0, 0)))
    filters = weights.reshape(3, 5, kernel, kernel, 4)
    for at in ((0, 0), (1, 1)):
        i, j = at[0] * stride, at[1] * stride
        expected = np.einsum("cbhwd,cohwd->cbo", wide[:, :, i : i + kernel, j : j + kernel], filters)
        np.testing.assert_allclose(found[patched][0][:, :, at[0], at[1]], expected, rtol=1e-12)


def test_a_gpu_uses_its_convolutions_where_they_are_faster(monkeypatch):
    weight, image = jnp.ones((8, 9 * 32)), jnp.ones((8, 8, 32))
    text = lambda: jax.jit(lambda w, x: convolve(w, x, 3)).lower(weight, image).as_text()
    assert "stablehlo.convolution" not in text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "stablehlo.convolution" in text()
    # Seen on an H200: not for a stem with three channels, strides, few pixels, or single pixels.
    assert not any(better_grouped(*c) for c in (((32, 32, 3), 3, 1), ((32, 32, 64), 3, 2), ((4, 4, 512), 3, 1)))
    assert not better_grouped((32, 32, 64), 1, 1)
