"""Operators that give a model with a tied head its own head, and that tie the head again.

A tied head is the transposed token embedding. The functions `untie_head` and `tie_head` change a
tree of parameters, and also an optimizer state, which contains trees of the same structure.
"""

from collections.abc import Callable
from operator import attrgetter

import jax

from jaxgrow.axes.names import Params, Tree
from jaxgrow.growth.maps import CopyMap
from jaxgrow.growth.matrices import Array
from jaxgrow.operators.registry import operator
from jaxgrow.operators.targets import Sizes

__all__ = ["tie", "tie_head", "untie", "untie_head"]

EMBEDDING = "token_embedding"
HEAD = "head_kernel"


@operator(
    axes=(),
    preserves="yes, bitwise",
    source="Jordan et al. 2025 (modded-nanogpt, record 53)",
    policies=("copy",),
)
def untie(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Copy the embedding into a separate head, with its optimizer state (`untie_head`).

    The function is preserved bitwise, also if the model grew with a tied head: the final norm keeps
    the factor that the growth gave it. From then on, the embedding and the head have the two parts
    of the gradient that the tied embedding had.

    Args:
      {arguments}

    Returns:
      A growth without maps.

    Raises:
      ValueError: ``target`` is not empty.

    Example:
      >>> untie({"embed": 4, "vocab": 9}, {})
      {}

    References:
      Jordan et al., `modded-nanogpt <https://github.com/KellerJordan/modded-nanogpt>`_, 2025
    """
    return _no_maps("untie", target)


@operator(axes=(), preserves="no", source="the inverse of `untie`", policies=("copy",))
def tie(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Replace embedding and head by their mean, also in the optimizer state (`tie_head`).

    It inverts `untie`, and preserves the function only if embedding and head are equal.

    Args:
      {arguments}

    Returns:
      A growth without maps.

    Raises:
      ValueError: ``target`` is not empty.

    Example:
      >>> tie({"embed": 4, "vocab": 9}, {})
      {}
    """
    return _no_maps("tie", target)


def untie_head(tree: Tree) -> Tree:
    """Return parameters, gradients or an optimizer state of a model with its own head.

    ``head_kernel [embed, vocab]`` is the transposed ``token_embedding [vocab, embed]``. The config
    of the model is ``replace(config, tied=False)``.

    Args:
      tree: parameters, or a tree that contains trees of the same structure.

    Returns:
      The tree with a head in each dict of parameters.

    Example:
      >>> import numpy as np
      >>> untie_head({"token_embedding": np.array([[1, 2]])})["head_kernel"].tolist()
      [[1], [2]]
    """
    return _changed(tree, lambda params: {**params, HEAD: _transposed(params[EMBEDDING])})


def tie_head(tree: Tree) -> Tree:
    """Return the mean of embedding and head as the embedding of a model with a tied head.

    Args:
      tree: parameters, gradients or an optimizer state, as for `untie_head`.

    Returns:
      The tree without a head in each dict of parameters.

    Example:
      >>> import numpy as np
      >>> tie_head(untie_head({"token_embedding": np.array([[1.0, 2.0]])}))
      {'token_embedding': array([[1., 2.]])}
    """

    def tied(params: Params) -> Params:
        others = {name: x for name, x in params.items() if name != HEAD}
        both = params[EMBEDDING], _transposed(params[HEAD])
        return {**others, EMBEDDING: jax.tree.map(_mean, *both)}

    return _changed(tree, tied)


#: What the operators of this module do with a tree.
RETIED: dict[str, Callable[[Tree], Tree]] = {"untie": untie_head, "tie": tie_head}


def _no_maps(name: str, target: Sizes) -> dict[str, CopyMap]:
    if target:
        raise ValueError(
            f"{name} changes no size, but the target has {', '.join(target)}: leave out the target, "
            "and grow with another operator before or after"
        )
    return {}


def _changed(tree: Tree, change: Callable[[Params], Params]) -> Tree:
    """Change every copy of the tree of parameters in a tree."""

    def changed(x: Tree) -> Tree:
        return change(x) if _is_copy(x) else x

    return jax.tree.map(changed, tree, is_leaf=_is_copy)


def _is_copy(x: Tree) -> bool:
    return isinstance(x, dict) and EMBEDDING in x


def _transposed(x: Tree) -> Tree:
    # Some optimizers have a mask without leaves instead of the embedding.
    return jax.tree.map(attrgetter("T"), x)


def _mean(a: Array, b: Array) -> Array:
    # The steps of `jaxgrow.growth.moments.rebias` are integers.
    return ((a + b) / 2).astype(a.dtype)
