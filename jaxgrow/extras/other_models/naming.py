"""How does a model without axis names get them?

`from_rules` names each leaf by the first pattern that matches its path. `infer_rules` proposes such
rules from the sizes of the axes. `by_convention` adds suffixes to axis names that a model already
has for sharding. Models of jaxgrow define their own axis names (`jaxgrow.axes.named_init`) and do
not need this file.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeGuard

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgrow.axes.names import (
    LAYERS,
    UNSURE,
    Axes,
    KeyPath,
    Names,
    Params,
    Tree,
    axis_of,
    by_path,
    first_of_leaves,
    is_layers,
    is_names,
    path,
    reads_axis,
    role_of,
    sizes,
)
from jaxgrow.extras.other_models.conventions import (
    KNOWN,
    fused_axis,
    is_scale,
    translate_names,
    with_suffixes,
)

# Names by the parts of the paths of their leaves: a dict of such dicts.
Nested: TypeAlias = dict[str, Tree]
# Names of a tree that was not made for jaxgrow, where None stands for an axis without a name.
MaybeNames: TypeAlias = tuple[str | None, ...]


def from_rules(params: Params, rules: Mapping[str, Names]) -> Axes:
    """Name the axes of parameters by rules; the first rule that matches the path of a leaf applies.

    Args:
      params: a pytree of arrays, or of objects with a shape: a dict, `flax.nnx.State`, or the
        arrays of an Equinox module.
      rules: ``{pattern: names}``. Each shell-style pattern is matched against the full path of a
        leaf, ``"a/b/c"`` (`jaxgrow.axes.path`), or against its path without levels that only wrap the
        leaf, such as the ``value`` of a box of Flax; ``*`` also matches slashes. ``names`` has one name
        per axis of the leaf, in order, with suffixes (`jaxgrow.axes`).

    Returns:
      The axes tree, with the structure of ``params``.

    Raises:
      ValueError: a leaf matches no rule; a rule and a leaf have different numbers of axes; a rule
        does not determine the role of a leaf; a rule applies to no leaf, because it matches none or
        because earlier rules match all of them; or names of `infer_rules` still contain ``?``. One
        message lists all these problems, each once. If there are no such problems, it is also an
        error if one axis has two sizes.

    Example:
      >>> params = {"up": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "down": {"kernel": np.ones((3, 2))}}
      >>> rules = {"up/kernel": ("embed.in", "mlp"), "down/kernel": ("mlp.in", "embed"), "*/bias": ("mlp.bias",)}
      >>> from_rules(params, rules)["down"]
      {'kernel': ('mlp.in', 'embed')}
    """
    wrong: dict[str, list[str]] = {}  # problem -> leaves
    unused = dict.fromkeys(rules)
    short = unwrapped(by_path(params))

    def leaf(key_path: KeyPath, x: Tree) -> Names:
        name = path(key_path)
        shape = np.shape(x)
        # The name of a wrapper may also be that of a module, such as ``value``.
        both = dict.fromkeys((short[name], name))
        pattern = next((p for each in both for p in rules if fnmatchcase(each, p)), None)
        if pattern is None:
            wrong.setdefault(f"no rule matches this leaf of shape {shape}", []).append(name)
            return ()
        unused.pop(pattern, None)
        if fault := _fault(pattern, rules[pattern], name, shape):
            wrong.setdefault(fault, []).append(name)
        return rules[pattern]

    axes = jax.tree_util.tree_map_with_path(leaf, params)
    lines = [f"{first_of_leaves(found)}: {fault}" for fault, found in wrong.items()]
    lines += [f"the rule {p!r}: matches no leaf that is left by earlier rules" for p in unused]
    if lines:
        raise ValueError(
            "the rules do not fit the parameters; jaxgrow.infer_rules proposes rules:\n  "
            + "\n  ".join(lines)
        )
    sizes(params, axes)
    return axes


def _fault(pattern: str, names: object, leaf: str, shape: tuple[int, ...]) -> str:
    """Return the problem of a rule for a leaf, or an empty string."""
    rule = f"the rule {pattern!r}"
    if not _are_strings(names):
        return f"{rule} has the names {names!r}, but expected a tuple of strings"
    if len(names) != len(shape):
        return f"{rule} names {len(names)} axes, {names}, but the leaf has shape {shape}"
    if unsure := [n for n in names if UNSURE in n]:
        return f"{rule} has unknown axes {', '.join(map(repr, unsure))}: write the right names"
    try:
        if names:
            role_of(leaf, names)
    except ValueError as error:
        return f"{rule}: {str(error).removeprefix(f'{leaf}: ')}"
    return ""


def _are_strings(x: Tree) -> TypeGuard[Names]:
    return _is_names(x) and None not in x


def infer_rules(params: Params, sizes: Mapping[str, int]) -> dict[str, Names]:
    """Propose rules for `from_rules`, inferring axes from sizes and suffixes from conventions.

    Check the proposal before you use it. Layers may be stacked along any dimension, but it must be
    the same dimension in all leaves. The stacked kernels of Gemma get the axes ``qkv``,
    ``kv_parts`` and ``gates``. Suffixes follow the conventions of `by_convention`.

    Uncertain names contain a ``?``, and `from_rules` rejects them:

    ========================= =====================================================================
    name                      reason
    ========================= =====================================================================
    ``"?"``                   no axis has this size
    ``"embed|mlp?"``          several axes have this size
    ``"heads?"``              a leaf would have this axis twice
    ``"embed?"``              a vector with an ambiguous role
    ``"embed.norm.scale?"``   norm outside of the layers, over an axis that no kernel there reads.
                              If a tied head follows the norm, write ``"embed.in.norm.scale"``.
    ========================= =====================================================================

    Sizes identify axes only if no two axes have the same size. Therefore infer the rules from a
    small model of the same class in which all sizes differ; the shapes of its parameters are
    sufficient. The rules are valid for models of all sizes.

    Paths that differ only by a number, such as the number of a layer, become one pattern with
    ``*`` if the axis names below them are equal. Levels that only wrap leaves, such as the ``value``
    of a box of Flax, are part of the patterns, but do not decide the names.

    Args:
      params: a pytree of arrays, or of objects with a shape.
      sizes: the size of each axis, with the axis names that operators use:
        ``{"embed": 768, "heads": 12, ...}``.

    Returns:
      ``{pattern: names}``, patterns with more parts first. `pprint.pp` prints them in a form that
      can be pasted into code.

    Example:
      >>> layer = {"up": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "norm": {"scale": np.ones(2)}}
      >>> rules = infer_rules({"layers_0": layer, "layers_1": layer}, {"embed": 2, "mlp": 3})
      >>> for pattern, names in rules.items():
      ...     print(pattern, names)
      layers_*/norm/scale ('embed.norm.scale',)
      layers_*/up/bias ('mlp.bias',)
      layers_*/up/kernel ('embed.in', 'mlp')
    """

    named = jax.tree_util.tree_map_with_path(_names_by_size(params, sizes), params)
    named = _suffix_tree(named, KNOWN | sizes.keys())
    tree: Nested = unflatten_dict(by_path(named, is_leaf=is_names), sep="/")
    rules: dict[str, Names] = {}
    for pattern, names in _patterns("", tree).items():
        repeated = {n for n in names if names.count(n) > 1 and UNSURE not in n}
        rules[pattern] = tuple(n + UNSURE if n in repeated else n for n in names)
    outside = {
        pattern: names
        for pattern, names in rules.items()
        if "*" not in pattern and LAYERS not in names
    }
    every = itertools.chain.from_iterable(outside.values())
    read = {axis_of(n) for n in every if reads_axis(n)}
    for pattern, names in outside.items():
        if any(".norm." in n for n in names) and axis_of(names[-1]) not in read:
            rules[pattern] = (*names[:-1], names[-1] + UNSURE)
    # Longer patterns come first, because their leaves might also match a shorter pattern.
    return dict(
        sorted(rules.items(), key=lambda rule: (-rule[0].count("/"), rule[0].count("*"), rule[0]))
    )


def _names_by_size(params: Params, sizes: Mapping[str, int]) -> Callable[[KeyPath, Tree], Names]:
    """Return a function that names the axes of a leaf by their sizes.

    Layers are stacked along the same dimension of every leaf, in most models the first one.
    """

    def known(size: int) -> list[str]:
        return [name for name, of in sizes.items() if of == size]

    shapes = [np.shape(x) for x in jax.tree.leaves(params)]
    short = unwrapped(by_path(params))
    clear = [shape for shape in shapes if [known(n) for n in shape].count([LAYERS]) == 1]
    sure = {shape.index(sizes[LAYERS]) for shape in clear}
    dims = sure or set(range(max(map(len, shapes), default=0)))

    def leaf(key_path: KeyPath, x: Tree) -> Names:
        fused = fused_axis(short[path(key_path)], np.shape(x)[:1])

        def name(dim: int, size: int) -> str:
            found = [n for n in known(size) if n != LAYERS or dim in dims]
            if dim == 0 and fused and set(found) <= {LAYERS}:
                return fused
            return found[0] if len(found) == 1 else "|".join(found) + UNSURE

        return tuple(name(dim, size) for dim, size in enumerate(np.shape(x)))

    return leaf


def _patterns(prefix: str, tree: Nested) -> dict[str, Names]:
    """Return the rules for all leaves below ``prefix``.

    Parts of a path that differ only by a number become ``*``, if everything below them is equal.
    """
    alike: dict[str, list[str]] = {}
    for part in tree:
        alike.setdefault(re.sub(r"\d+", "*", part), []).append(part)
    out: dict[str, Names] = {}
    for pattern, parts in alike.items():
        same = len(parts) > 1 and all(tree[part] == tree[parts[0]] for part in parts)
        for name in [pattern] if same else parts:
            below = tree[parts[0] if same else name]
            inner = {prefix + name: below}
            out |= inner if is_names(below) else _patterns(f"{prefix}{name}/", below)
    return out


def by_convention(axes: Axes) -> Axes:
    """Add the suffixes of `jaxgrow.axes` to plain axis names, such as names for sharding.

    Axis names that MaxText and levanter spell differently are translated: ``q_heads``, ``kv``,
    ``embed_vocab``, ``norm``, ``head_size``, ``kv_head`` and others. Layers may be stacked along
    any dimension.

    =================================================== ============================================
    path of the leaf                                    inferred role
    =================================================== ============================================
    ``embedding``, or ``weight`` of an embedding        embedding (reads no axis)
    below ``query``, ``up``, ``gate``, ``wi``, ``head`` kernel that reads ``embed``
    below ``out``, ``down``, ``wo``, ``attn_vec``       kernel that writes ``embed``
    ``weight`` of another module                        kernel ``[outputs, inputs]``, as in Equinox
                                                        and PyTorch
    ``kernel`` of another module                        kernel ``[*inputs, output]``, as in Flax. If
                                                        it ends in heads or ``head_dim``, it reads
                                                        only ``embed``, or its first axis.
    ``bias``                                            bias, or norm bias if its module has a scale
    ``scale``, ``weight``, over one axis                norm scale; also ``w``, if the name of the
                                                        module contains "norm"
    below ``key``, ``value``                            key (``head_dim.in``) or value
                                                        (``head_dim.value``)
    =================================================== ============================================

    Roles without a convention must be declared by hand. These are a norm before a tied head
    (``embed.in.norm.scale``) and the scale of a sublayer (``embed.scale``).

    Args:
      axes: a tree with a tuple of names for each leaf, with or without suffixes. The name of an
        axis may be None.

    Returns:
      The tree with suffixes. A leaf that already has suffixes is unchanged. Unknown axes are not
      guessed: their names get a ``?``, such as ``"embed?"`` or ``"?"``. `jaxgrow.sizes`,
      `jaxgrow.grow` and `from_rules` reject these names and list all such leaves.

    Example:
      >>> by_convention({"key": {"kernel": ("embed", "heads", "head_dim")}, "norm": {"scale": ("embed",)}})
      {'key': {'kernel': ('embed.in', 'heads', 'head_dim.in')}, 'norm': {'scale': ('embed.norm.scale',)}}
    """
    return _suffix_tree(axes, KNOWN)


def _suffix_tree(axes: Axes, known: Set[str]) -> Axes:
    """Add suffixes as `by_convention` does. Axes that are not in ``known`` get a ``?``."""
    whole = by_path(axes, is_leaf=_is_names)
    short = unwrapped(whole)
    leaves = {short[name]: names for name, names in whole.items()}
    dims = {p: sum(n is None or not is_layers(axis_of(n)) for n in of) for p, of in leaves.items()}
    scales = {p.rpartition("/")[0] for p, count in dims.items() if is_scale(p) and count == 1}
    kernels = {p.rpartition("/")[0] for p in leaves if p.endswith("/kernel")}
    # Gemma calls the output kernel of its MLP "linear", which is an input kernel in other models.
    gates = [p.split("/") for p in leaves if "gating_einsum" in p.split("/")]
    outputs = {"/".join([*parts[: parts.index("gating_einsum")], "linear"]) for parts in gates}

    def leaf(key_path: KeyPath, names: MaybeNames) -> MaybeNames:
        if any(n is not None and axis_of(n) != n for n in names):
            return names
        name = short[path(key_path)]
        of = name.rpartition("/")[0]
        is_gemma = name.removesuffix("/w") in outputs
        return with_suffixes(
            name, translate_names(name, names), known, of in scales, of in kernels, is_gemma
        )

    return jax.tree_util.tree_map_with_path(leaf, axes, is_leaf=_is_names)


def _is_names(x: Tree) -> TypeGuard[MaybeNames]:
    """Same as `is_names`, but axes may have None instead of a name."""
    items: Tree = x
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in items)


_BOXES = {"value", "raw_value", "_value", "array"}


_LEAVES = {"kernel", "bias", "scale", "weight", "embedding", "gamma", "beta", "w", "b"}


def unwrapped(paths: Iterable[str]) -> dict[str, str]:
    """Return the path of each leaf without the levels that only wrap it.

    Boxes of Flax and some checkpoints put each array one or more levels below its name:
    ``up/kernel/value``. Such a level is the only part below its parent. It is called ``value`` or
    similarly and is below a usual name of a leaf, such as ``kernel``, or all leaves end with it.

    Args:
      paths: the paths of all leaves of a tree, in the format of `path`.

    Example:
      >>> unwrapped(["up/kernel/value", "attn/value/kernel/value"])
      {'up/kernel/value': 'up/kernel', 'attn/value/kernel/value': 'attn/value/kernel'}
    """
    short = {leaf: leaf for leaf in paths}
    while True:
        children = Counter(leaf.rpartition("/")[0] for leaf in short.values())
        last = {leaf.rpartition("/")[2] for leaf in short.values()}
        everywhere = len(last) == 1 < len(short) and not last & _LEAVES

        def wraps(leaf: str, alone: Counter[str] = children, same: bool = everywhere) -> bool:
            parent, _, name = leaf.rpartition("/")
            usual = parent.rpartition("/")[2] in _LEAVES and name in _BOXES
            return bool(parent) and alone[parent] == 1 and (same or usual)

        found = {leaf: now for leaf, now in short.items() if wraps(now)}
        if not found:
            return short
        short |= {leaf: now.rpartition("/")[0] for leaf, now in found.items()}
