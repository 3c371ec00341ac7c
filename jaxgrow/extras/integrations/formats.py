"""Which axis names do the parameters of public trainers and libraries have?

A `Format` recognises a checkpoint by its paths and names the axes of every parameter. For other
programs, the user writes a file of names (`from_file`).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from jaxgrow.axes.names import LAYERS, Names, axis_of
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import CheckpointError, listed, read_json
from jaxgrow.typed import Json

#: The power of the gradient in the moments of an optimizer, by the field of its state; 0 for a copy
#: of the parameters, which `optax.contrib.schedule_free` calls ``z``, or for their average.
POWERS = {
    "mu": 1,
    "nu": 2,
    "trace": 1,
    "acc_grads": 1,
    "m": 1,
    "v": 2,
    "exp_avg": 1,
    "exp_avg_sq": 2,
    "ema": 1,  # of `optax.ema`, an average of updates; see `gradient_power`
    "z": 0,
    "ema_params": 0,
    "params_ema": 0,
    "model_averaging": 0,
}
_GROUP = "q_heads_per_group"
_QUERY: Names = ("embed.in", "heads", "head_dim")
_KEY: Names = ("embed.in", "kv_heads", "head_dim.in")
_VALUE: Names = ("embed.in", "kv_heads", "head_dim.value")
_OUT: Names = ("heads.in", "head_dim.in", "embed")
_UP: Names = ("embed.in", "mlp")
_DOWN: Names = ("mlp.in", "embed")


def gradient_power(path: str) -> int | None:
    """The power of the gradient in the arrays below a path; None if it is unknown."""
    parts = path.split("/")
    # Outside of an optimizer state, ``ema`` is an average of the parameters.
    if "ema" in parts and not any(part.startswith("opt") for part in parts):
        return 0
    return next((POWERS[part] for part in reversed(parts) if part in POWERS), None)


def _norm_rows(leaf: str) -> dict[str, Names]:
    """The rows of `Format.table` for the norms of queries, keys and layers.

    Args:
      leaf: the name of the scales.
    """
    return {
        f"*/q_norm/{leaf}": ("head_dim.norm.scale",),
        f"*/k_norm/{leaf}": ("head_dim.in.norm.scale",),
        f"*norm/{leaf}": ("embed.norm.scale",),
    }


def _attention_rows(leaf: str) -> dict[str, Names]:
    return {
        f"*/q_proj/{leaf}": _QUERY,
        f"*/k_proj/{leaf}": _KEY,
        f"*/v_proj/{leaf}": _VALUE,
        f"*/o_proj/{leaf}": _OUT,
    }


def _mlp_rows(leaf: str) -> dict[str, Names]:
    return {f"*/gate_proj/{leaf}": _UP, f"*/up_proj/{leaf}": _UP, f"*/down_proj/{leaf}": _DOWN}


def _size_settings(*names: str) -> dict[str, str]:
    """The keys of a config for the sizes of a model, by axis.

    Args:
      names: the keys for ``embed``, ``heads``, ``kv_heads``, ``mlp``, ``layers`` and ``head_dim``;
        the last one may be missing.
    """
    axes = ("embed", "heads", "kv_heads", "mlp", "layers", "head_dim")
    return dict(zip(axes, names, strict=False))


@dataclass(frozen=True)
class FormatRow:
    """The axis names of a parameter, and how an array stores it.

    The array is ``embed ** embed_power * parameter + plus``, rearranged. Gemma, for example,
    multiplies its embedding by the square root of ``embed``, and stores the scales of its norms
    minus one.

    Attributes:
      names: the axis names of the parameter.
      axes: the axes of the array, as in `TensorLayout.layout`, such as
        ``"(heads head_dim) embed"``; empty if the array has the axes of the parameter.
      embed_power: the power of the size of ``embed`` by which the parameter is multiplied.
      plus: the number that is added to the parameter.
    """

    names: Names
    axes: str = ""
    embed_power: float = 0.0
    plus: float = 0.0

    def layout(self, sizes: Mapping[str, int]) -> TensorLayout:
        """The layout of the array in a model of these sizes."""
        times = float(sizes["embed"]) ** self.embed_power if self.embed_power else 1.0
        return TensorLayout("array", self.axes, times=times, plus=self.plus)

    def groups(self) -> list[str]:
        """The axes of the array. Axes that are flattened into one are in parentheses.

        Example:
          >>> FormatRow(("embed.in", "heads", "head_dim"), "(heads head_dim) embed").groups()
          ['(heads head_dim)', 'embed']
        """
        return TensorLayout("array", self.axes).groups or [axis_of(n) for n in self.names]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the array for these sizes of the axes."""
        return self.layout(sizes).shape(self.names, sizes)

    def leaf(self, array: np.ndarray, sizes: Mapping[str, int], power: int = 0) -> np.ndarray:
        """The parameter that an array stores.

        Args:
          array: the array.
          sizes: the size of every axis.
          power: the power of the gradient that the array accumulates; 0 for a parameter.
        """
        layout = self.layout(sizes)
        plain = not self.axes and not layout.moved
        return array if plain else layout.to_leaf(array, self.names, sizes, power)

    def array(self, leaf: np.ndarray, sizes: Mapping[str, int], power: int = 0) -> np.ndarray:
        """Return the array that stores a parameter. This is the inverse of `leaf`."""
        layout = self.layout(sizes)
        if not self.axes and not layout.moved:
            return leaf
        wide = leaf.astype(np.float32) if layout.moved and leaf.itemsize < 4 else leaf
        return layout.to_tensor(wide, self.names, sizes, gradient_power=power)

    def stacked(self, dim: int) -> "FormatRow":
        """The row of an array that stacks layers along the dimension ``dim``."""
        if not self.axes:
            return replace(self, names=(*self.names[:dim], LAYERS, *self.names[dim:]))
        groups = self.groups()
        axes = " ".join((*groups[:dim], LAYERS, *groups[dim:]))
        return replace(self, names=(LAYERS, *self.names), axes=axes)

    def renamed(self, old: str, new: str) -> "FormatRow":
        """The row with another name for one axis."""
        names = tuple(new + n[len(old) :] if axis_of(n) == old else n for n in self.names)
        return replace(self, names=names, axes=re.sub(rf"\b{old}\b", new, self.axes))


@dataclass(frozen=True)
class Format:
    """The layout in which a trainer stores the parameters of a decoder.

    Attributes:
      name: the name of the format, for ``--format``.
      marks: paths, relative to the parameters, by which a checkpoint of this format is recognised.
      table: ``{pattern: axis names or layout}`` for one layer; the first pattern that matches a
        path applies.
      layers: the path of layers that are stored separately, with ``{}`` for the number.
      scanned: the pattern for parameters in which layers are stacked, along any dimension.
      final_norm: the path of the scale of the final norm.
      head: the path of the kernel of the head; a model without it has tied embeddings.
      tied: the rows of a model with tied embeddings that differ from ``table``, by path.
      renewed: the pattern for arrays, such as states of random number generators, that are omitted
        when the number of layers changes, because the trainer initialises missing ones.
      settings: the key of the trainer's config for the size of each axis.
      traits: properties of the model, as in `jaxgrow.models.Config.traits`.
      other: alternatives for rows of ``table``, which are used if their sizes fit better. They are
        for kernels that some models store transposed.
      states: rows of arrays that only the optimizer state has.
      fixed: axes whose size the trainer cannot change.
    """

    name: str
    marks: tuple[str, ...]
    table: Mapping[str, Names | FormatRow]
    layers: str
    final_norm: str = ""
    head: str = ""
    tied: Mapping[str, FormatRow] = field(default_factory=dict)
    scanned: str = ""
    renewed: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    traits: Mapping[str, object] = field(default_factory=lambda: {"norm": "rms"})
    other: Mapping[str, Names | FormatRow] = field(default_factory=dict)
    states: Mapping[str, FormatRow] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def prefix(self, paths: Iterable[str]) -> str | None:
        """The path of the parameters among these paths; None if the format does not fit."""
        found = {plain_path(path) for path in paths}
        ends = [path.removesuffix(self.marks[0]) for path in found if path.endswith(self.marks[0])]
        # A checkpoint may hold an average of the parameters in their place.
        parameters = [s for s in ends if gradient_power(s) is None] or [
            s for s in ends if gradient_power(s) == 0
        ]
        for mark in self.marks:
            parameters = [start for start in parameters if start + mark in found]
        return min(parameters, key=len, default=None)

    def layouts(
        self, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, int]
    ) -> dict[str, FormatRow]:
        """The layout of each array.

        Args:
          shapes: the shape of each array, by its path below the prefix.
          given: sizes of axes that shapes do not determine, such as ``head_dim``.

        Returns:
          The layouts by path. Stacked parameters have the axis ``layers``.

        Raises:
          CheckpointError: no pattern matches an array, or the number of axes differs.
        """
        first = self._layouts(self.table, shapes)
        if self.other and not _layouts_fit(first, shapes, given):
            second = self._layouts({**self.table, **self.other}, shapes)
            first = second if _layouts_fit(second, shapes, given) else first
        return _with_shared_keys(first, shapes, given)

    def _layouts(
        self, table: Mapping[str, Names | FormatRow], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, FormatRow]:
        found = {}
        wrong = []
        where = _scan_axis({p: s for p, s in shapes.items() if fnmatchcase(p, self.scanned)})
        for path, shape in shapes.items():
            row = next((n for pattern, n in table.items() if fnmatchcase(path, pattern)), None)
            if row is None:
                wrong.append(f"{path} {shape}")
                continue
            layout = row if isinstance(row, FormatRow) else FormatRow(row)
            if fnmatchcase(path, self.scanned):
                layout = layout.stacked(where)
            if len(layout.groups()) != len(shape):
                wrong.append(f"{path} {shape}, not ({', '.join(layout.groups())})")
            found[path] = layout
        if wrong:
            raise CheckpointError(
                f"format {self.name} has no names for these parameters: {listed(wrong)}. Give the "
                "names of all parameters in a file with --names FILE"
            )
        if self.head and self.head not in shapes:
            found[self.final_norm] = _tied_norm(found[self.final_norm])
            found |= self.tied
        return found


def grouped_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the axes, with the number of query heads per key/value head."""
    known = dict(sizes)
    if "heads" in sizes:
        known[_GROUP] = sizes["heads"] // sizes.get("kv_heads", sizes["heads"])
    elif {"kv_heads", _GROUP} <= sizes.keys():
        known["heads"] = sizes["kv_heads"] * sizes[_GROUP]
    return known


def _layouts_fit(
    layouts: Mapping[str, FormatRow],
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, int],
) -> bool:
    sizes = solve_sizes(layouts, shapes, given)
    return all(row.shape(sizes) == shapes[path] for path, row in layouts.items())


def _tied_norm(norm: FormatRow) -> FormatRow:
    """The layout of a final norm whose output is the input of a tied head."""
    names = tuple(n.replace("embed.", "embed.in.", 1) for n in norm.names)
    return replace(norm, names=names)


def _with_shared_keys(
    layouts: dict[str, FormatRow], shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, int]
) -> dict[str, FormatRow]:
    """Use one axis for key/value heads and query heads if their numbers are equal."""
    sizes = solve_sizes(layouts, shapes, given)
    if sizes.get("heads") is None or sizes.get("heads") != sizes.get("kv_heads"):
        return layouts
    return {path: layout.renamed("kv_heads", "heads") for path, layout in layouts.items()}


def solve_sizes(
    layouts: Mapping[str, FormatRow],
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, int],
) -> dict[str, int]:
    """The size of every axis.

    Args:
      layouts: the layout of each array.
      shapes: the shape of each array.
      given: sizes of axes that shapes do not determine.

    Raises:
      CheckpointError: several axes are flattened into one, and their sizes are unknown or do not
        fit its size.
    """
    sizes = dict(given)
    flat = {}
    for path, layout in layouts.items():
        for group, size in zip(layout.groups(), shapes[path], strict=True):
            (flat if group.startswith("(") else sizes).setdefault(group, size)
    for _ in flat:  # One group can determine a size that another one needs.
        for group, size in flat.items():
            unknown = [name for name in group.strip("()").split() if name not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = size // _flat_size(sizes, group, unknown)
    sizes = grouped_sizes(sizes)
    wrong = {
        group: size
        for group, size in flat.items()
        if not set(group.strip("()").split()) <= sizes.keys() or _flat_size(sizes, group) != size
    }
    if wrong:
        sides = [f"{group} of size {size}" for group, size in wrong.items()]
        raise CheckpointError(
            f"the checkpoint stores several axes as one: {listed(sides)}. Their sizes "
            f"do not follow from {sizes}. Give the size of a head with --head-dim N"
        )
    return sizes


def _flat_size(sizes: Mapping[str, int], group: str, without: Sequence[str] = ()) -> int:
    return math.prod(sizes[n] for n in group.strip("()").split() if n not in without)


def plain_path(path: str) -> str:
    """Remove the suffix that Flax NNX adds to the path of a variable.

    Example:
      >>> plain_path("layers/0/mlp/kernel/value")
      'layers/0/mlp/kernel'
    """
    return path.removesuffix("/value").removesuffix("/raw_value")


def _scan_axis(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The dimension with one size in all stacked leaves; 1, as in MaxText, if 0 and 1 both fit."""
    for dim in (1, 0):
        found = {shape[dim] for shape in shapes.values() if len(shape) > dim}
        if len(found) == 1:
            return dim
    return 1


MAXTEXT = Format(
    name="maxtext",
    marks=("decoder/decoder_norm/scale", "token_embedder/embedding"),
    table={
        "token_embedder/embedding": ("vocab", "embed"),
        "decoder/position_embedder/embedding": ("context", "embed"),
        "decoder/logits_dense/kernel": ("embed.in", "vocab"),
        "*/query/kernel": _QUERY,
        "*/key/kernel": _KEY,
        "*/value/kernel": _VALUE,
        "*/out/kernel": _OUT,
        "*/wi*/kernel": _UP,
        "*/wo/kernel": _DOWN,
        "*/query_norm/scale": ("head_dim.norm.scale",),
        "*/key_norm/scale": ("head_dim.in.norm.scale",),
        "*norm*/scale": ("embed.norm.scale",),
    },
    layers="decoder/layers_{}",
    scanned="decoder/layers/*",
    renewed="nnx_aux/*",
    final_norm="decoder/decoder_norm/scale",
    head="decoder/logits_dense/kernel",
    settings=_size_settings(
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "base_mlp_dim",
        "base_num_decoder_layers",
        "head_dim",
    ),
)
TUNIX = Format(
    name="tunix",
    marks=("embedder/input_embedding", "final_norm/w"),
    table={
        "embedder/input_embedding": ("vocab", "embed"),
        "lm_head/w": ("embed.in", "vocab"),
        **_attention_rows("w"),
        **_mlp_rows("kernel"),
        **_norm_rows("w"),
    },
    layers="layers/{}",
    final_norm="final_norm/w",
    head="lm_head/w",
    settings=_size_settings(
        "embed_dim", "num_heads", "num_kv_heads", "hidden_dim", "num_layers", "head_dim"
    ),
)
NANODO = Format(
    name="nanodo",
    marks=("embed/embedding", "pos_embed/embedding", "out_ln/scale"),
    table={
        "embed/embedding": ("vocab", "embed"),
        "pos_embed/embedding": ("context", "embed"),
        "*/query/kernel": _QUERY,
        "*/key/kernel": ("embed.in", "heads", "head_dim.in"),
        "*/value/kernel": ("embed.in", "heads", "head_dim.value"),
        "*/attn_out_proj/kernel": _OUT,
        "*/Mlp_0/Dense_0/kernel": _UP,
        "*/Mlp_0/Dense_1/kernel": _DOWN,
        "*/scale": ("embed.norm.scale",),
    },
    layers="blocks_{}",
    final_norm="out_ln/scale",
    head="head/kernel",
    settings={"embed": "D", "heads": "H", "context": "L", "layers": "N", "vocab": "V", "mlp": "F"},
    traits={"norm": "layer"},
)
# Equinox and PyTorch store kernels as [outputs, inputs].
_TORCH_QUERY: Names = ("heads", "head_dim", "embed.in")
_TORCH_KEY: Names = ("kv_heads", "head_dim.in", "embed.in")
_TORCH_VALUE: Names = ("kv_heads", "head_dim.value", "embed.in")
_TORCH_OUT: Names = ("embed", "heads.in", "head_dim.in")
_GROUPS = "kv_heads q_heads_per_group"
LEVANTER = Format(
    name="levanter",
    marks=("transformer/norm/weight", "embeddings/token_embeddings/weight"),
    table={
        "embeddings/token_embeddings/weight": ("vocab", "embed"),
        "lm_head/weight": ("vocab", "embed.in"),
        "*/q_proj/weight": FormatRow(_TORCH_QUERY, f"{_GROUPS} head_dim embed"),
        "*/k_proj/weight": _TORCH_KEY,
        "*/v_proj/weight": _TORCH_VALUE,
        "*/o_proj/weight": _TORCH_OUT,
        "*/q_proj/bias": FormatRow(("heads", "head_dim.bias"), f"{_GROUPS} head_dim"),
        "*/k_proj/bias": ("kv_heads", "head_dim.in.bias"),
        "*/v_proj/bias": ("kv_heads", "head_dim.value.bias"),
        "*/gate_proj/weight": ("mlp", "embed.in"),
        "*/up_proj/weight": ("mlp", "embed.in"),
        "*/down_proj/weight": ("embed", "mlp.in"),
        **_norm_rows("weight"),
    },
    layers="transformer/layers/blocks/{}",
    scanned="transformer/layers/stacked/*",
    final_norm="transformer/norm/weight",
    head="lm_head/weight",
    settings=_size_settings(
        "hidden_dim", "num_heads", "num_kv_heads", "intermediate_dim", "num_layers", "head_dim"
    ),
)
_ONE_LESS = FormatRow(("embed.norm.scale",), plus=-1.0)
_POST_ONE_LESS = FormatRow(("embed.post.norm.scale",), plus=-1.0)
GEMMA = Format(
    name="gemma",
    marks=("embedder/input_embedding", "final_norm/scale", "layer_0/attn/attn_vec_einsum/w"),
    table={
        # The embedding is multiplied by sqrt(embed) at the input, but not in the tied head.
        "embedder/input_embedding": FormatRow(("vocab", "embed"), embed_power=-0.5),
        "final_norm/scale": FormatRow(("embed.in.norm.scale",), embed_power=0.5, plus=-1.0),
        "*/qkv_einsum/w": ("qkv", "heads", "embed.in", "head_dim"),
        "*/q_einsum/w": ("heads", "embed.in", "head_dim"),
        "*/kv_einsum/w": ("kv_parts", "kv_heads", "embed.in", "head_dim"),
        "*/attn_vec_einsum/w": ("heads.in", "head_dim.in", "embed"),
        "*/gating_einsum": ("gates", "mlp", "embed.in"),
        "*/linear": ("mlp.in", "embed"),
        "*/_query_norm/scale": FormatRow(("head_dim.norm.scale",), plus=-1.0),
        "*/_key_norm/scale": FormatRow(("head_dim.in.norm.scale",), plus=-1.0),
        "*/pre_*_norm/scale": _ONE_LESS,
        "*/post_*_norm/scale": _POST_ONE_LESS,
    },
    other={"*/gating_einsum": ("gates", "embed.in", "mlp")},
    layers="layer_{}",
    settings=_size_settings(
        "embed_dim", "num_heads", "num_kv_heads", "hidden_dim", "num_layers", "head_dim"
    ),
)
_EASYDEL_HEADS = "embed (heads head_dim)"
_EASYDEL_KEYS = "embed (kv_heads head_dim)"
EASYDEL = Format(
    name="easydel",
    marks=("model/norm/kernel", "model/embed_tokens/embedding"),
    table={
        "model/embed_tokens/embedding": ("vocab", "embed"),
        "lm_head/kernel": ("embed.in", "vocab"),
        "*/q_proj/kernel": FormatRow(_QUERY, _EASYDEL_HEADS),
        "*/k_proj/kernel": FormatRow(_KEY, _EASYDEL_KEYS),
        "*/v_proj/kernel": FormatRow(_VALUE, _EASYDEL_KEYS),
        "*/o_proj/kernel": FormatRow(_OUT, "(heads head_dim) embed"),
        **_mlp_rows("kernel"),
        **_norm_rows("kernel"),
    },
    layers="model/layers/{}",
    final_norm="model/norm/kernel",
    head="lm_head/kernel",
    fixed=("layers",),
    settings=_size_settings(
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "num_hidden_layers",
        "head_dim",
    ),
)
BONSAI = Format(
    name="bonsai",
    marks=("embedder/embedding", "final_norm/scale", "lm_head/kernel"),
    table={
        "embedder/embedding": ("vocab", "embed"),
        "lm_head/kernel": ("embed.in", "vocab"),
        **_attention_rows("kernel"),
        **_mlp_rows("kernel"),
        **_norm_rows("scale"),
    },
    layers="layers/{}",
    settings=_size_settings(
        "emb_dim", "num_heads", "num_kv_heads", "mlp_dim", "num_layers", "head_dim"
    ),
)
PENZAI = Format(
    name="penzai",
    marks=("embedder.embeddings", "final_norm/scale.weights"),
    table={
        "embedder.embeddings": ("vocab", "embed"),
        "lm_head.weights": ("embed.in", "vocab"),
        "*/query.weights": FormatRow(_QUERY, f"embed {_GROUPS} head_dim"),
        "*/key.weights": _KEY,
        "*/value.weights": _VALUE,
        "*/output.weights": FormatRow(_OUT, f"{_GROUPS} head_dim embed"),
        "*/gating_linear.weights": _UP,
        "*/value_linear.weights": _UP,
        "*/out_linear.weights": _DOWN,
        "*norm/scale.weights": ("embed.norm.scale",),
    },
    layers="block_{}",
    final_norm="final_norm/scale.weights",
    head="lm_head.weights",
    # If they are tied, as in Gemma, the embedding is multiplied by sqrt(embed) at the input only.
    tied={
        "embedder.embeddings": FormatRow(("vocab", "embed"), embed_power=-0.5),
        "final_norm/scale.weights": FormatRow(("embed.in.norm.scale",), embed_power=0.5),
    },
    settings={
        "embed": "embedding_dim",
        "kv_heads": "num_kv_heads",
        _GROUP: "query_head_multiplier",
        "mlp": "mlp_hidden_dim",
        "layers": "num_decoder_blocks",
        "head_dim": "projection_dim",
    },
)
TORCHTITAN = Format(
    name="torchtitan",
    marks=("tok_embeddings/weight", "norm/weight"),
    table={
        "tok_embeddings/weight": ("vocab", "embed"),
        "output/weight": ("vocab", "embed.in"),
        "lm_head/weight": ("vocab", "embed.in"),
        "*/wq/weight": FormatRow(_TORCH_QUERY, "(heads head_dim) embed"),
        "*/wk/weight": FormatRow(_TORCH_KEY, "(kv_heads head_dim) embed"),
        "*/wv/weight": FormatRow(_TORCH_VALUE, "(kv_heads head_dim) embed"),
        "*/wo/weight": FormatRow(_TORCH_OUT, "embed (heads head_dim)"),
        "*/w[13]/weight": ("mlp", "embed.in"),
        "*/w2/weight": ("embed", "mlp.in"),
        **_norm_rows("weight"),
    },
    # The optimizer has one state for queries, keys and values, if the model computes them together.
    states={
        "*/wqkv/weight": FormatRow(
            ("kv_heads", "qkv", "head_dim", "embed.in"), "(kv_heads qkv head_dim) embed"
        )
    },
    layers="layers/{}",
    settings=_size_settings("dim", "n_heads", "n_kv_heads", "hidden_dim", "n_layers"),
)
FORMATS = {
    known.name: known
    for known in (MAXTEXT, TUNIX, NANODO, LEVANTER, GEMMA, EASYDEL, BONSAI, PENZAI, TORCHTITAN)
}


def recognise_format(paths: Iterable[str]) -> Format | None:
    """The format of a checkpoint with these paths, if one fits."""
    return next((known for known in FORMATS.values() if known.prefix(paths) is not None), None)


def _format_row(names: Json | list[str]) -> FormatRow:
    about = names if isinstance(names, dict) else {"names": names}
    return FormatRow(**{**about, "names": tuple(map(str, about["names"]))})


def from_file(file: Path) -> Format:
    """Read a format from a JSON file.

    Args:
      file: a file with a JSON object. ``names`` contains ``{pattern: [axis names]}`` for all
        parameters, or an object with the attributes of a `FormatRow` instead of a list. Optional keys
        are ``layers`` (such as ``"blocks_{}"``), ``scanned`` (such as ``"decoder/layers/*"``) and
        ``params``: the path of one parameter within the tree of parameters. It is used to find
        this tree in the checkpoint.

    Returns:
      The format.

    Raises:
      CheckpointError: the file does not contain such an object.
    """
    content = read_json(file)
    try:
        table = {str(pattern): _format_row(names) for pattern, names in content["names"].items()}
        mark = str(
            content.get("params") or next(pattern for pattern in table if "*" not in pattern)
        )
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise CheckpointError(
            f'{file} must contain "names": {{pattern: [axis names]}}, and either a pattern without '
            f'* or "params": {error!r}'
        ) from error
    return Format(
        "names",
        (mark,),
        table,
        str(content.get("layers", "")),
        scanned=str(content.get("scanned", "")),
    )
