"""Axis names for models that were born without them: by rules over the paths of their leaves.

Where a model names its own axes (`jaxgrow.axes`), nothing of this is needed. Others are named from outside: `from_rules`
takes the names of each leaf from the first pattern that its path matches, `infer` proposes such rules from the sizes of the
axes, and `by_convention` adds the marks to names that a model carries for its sharding.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import jax
import numpy as np

from jaxgrow.axes import LAYERS, READ, VALUE, Axes, Names, Params, axis, is_names, path, reads, role, sizes

UNSURE = "?"  # in a name that `infer` cannot tell


def from_rules(params: Params, rules: Mapping[str, Names]) -> Axes:
    """The axis names of parameters that have none of their own: each leaf's from the first rule that its path matches.

    Args:
      params: a pytree of arrays, or of their shapes: a dict, `flax.nnx.State`, the arrays of an Equinox module.
      rules: ``{pattern: names}``. A pattern is one of a shell, over the whole path ``"a/b/c"`` of a leaf
        (`jaxgrow.axes.path`), and ``*`` matches slashes, too. Names are those of the leaf's axes in order, with their marks
        (`jaxgrow.axes`).

    Returns:
      The axes tree, of the structure of ``params``.

    Raises:
      ValueError: leaves that no rule matches, rules that name another number of axes than a leaf has or do not say what the
        leaf is for, rules that are left without a leaf, names that `infer` was not sure of, all in one message; then, one
        axis of two sizes.

    Example:
      >>> params = {"up": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "down": {"kernel": np.ones((3, 2))}}
      >>> rules = {"up/kernel": ("embed.in", "mlp"), "down/kernel": ("mlp.in", "embed"), "*/bias": ("mlp.bias",)}
      >>> from_rules(params, rules)["down"]
      {'kernel': ('mlp.in', 'embed')}
    """
    wrong, unused = [], dict.fromkeys(rules)

    def leaf(key_path, x):
        name, shape = path(key_path), np.shape(x)
        pattern = next((p for p in rules if fnmatchcase(name, p)), None)
        if pattern is None:
            wrong.append(f"{name}: no rule matches, of shape {shape}")
            return ()
        unused.pop(pattern, None)
        names = rules[pattern]
        of = f"{name}: the rule {pattern!r}"
        if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
            wrong.append(f"{of} is {names!r}, no tuple of names")
        elif len(names) != len(shape):
            wrong.append(f"{of} names {len(names)} axes, {names}, but the leaf has shape {shape}")
        elif unsure := [n for n in names if UNSURE in n]:
            wrong.append(f"{of} is not sure of {', '.join(map(repr, unsure))}: write which it is")
        elif names:
            try:
                role(name, names)
            except ValueError as error:
                wrong.append(str(error))
        return names

    axes = jax.tree_util.tree_map_with_path(leaf, params)
    wrong += [f"the rule {p!r}: matches no leaf that none before it matches" for p in unused]
    if wrong:
        raise ValueError(
            "the rules do not name these parameters; jaxgrow.infer proposes some:\n  " + "\n  ".join(wrong)
        )
    sizes(params, axes)
    return axes


def infer(params: Params, sizes: Mapping[str, int]) -> dict[str, Names]:
    """A proposal of rules for `from_rules`: axes told by their sizes, marks by convention. Read it before you use it.

    An axis whose size is that of no name is called ``"?"``, one that has several ``"embed|mlp?"``, one that a leaf would have
    twice ``"heads?"``, and a vector that is for anything ``"embed?"``. A norm outside of the layers, over an axis that no
    kernel there reads, is ``"embed.norm.scale?"``: if a tied table reads it, it is ``"embed.in.norm.scale"``. `from_rules`
    refuses all of these.

    So that sizes tell axes apart, propose from a small model of the same class whose sizes all differ; its shapes suffice, and
    the rules hold for every size.

    Marks are those of `by_convention`. Parts of a path that differ by a number alone become one, with ``*``, where all that is
    below them is alike: layers.

    Args:
      params: a pytree of arrays, or of their shapes.
      sizes: the size of each axis, by the names that operators know: ``{"embed": 768, "heads": 12, ..}``.

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

    def name(place: int, size: int) -> str:
        known = [n for n, s in sizes.items() if s == size and (n != LAYERS or place == 0)]
        return known[0] if len(known) == 1 else "|".join(known) + UNSURE

    named = jax.tree.map(lambda x: tuple(name(i, n) for i, n in enumerate(np.shape(x))), params)
    tree: dict = {}
    for key_path, names in jax.tree_util.tree_leaves_with_path(by_convention(named), is_leaf=is_names):
        *parents, last = path(key_path).split("/")
        inside = tree
        for part in parents:
            inside = inside.setdefault(part, {})
        inside[last] = names
    rules = {
        pattern: tuple(n + UNSURE * (names.count(n) > 1 and UNSURE not in n) for n in names)
        for pattern, names in _patterns("", tree).items()
    }
    outside = {pattern: names for pattern, names in rules.items() if "*" not in pattern and LAYERS not in names}
    read = {axis(n) for names in outside.values() for n in names if reads(n)}
    for pattern, names in outside.items():
        if any(".norm." in n for n in names) and axis(names[-1]) not in read:
            rules[pattern] = (*names[:-1], names[-1] + UNSURE)
    # What is longer and says more comes first: its leaves might match a shorter pattern, too.
    return dict(sorted(rules.items(), key=lambda rule: (-rule[0].count("/"), rule[0].count("*"), rule[0])))


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
            out |= _patterns(f"{prefix}{name}/", below) if isinstance(below, dict) else {prefix + name: below}
    return out


def by_convention(axes: Axes) -> Axes:
    """The marks of `jaxgrow.axes`, added to plain names, such as those that models carry for their sharding.

    ================================================ =============================================================
    a leaf called                                    is
    ================================================ =============================================================
    ``embedding``, or ``weight`` below an embedding  a table, which reads nothing
    ``weight``                                       a kernel ``[outputs, inputs]``, as of Equinox and PyTorch
    anything else, over two axes or more             a kernel ``[.. inputs, output]``, as of Flax; if it ends in heads or
                                                     their ``head_dim``, it reads ``embed`` alone, or its first axis
    ``bias``, over one axis                          a bias; of a norm, where a scale lies beside it
    ``scale``, ``weight``, over one axis             of a norm
    below ``key``, ``value`` or the like             of keys, which read ``head_dim``, or values
    ================================================ =============================================================

    What is no convention must be said by hand: a norm before a tied head (``embed.in.norm.scale``), the scale of a sublayer.

    Args:
      axes: a tree with a tuple of names for each leaf, marked or not.

    Returns:
      The tree with all names marked; a leaf that has marks stays as it is. A vector whose name tells nothing gets
      ``"embed?"``, which `from_rules` refuses.

    Example:
      >>> by_convention({"key": {"kernel": ("embed", "heads", "head_dim")}, "norm": {"scale": ("embed",)}})
      {'key': {'kernel': ('embed.in', 'heads', 'head_dim.in')}, 'norm': {'scale': ('embed.norm.scale',)}}
    """
    vectors = [path(p) for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names) if len(_places(n)) == 1]
    norms = {p.rpartition("/")[0] for p in vectors if p.endswith(_SCALES)}
    return jax.tree_util.tree_map_with_path(lambda p, n: _marked(path(p), n, norms), axes, is_leaf=is_names)


_SCALES = ("scale", "weight", "gamma")
_KEYS, _VALUES = ({w, f"{w[0]}_proj", f"{w}_proj", f"w{w[0]}", w[0]} for w in ("key", "value"))
_TABLES = re.compile(r"(?<!un)emb|\bw[tp]e\b")


def _places(names: Names) -> list[list[int]]:
    """The axes of a leaf, without ``layers``; heads and their dimensions are one place."""
    places: list[list[int]] = []
    for i, name in enumerate(names):
        heads = [place for place in places if axis(names[place[0]]).endswith("heads")]
        if axis(name) == "head_dim" and heads:
            heads[0].append(i)
        elif axis(name) != LAYERS:
            places.append([i])
    return places


def _marked(leaf: str, names: Names, norms: set[str]) -> Names:
    if any(axis(n) != n for n in names):
        return names
    out, places, parts = list(names), _places(names), leaf.split("/")
    last = parts[-2:]  # of a part of a fused kernel, the kernel comes before it
    read: list[int] = []
    table = "embedding" in last or ("kernel" not in last and any(map(_TABLES.search, last)))
    if len(places) > 1 and not table:
        if axis(names[max(places, key=max)[0]]).endswith("heads") and "weight" not in last:
            of = [place for place in places if axis(names[place[0]]) == "embed"] or places[:1]
        else:
            of = places[-1:] if "weight" in last else places[:-1]
        read = [i for place in of for i in place]
    for i, name in enumerate(names):
        if i in read:
            out[i] += READ
        elif name == "head_dim":
            out[i] += READ if _KEYS & set(parts) else VALUE if _VALUES & set(parts) else ""
    if len(places) == 1:
        is_bias, norm = any(p.endswith("bias") for p in last), ".norm" * (leaf.rpartition("/")[0] in norms)
        out[-1] += f"{norm}.bias" if is_bias else f"{norm}.scale" if leaf.endswith(_SCALES) else UNSURE
    return tuple(out)
