"""How do grown parameters get the pytree structure of the larger model?"""

import jax
import numpy as np

from jaxgrow.axes.names import KeyPath, Tree, by_path, is_names, path


def restructure(tree: Tree, like: Tree) -> Tree:
    """Return the leaves of ``tree`` in the structure of ``like``, matched by their paths.

    The pytree structure of a module contains values besides arrays, such as the number of heads.
    Therefore grown parameters need the structure of the larger model.

    Args:
      tree: a pytree of arrays, such as the grown parameters.
      like: a pytree with leaves at the same paths, of the same shapes, such as the parameters of
        the larger model. Objects with a shape are sufficient.

    Returns:
      A pytree with the structure of ``like``.

    Raises:
      ValueError: leaves are missing in one of the trees or have different shapes. One message lists
        all of them.

    Example:
      >>> restructure({"0": np.ones(2), "1": np.zeros(2)}, [np.empty(2), np.empty(2)])
      [array([1., 1.]), array([0., 0.])]
    """
    given = by_path(tree, is_names)
    expected = by_path(like, is_names)
    wrong = [
        f"{p}: has shape {np.shape(x)} in the larger model, but is missing in the parameters"
        for p, x in expected.items()
        if p not in given
    ]
    wrong += [
        f"{p}: has shape {np.shape(x)}, but is missing in the larger model"
        for p, x in given.items()
        if p not in expected
    ]
    wrong += [
        f"{p}: has shape {np.shape(x)}, but {np.shape(expected[p])} in the larger model"
        for p, x in given.items()
        if p in expected and np.shape(x) != np.shape(expected[p])
    ]
    if wrong:
        raise ValueError(
            "the parameters do not fit the structure of the larger model:\n  " + "\n  ".join(wrong)
        )

    def leaf(key_path: KeyPath, _: object) -> Tree:
        return given[path(key_path)]

    return jax.tree_util.tree_map_with_path(leaf, like)
