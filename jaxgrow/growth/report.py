"""What a transformed model keeps of another's function, in numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Preservation:
    """Of two models on the same tokens."""

    max_abs: float  # max |difference of logits|
    mean_abs: float  # mean |difference of logits|
    scale: float  # standard deviation of the first model's logits: what the two above compare with
    kl: float  # mean over positions of KL(first || second), nats
    rms_first: tuple[float, ...]  # root mean square of each layer's output
    rms_second: tuple[float, ...]

    def __str__(self) -> str:
        def layers(values):
            return " ".join(f"{v:.3g}" for v in values)

        return (
            f"logits: max |a - b| {self.max_abs:.2e}, mean |a - b| {self.mean_abs:.2e}, std of a {self.scale:.2e}\n"
            f"KL(a || b): {self.kl:.2e} nats a position\n"
            f"RMS of each layer's output, a: {layers(self.rms_first)}\n"
            f"RMS of each layer's output, b: {layers(self.rms_second)}"
        )


def rms(x: jax.Array, y: jax.Array) -> jax.Array:
    """The root mean square of a layer's output: what the models here are told to ``observe``.

    Args:
      x: the layer's input.
      y: its output.

    Returns:
      A scalar, in float32.

    Example:
      >>> float(rms(jnp.zeros(2), jnp.array([1.0, 7.0])))
      5.0
    """
    return jnp.sqrt(jnp.square(y.astype(jnp.float32)).mean())


def preservation(first: Callable, second: Callable, tokens: jax.Array) -> Preservation:
    """Compares two models on the same tokens.

    Args:
      first:
        ``tokens -> (logits [..., vocab], RMS of each layer's output [layers], or a tuple of each stage's)``,
        as is ``lambda t: model.apply({"params": p}, t, observe=rms)`` of the models here.
      second: the other one, of the same vocabulary.
      tokens: what both take.

    Returns:
      Their differences; ``print`` makes four lines of it.

    Raises:
      ValueError: logits of different shapes.

    Example:
      >>> found = preservation(*[lambda t: (jnp.eye(3)[t], jnp.ones(2))] * 2, tokens=jnp.array([0, 2]))
      >>> found.max_abs, found.kl
      (0.0, 0.0)
    """
    (a, rms_a), (b, rms_b) = first(tokens), second(tokens)
    if a.shape != b.shape:
        raise ValueError(
            f"the two models give logits of shapes {a.shape} and {b.shape}; they must share a vocabulary"
        )
    log_a, log_b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    return Preservation(
        max_abs=float(jnp.abs(a - b).max()),
        mean_abs=float(jnp.abs(a - b).mean()),
        scale=float(a.std()),
        kl=float((jnp.exp(log_a) * (log_a - log_b)).sum(-1).mean()),
        rms_first=tuple(map(float, jnp.concatenate(jax.tree.leaves(rms_a)))),
        rms_second=tuple(map(float, jnp.concatenate(jax.tree.leaves(rms_b)))),
    )
