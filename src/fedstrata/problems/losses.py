"""Losses of one example: of a model's outputs against the label or target."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation, Split

MetricFunction = Callable[[Any, Any], Array]


class Loss(eqx.Module):
    r"""A loss of one example `{"x": ..., "y": ...}` under a model, plus $\frac{l_2}{2} \|params\|^2$.

    Args:
        model: the model, a function of parameters and one `x`.
        l2: the weight of the term $\frac{l_2}{2} \|params\|^2$; at least 0.
    """

    model: Callable[[Any, Array], Array]
    l2: float = 0.0

    def __check_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(f"{type(self).__name__}: model must be callable as model(params, x), got {self.model!r}")
        if isinstance(self.l2, int | float) and not (0 <= self.l2 < float("inf")):
            raise ValueError(f"{type(self).__name__}: l2 must be finite and at least 0, got {self.l2}")

    def __call__(self, params: Any, example: Any) -> Array:
        value = self.data_loss(params, example)
        if isinstance(self.l2, int | float) and self.l2 == 0:
            return value
        squares = sum(jnp.sum(jnp.square(leaf)).astype(value.dtype) for leaf in jax.tree.leaves(params))
        return value + 0.5 * jnp.asarray(self.l2, value.dtype) * squares

    @abc.abstractmethod
    def data_loss(self, params: Any, example: Any) -> Array:
        """The loss without its l2 term."""

    @property
    @abc.abstractmethod
    def metrics(self) -> dict[str, MetricFunction]:
        """Further values to record, by name, as functions of parameters and one example."""

    @abc.abstractmethod
    def check(self, params: Any, federation: "Federation") -> None:
        """Raise if the labels do not fit this model, before anything compiles."""

    def _output_shape(self, params: Any, split: "Split") -> tuple[int, ...]:
        kind = jax.dtypes.canonicalize_dtype
        x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], kind(a.dtype)), split.examples["x"])
        return jax.eval_shape(self.model, params, x).shape


class Classification(Loss):
    r"""Cross-entropy: $\log \sum_k e^{z_k} - z_y$ for outputs $z$ and integer label $y$.

    A model with a single output gets the logistic loss $\log(1 + e^z) - y z$ with $y \in \{0, 1\}$.

    Args:
        model: the model, a function of parameters and one `x`.
        l2: the weight of the term $\frac{l_2}{2} \|params\|^2$; at least 0.

    >>> loss = Classification(lambda params, x: params * x)
    >>> value = loss(jnp.ones(2), {"x": jnp.zeros(2), "y": jnp.asarray(1)})
    >>> round(float(value), 4)  # two equal scores: log 2
    0.6931
    """

    def data_loss(self, params: Any, example: Any) -> Array:
        z = self.model(params, example["x"])
        if z.size == 1:
            z = z.reshape(())
            return jnp.logaddexp(z, jnp.zeros_like(z)) - jnp.asarray(example["y"]).astype(z.dtype) * z
        # A masked sum: under vmap an indexed read becomes a gather, and its gradient a scatter, which are slow.
        return jax.nn.logsumexp(z) - jnp.sum(jnp.where(_is_label(z, example["y"]), z, jnp.zeros_like(z)))

    def accuracy(self, params: Any, example: Any) -> Array:
        """1 where the largest output belongs to the label, else 0."""
        z = self.model(params, example["x"])
        guess = (z.reshape(()) > 0 if z.size == 1 else jnp.argmax(z)).astype(jnp.int32)
        return (guess == jnp.asarray(example["y"]).astype(jnp.int32)).astype(z.dtype)

    @property
    def metrics(self) -> dict[str, MetricFunction]:
        return {"accuracy": self.accuracy}

    def check(self, params: Any, federation: "Federation") -> None:
        for name, split in federation.splits.items():
            where = f"Classification: split {name!r}"
            labels = _targets(split, where)
            if labels.ndim != 1 or labels.dtype.kind not in "iub":
                raise ValueError(f"{where}: labels must be one integer per example, got {labels.dtype} {labels.shape}")
            shape = self._output_shape(params, split)
            if len(shape) > 1:
                raise ValueError(f"Classification: the model must give a vector of outputs per example, got {shape}")
            count = max(int(np.prod(shape)), 2)  # a single output separates 0 from 1
            wrong = (labels < 0) | (labels >= count)
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                client = int(np.searchsorted(split.offsets, row, side="right")) - 1
                start, stop = split.offsets[client], split.offsets[client + 1]
                owner = "the pooled data" if split.pooled else federation.names[client]
                values = np.unique(labels[start:stop][wrong[start:stop]])
                raise ValueError(
                    f"{where}: {owner} has labels {values.tolist()}, but the model's outputs separate only {count} "
                    f"labels, 0 to {count - 1}; give it more outputs or number the labels from 0"
                )


class Regression(Loss):
    r"""Half the squared error $\frac12 \|z - y\|^2$ of outputs $z$ against the target $y$.

    Args:
        model: the model, a function of parameters and one `x`.
        l2: the weight of the term $\frac{l_2}{2} \|params\|^2$; at least 0.

    >>> loss = Regression(lambda params, x: params * x, l2=1.0)
    >>> float(loss(jnp.asarray(2.0), {"x": jnp.asarray(3.0), "y": jnp.asarray(5.0)}))  # (6 - 5)²/2 + 2²/2
    2.5
    """

    def data_loss(self, params: Any, example: Any) -> Array:
        return 0.5 * jnp.sum(jnp.square(self._error(params, example)))

    def mse(self, params: Any, example: Any) -> Array:
        """The squared error, averaged over outputs."""
        return jnp.mean(jnp.square(self._error(params, example)))

    def _error(self, params: Any, example: Any) -> Array:
        z, y = self.model(params, example["x"]), jnp.asarray(example["y"])
        _fits(z.shape, y.shape)
        return z - y.astype(z.dtype).reshape(z.shape)

    @property
    def metrics(self) -> dict[str, MetricFunction]:
        return {"mse": self.mse}

    def check(self, params: Any, federation: "Federation") -> None:
        for name, split in federation.splits.items():
            targets = _targets(split, f"Regression: split {name!r}")
            _fits(self._output_shape(params, split), targets.shape[1:])


def _is_label(z: Array, label: Any) -> Array:
    return jax.lax.iota(jnp.int32, z.shape[0]) == jnp.asarray(label).astype(jnp.int32).reshape(1)


def _fits(outputs: tuple[int, ...], target: tuple[int, ...]) -> None:
    if outputs != target and (int(np.prod(outputs)), int(np.prod(target))) != (1, 1):
        raise ValueError(f"Regression: the model gives outputs of shape {outputs}, but one target has shape {target}")


def _targets(split: "Split", where: str) -> np.ndarray:
    if not isinstance(split.examples, dict) or not {"x", "y"} <= split.examples.keys():
        raise ValueError(f"{where}: examples must be a dictionary with 'x' and 'y'; for others write a loss function")
    return np.asarray(split.examples["y"])
