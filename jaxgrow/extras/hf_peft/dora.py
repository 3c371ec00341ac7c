"""DoRAs: LoRAs that also train the norm of each output of a kernel (Liu et al., ICML 2024).

A DoRA replaces the kernel W by ``m / |V| V``. Here, ``V = W + scale a b``, ``|V|`` is the norm of
the weights of each output, and m is trained. The *gain* ``m / |V|`` of an output stays the same
when the output is copied. Therefore a growth copies the gains, and the grown m follows from the
gains and the grown kernel.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import KernelAxes
from jaxgrow.checkpoints.source import Source
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.growth.apply import grow_leaf
from jaxgrow.growth.maps import AxisMap, Term
from jaxgrow.growth.matrices import Matrix, SparseMap


def output_norms(
    source: Source,
    module: str,
    kernel: KernelAxes,
    layer: int,
    own: LoRA,
    a: np.ndarray,
    b: np.ndarray,
) -> np.ndarray:
    """Return ``|W + scale a b|`` of each output of the kernel of one layer, as float32.

    Args:
      source: the base model.
      module: the path of the module of the kernel.
      kernel: the axes of the kernel.
      layer: index of the layer.
      own: the rank and the scale.
      a: the first factor of this layer, ``[*inputs, rank]``.
      b: the second factor of this layer, ``[rank, *outputs]``.
    """
    w = source.read(f"{module}/kernel", layer).astype(np.float32)
    product = a.reshape(-1, own.rank) @ b.reshape(own.rank, -1)
    v = w + own.scale * product.reshape(w.shape)
    return np.sqrt((v * v).sum(tuple(range(len(kernel.read)))))


def grown_gains(
    gain: np.ndarray, terms: Sequence[Term], kernel: KernelAxes, module: str
) -> np.ndarray:
    """Return the gains of a grown kernel.

    Args:
      gain: the gains of the outputs of each layer, ``[layers, *outputs]``.
      terms: the terms of the growth of the kernel.
      kernel: the axes of the kernel.
      module: the path of the module, which the message names.

    Raises:
      ValueError: a new output combines outputs with different gains.
    """
    names = (*kernel.stacked, *kernel.written)
    shares: list[Term] = [
        {key: AxisMap(_absolute_map(m.write), _absolute_map(m.read)) for key, m in term.items()}
        for term in terms
    ]
    if not shares:
        return gain
    total, first, second = (
        np.asarray(grow_leaf(shares, names, x)) for x in (np.ones_like(gain), gain, gain * gain)
    )
    some = total > 0
    total = np.where(some, total, 1.0)
    mean = first / total
    spread = np.sqrt(np.maximum(second / total - mean * mean, 0.0))
    if (spread > 1e-3 * np.abs(mean)).any():
        raise ValueError(
            f"{module}: this growth sums outputs (or layers) that have different magnitudes in the DoRA, and the result is "
            "not a DoRA. Merge the DoRA into its model with PEFT (merge_and_unload), and change the merged model"
        )
    return np.where(some, mean, 1.0).astype(gain.dtype)


def with_gains(
    leaves: Mapping[str, jax.typing.ArrayLike],
    gains: Mapping[str, np.ndarray],
    kernels: Mapping[str, KernelAxes],
) -> dict[str, jax.Array]:
    """Return the leaves of a merged model, with each output of a kernel multiplied by its gain.

    Args:
      leaves: the leaves of the model, by path.
      gains: the gains, ``[layers, *outputs]``, by module.
      kernels: the axes of the kernels, by module.
    """
    out = {path: jnp.asarray(leaf) for path, leaf in leaves.items()}
    for module, gain in gains.items():
        kernel = kernels[module]
        stacked = len(kernel.stacked)
        shape = (*gain.shape[:stacked], *[1] * len(kernel.read), *gain.shape[stacked:])
        old = jnp.asarray(leaves[f"{module}/kernel"])
        out[f"{module}/kernel"] = (old * gain.reshape(shape)).astype(old.dtype)
    return out


def _absolute_map(m: Matrix) -> Matrix:
    """Return the matrix of the absolute values of the weights."""
    return SparseMap(m.index, np.abs(m.weight), m.old) if isinstance(m, SparseMap) else np.abs(m)
