"""Axis names for models that were born without them: by rules over the paths of their leaves.

Where a model names its own axes (`jaxgrow.axes`), nothing of this is needed. Others are named from
outside: `from_rules` takes the names of each leaf from the first pattern that its path matches,
`infer` proposes such rules from the sizes of the axes, and `by_convention` adds the marks to names
that a model carries for its sharding.
"""

import re
from collections.abc import Callable, Mapping, Set
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from jaxgrow.axes._conventions import KNOWN, fused_axis, is_scale, marked, translated
from jaxgrow.axes.names import (
    LAYERS,
    UNSURE,
    Axes,
    Names,
    Params,
    axis,
    is_layers,
    is_names,
    path,
    reads,
    role,
    sizes,
    some,
)


def from_rules(params: Params, rules: Mapping[str, Names]) -> Axes:
    """The axis names of parameters that have none of their own: each leaf's from the first rule that its path matches.

    Args:
      params: a pytree of arrays, or of their shapes: a dict, `flax.nnx.State`, the arrays of an
        Equinox module.
      rules: ``{pattern: names}``. A pattern is one of a shell, over the whole path ``"a/b/c"`` of a
        leaf (`jaxgrow.axes.path`), and ``*`` matches slashes, too. Names are those of the leaf's
        axes in order, with their marks (`jaxgrow.axes`).

    Returns:
      The axes tree, of the structure of ``params``.

    Raises:
      ValueError: leaves that no rule matches, rules that name another number of axes than a leaf
        has or do not say what the leaf is for, rules that are left without a leaf, names that
        `infer` was not sure of, all in one message, each fault once; then, one axis of two sizes.

    Example:
      >>> params = {"up": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "down": {"kernel": np.ones((3, 2))}}
      >>> rules = {"up/kernel": ("embed.in", "mlp"), "down/kernel": ("mlp.in", "embed"), "*/bias": ("mlp.bias",)}
      >>> from_rules(params, rules)["down"]
      {'kernel': ('mlp.in', 'embed')}
    """
    wrong: dict[str, list[str]] = {}  # the leaves of each fault
    unused = dict.fromkeys(rules)

    def leaf(key_path, x):
        name, shape = path(key_path), np.shape(x)
        pattern = next((p for p in rules if fnmatchcase(name, p)), None)
        if pattern is None:
            wrong.setdefault(f"no rule matches, of shape {shape}", []).append(name)
            return ()
        unused.pop(pattern, None)
        if fault := _fault(pattern, rules[pattern], name, shape):
            wrong.setdefault(fault, []).append(name)
        return rules[pattern]

    axes = jax.tree_util.tree_map_with_path(leaf, params)
    lines = [f"{some(found)}: {fault}" for fault, found in wrong.items()]
    lines += [f"the rule {p!r}: matches no leaf that none before it matches" for p in unused]
    if lines:
        raise ValueError(
            "the rules do not name these parameters; jaxgrow.infer proposes some:\n  "
            + "\n  ".join(lines)
        )
    sizes(params, axes)
    return axes


def _fault(pattern: str, names: Any, leaf: str, shape: tuple[int, ...]) -> str:
    """What is wrong with a rule for a leaf; nothing, if it is right."""
    rule = f"the rule {pattern!r}"
    if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
        return f"{rule} is {names!r}, no tuple of names"
    if len(names) != len(shape):
        return f"{rule} names {len(names)} axes, {names}, but the leaf has shape {shape}"
    if unsure := [n for n in names if UNSURE in n]:
        return f"{rule} is not sure of {', '.join(map(repr, unsure))}: write which it is"
    try:
        if names:
            role(leaf, names)
    except ValueError as error:
        return f"{rule}: {str(error).removeprefix(f'{leaf}: ')}"
    return ""


def infer(params: Params, sizes: Mapping[str, int]) -> dict[str, Names]:
    """A proposal of rules for `from_rules`: axes told by their sizes, marks by convention. Read it before you use it.

    Layers may be stacked on any dimension, the same one in all leaves. Kernels that Gemma has side
    by side get the axes ``qkv``, ``kv_parts`` and ``gates``.

    An axis whose size is that of no name is called ``"?"``, one that has several ``"embed|mlp?"``,
    one that a leaf would have twice ``"heads?"``, and a vector that is for anything ``"embed?"``. A
    norm outside of the layers, over an axis that no kernel there reads, is ``"embed.norm.scale?"``:
    if a tied table reads it, it is ``"embed.in.norm.scale"``. `from_rules` refuses all of these.

    So that sizes tell axes apart, propose from a small model of the same class whose sizes all
    differ; its shapes suffice, and the rules hold for every size.

    Marks are those of `by_convention`. Parts of a path that differ by a number alone become one,
    with ``*``, where all that is below them is alike: layers.

    Args:
      params: a pytree of arrays, or of their shapes.
      sizes: the size of each axis, by the names that operators know:
        ``{"embed": 768, "heads": 12, ..}``.

    Returns:
      ``{pattern: names}``, those with more parts first. `pprint.pp` prints them to paste.

    Example:
      >>> layer = {"up": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "norm": {"scale": np.ones(2)}}
      >>> rules = infer({"layers_0": layer, "layers_1": layer}, {"embed": 2, "mlp": 3})
      >>> for pattern, names in rules.items():
      ...     print(pattern, names)
      layers_*/norm/scale ('embed.norm.scale',)
      layers_*/up/bias ('mlp.bias',)
      layers_*/up/kernel ('embed.in', 'mlp')
    """

    named = jax.tree_util.tree_map_with_path(_by_size(params, sizes), params)
    named = _marked(named, KNOWN | sizes.keys())
    tree: dict = {}
    for key_path, names in jax.tree_util.tree_leaves_with_path(named, is_leaf=is_names):
        *parents, last = path(key_path).split("/")
        inside = tree
        for part in parents:
            inside = inside.setdefault(part, {})
        inside[last] = names
    rules = {
        pattern: tuple(n + UNSURE * (names.count(n) > 1 and UNSURE not in n) for n in names)
        for pattern, names in _patterns("", tree).items()
    }
    outside = {
        pattern: names
        for pattern, names in rules.items()
        if "*" not in pattern and LAYERS not in names
    }
    read = {axis(n) for names in outside.values() for n in names if reads(n)}
    for pattern, names in outside.items():
        if any(".norm." in n for n in names) and axis(names[-1]) not in read:
            rules[pattern] = (*names[:-1], names[-1] + UNSURE)
    # What is longer and says more comes first: its leaves might match a shorter pattern, too.
    return dict(
        sorted(rules.items(), key=lambda rule: (-rule[0].count("/"), rule[0].count("*"), rule[0]))
    )


def _by_size(params: Params, sizes: Mapping[str, int]) -> Callable[[tuple, Any], Names]:
    """The names of a leaf's axes by their sizes. Layers are stacked on the same dimension in every leaf, mostly the first."""

    def known(size: int) -> list[str]:
        return [name for name, of in sizes.items() if of == size]

    shapes = [np.shape(x) for x in jax.tree.leaves(params)]
    sure = (
        {
            shape.index(sizes[LAYERS])
            for shape in shapes
            if [known(n) for n in shape].count([LAYERS]) == 1
        }
        if (LAYERS in sizes)
        else set()
    )
    places = sure or set(range(max(map(len, shapes), default=0)))

    def leaf(key_path: tuple, x: Any) -> Names:
        fused = fused_axis(path(key_path), np.shape(x)[:1])

        def name(dim: int, size: int) -> str:
            found = [n for n in known(size) if n != LAYERS or dim in places]
            if dim == 0 and fused and set(found) <= {LAYERS}:
                return fused
            return found[0] if len(found) == 1 else "|".join(found) + UNSURE

        return tuple(name(dim, size) for dim, size in enumerate(np.shape(x)))

    return leaf


def _patterns(prefix: str, tree: dict) -> dict[str, Names]:
    """The rules for all below ``prefix``, with ``*`` where several differ by a number alone."""
    alike: dict[str, list[str]] = {}
    for part in tree:
        alike.setdefault(re.sub(r"\d+", "*", part), []).append(part)
    out = {}
    for pattern, parts in alike.items():
        same = len(parts) > 1 and all(tree[part] == tree[parts[0]] for part in parts)
        for name in [pattern] if same else parts:
            below = tree[parts[0] if same else name]
            out |= (
                _patterns(f"{prefix}{name}/", below)
                if isinstance(below, dict)
                else {prefix + name: below}
            )
    return out


def by_convention(axes: Axes) -> Axes:
    """The marks of `jaxgrow.axes`, added to plain names, such as those that models carry for their sharding.

    Axes that MaxText and levanter call otherwise get their names here: ``q_heads``, ``kv``,
    ``embed_vocab``, ``norm``, ``head_size``, ``kv_head``, and the like. Layers may be stacked on
    any dimension.

    ====================================================== ==========================================================
    a leaf called                                          is
    ====================================================== ==========================================================
    ``embedding``, or ``weight`` below an embedding        a table, which reads nothing
    below ``query``, ``up``, ``gate``, ``wi``, ``head`` .. a kernel that reads ``embed``
    below ``out``, ``down``, ``wo``, ``attn_vec`` ..       a kernel that writes ``embed``
    ``weight``, where its module says neither              a kernel ``[outputs, inputs]``, as of Equinox and PyTorch
    ``kernel``, where its module says neither              a kernel ``[.. inputs, output]``, as of Flax; if it ends in heads
                                                           or their ``head_dim``, it reads ``embed``
                                                           alone, or its first axis
    ``bias``                                               a bias; of a norm, where a scale lies beside it
    ``scale``, ``weight``, over one axis                   of a norm; ``w``, where its module is called a norm
    below ``key``, ``value`` or the like                   of keys, which read ``head_dim``, or values
    ====================================================== ==========================================================

    What is no convention must be said by hand: a norm before a tied head (``embed.in.norm.scale``),
    the scale of a sublayer.

    Args:
      axes: a tree with a tuple of names for each leaf, marked or not. The name of an axis may be
        None.

    Returns:
      The tree with all names marked; a leaf that has marks stays as it is. Nothing is guessed: an
      axis that is not recognised gets a ``?``, ``"embed?"`` or ``"?"``, which `jaxgrow.sizes`,
      `jaxgrow.grow` and `from_rules` refuse, with a list of all such leaves.

    Example:
      >>> by_convention({"key": {"kernel": ("embed", "heads", "head_dim")}, "norm": {"scale": ("embed",)}})
      {'key': {'kernel': ('embed.in', 'heads', 'head_dim.in')}, 'norm': {'scale': ('embed.norm.scale',)}}
    """
    return _marked(axes, KNOWN)


def _marked(axes: Axes, known: Set[str]) -> Axes:
    """`by_convention`, of which axes are ``known``."""
    leaves = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=_is_names)}
    scales = {p.rpartition("/")[0] for p, n in leaves.items() if is_scale(p) and _is_vector(n)}
    kernels = {p.rpartition("/")[0] for p in leaves if p.endswith("/kernel")}

    def leaf(key_path: tuple, names: Names) -> Names:
        if any(n is not None and axis(n) != n for n in names):
            return names
        name = path(key_path)
        of = name.rpartition("/")[0]
        return marked(name, translated(name, names), known, of in scales, of in kernels)

    return jax.tree_util.tree_map_with_path(leaf, axes, is_leaf=_is_names)


def _is_names(x: Any) -> bool:
    """As `is_names`, but an axis may have no name."""
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def _is_vector(names: Names) -> bool:
    return sum(name is None or not is_layers(axis(name)) for name in names) == 1
