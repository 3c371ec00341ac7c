"""How much does a growth change the function of a model? It is measured on tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxgrow.axes.names import Tree

# A model whose layers are observed: ``tokens -> (logits, root mean square of each layer)``.
Observed: TypeAlias = Callable[[jax.Array], tuple[jax.Array, Tree]]


@dataclass(frozen=True)
class Preservation:
    """Differences between two models on the same tokens.

    Args:
      max_abs: largest absolute difference of the logits.
      mean_abs: mean absolute difference of the logits.
      scale: standard deviation of the logits of the first model, as a reference for the two above.
      kl: mean over positions of KL(first || second), in nats.
      rms_first: root mean square of the output of each layer of the first model.
      rms_second: the same for the second model.
    """

    max_abs: float
    mean_abs: float
    scale: float
    kl: float
    rms_first: tuple[float, ...]
    rms_second: tuple[float, ...]

    def __str__(self) -> str:
        def layers(values: tuple[float, ...]) -> str:
            return " ".join(f"{v:.3g}" for v in values)

        return (
            f"logits: max |a - b| {self.max_abs:.2e}, mean |a - b| {self.mean_abs:.2e}, "
            f"std of a {self.scale:.2e}\n"
            f"KL(a || b): {self.kl:.2e} nats per position\n"
            f"RMS of each layer's output, a: {layers(self.rms_first)}\n"
            f"RMS of each layer's output, b: {layers(self.rms_second)}"
        )


def output_rms(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the root mean square of the output of a layer, as an ``observe`` function for models.

    Args:
      x: the input of the layer (not used).
      y: the output of the layer.

    Returns:
      A scalar, in float32.

    Example:
      >>> float(output_rms(jnp.zeros(2), jnp.array([1.0, 7.0])))
      5.0
    """
    return jnp.sqrt(jnp.square(y.astype(jnp.float32)).mean())


def measure_preservation(
    first: Observed,
    second: Observed,
    tokens: jax.Array,
    names: tuple[str, str] = ("the first model", "the second model"),
) -> Preservation:
    """Compare two models on the same tokens.

    Args:
      first: a function ``tokens -> (logits, rms)`` with logits ``[..., vocab]`` and the root mean
        square of the output of each layer ``[layers]``, or a tuple of such arrays, one per stage.
        For models of jaxgrow, this is ``lambda t: model.apply({"params": p}, t, observe=rms)``.
      second: the same for the other model, with the same vocabulary.
      tokens: the input of both models.
      names: how errors call the two models.

    Returns:
      Their differences; ``print`` shows them in four lines.

    Raises:
      ValueError: the logits have different shapes, or some are NaN or infinite.

    Example:
      >>> found = measure_preservation(*[lambda t: (jnp.eye(3)[t], jnp.ones(2))] * 2, tokens=jnp.array([0, 2]))
      >>> found.max_abs, found.kl
      (0.0, 0.0)
    """
    (a, rms_a), (b, rms_b) = first(tokens), second(tokens)
    if a.shape != b.shape:
        raise ValueError(
            f"the two models return logits of shapes {a.shape} and {b.shape}; they must share a "
            "vocabulary"
        )
    _check_finite(dict(zip(names, (a, b), strict=True)))
    log_a = jax.nn.log_softmax(a)
    log_b = jax.nn.log_softmax(b)
    return Preservation(
        max_abs=float(jnp.abs(a - b).max()),
        mean_abs=float(jnp.abs(a - b).mean()),
        scale=float(a.std()),
        # Rounding can make the sum of an almost equal pair slightly negative.
        kl=max(0.0, float((jnp.exp(log_a) * (log_a - log_b)).sum(-1).mean())),
        rms_first=tuple(map(float, jnp.concatenate(jax.tree.leaves(rms_a)))),
        rms_second=tuple(map(float, jnp.concatenate(jax.tree.leaves(rms_b)))),
    )


def _check_finite(logits: Mapping[str, jax.Array]) -> None:
    """Check that the logits of each model are finite.

    Raises:
      ValueError: some are NaN or infinite.
    """
    wrong = [
        f"{name} returns {int(jnp.isnan(x).sum()):,} NaN and {int(jnp.isinf(x).sum()):,} infinite "
        f"logits out of {x.size:,}"
        for name, x in logits.items()
        if not jnp.isfinite(x).all()
    ]
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}. The outputs cannot be compared: check the parameters for NaN and "
            "infinite values"
        )
