"""Which axis names do the parameters of public trainers and libraries have?

A `Format` recognises a checkpoint by its paths and names the axes of every parameter. For other
programs, the user writes a file of names (`from_file`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jaxgrow.axes.names import LAYERS, Names
from jaxgrow.checkpoints.io.files import CheckpointError, listed, read_json

#: The power of the gradient in the moments of an optimizer, by the field of its state.
POWERS = {"mu": 1, "nu": 2, "trace": 1, "m": 1, "v": 2, "exp_avg": 1, "exp_avg_sq": 2}
_FLAX_ATTENTION: dict[str, Names] = {
    "*/query/kernel": ("embed.in", "heads", "head_dim"),
    "*/key/kernel": ("embed.in", "kv_heads", "head_dim.in"),
    "*/value/kernel": ("embed.in", "kv_heads", "head_dim.value"),
    "*/out/kernel": ("heads.in", "head_dim.in", "embed"),
}
_PROJECTIONS: dict[str, Names] = {
    "*/q_proj/w": ("embed.in", "heads", "head_dim"),
    "*/k_proj/w": ("embed.in", "kv_heads", "head_dim.in"),
    "*/v_proj/w": ("embed.in", "kv_heads", "head_dim.value"),
    "*/o_proj/w": ("heads.in", "head_dim.in", "embed"),
    "*/gate_proj/kernel": ("embed.in", "mlp"),
    "*/up_proj/kernel": ("embed.in", "mlp"),
    "*/down_proj/kernel": ("mlp.in", "embed"),
}


@dataclass(frozen=True)
class Format:
    """The layout in which a trainer stores the parameters of a decoder.

    Attributes:
      name: the name of the format, for ``--format``.
      marks: paths, relative to the parameters, by which a checkpoint of this format is recognised.
      table: ``{pattern: axis names}`` for one layer; the first pattern that matches a path applies.
      layers: the path of layers that are stored separately, with ``{}`` for the number.
      scanned: the pattern for parameters in which layers are stacked, along any dimension.
      final_norm: the path of the scale of the final norm.
      head: the path of the kernel of the head; a model without it has tied embeddings.
      renewed: the pattern for arrays, such as states of random number generators, that are omitted
        when the number of layers changes, because the trainer initialises missing ones.
      settings: the key of the trainer's config for the size of each axis.
      traits: properties of the model, as in `jaxgrow.models.Config.traits`.
    """

    name: str
    marks: tuple[str, ...]
    table: Mapping[str, Names]
    layers: str
    final_norm: str = ""
    head: str = ""
    scanned: str = ""
    renewed: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=lambda: {"norm": "rms"})

    def prefix(self, paths: Mapping[str, Any]) -> str | None:
        """The path of the parameters among these paths; None if the format does not fit."""
        found = {plain(path) for path in paths}
        ends = [path.removesuffix(self.marks[0]) for path in found if path.endswith(self.marks[0])]
        parameters = [start for start in ends if POWERS.keys().isdisjoint(start.split("/"))]
        fits = [start for start in parameters if all(start + mark in found for mark in self.marks)]
        return min(fits, key=len, default=None)

    def names(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Names]:
        """The axis names of each parameter.

        Args:
          shapes: the shape of each parameter, by its path below the prefix.

        Returns:
          The names by path. Stacked parameters include the axis ``layers`` at its dimension.

        Raises:
          CheckpointError: no pattern matches a parameter, or the number of axes differs.
        """
        tied = bool(self.head) and self.head not in shapes
        found, wrong = {}, []
        where = _scan_axis({p: s for p, s in shapes.items() if fnmatchcase(p, self.scanned)})
        shared = self._shared_keys(shapes)
        for path, shape in shapes.items():
            names = next(
                (n for pattern, n in self.table.items() if fnmatchcase(path, pattern)), None
            )
            if names is not None and shared:
                names = tuple(n.replace("kv_heads", "heads") for n in names)
            if names is not None and tied and path == self.final_norm:
                names = tuple(n.replace("embed.", "embed.in.", 1) for n in names)
            if names is not None and fnmatchcase(path, self.scanned):
                names = (*names[:where], LAYERS, *names[where:])
            if names is None or len(names) != len(shape):
                wrong.append(
                    f"{path} {shape}" + ("" if names is None else f", not ({', '.join(names)})")
                )
                continue
            found[path] = names
        if wrong:
            raise CheckpointError(
                f"format {self.name} has no names for these parameters: {listed(wrong)}. Give the "
                "names of all "
                "parameters in a file with --names FILE"
            )
        return found

    def _shared_keys(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether key/value heads and query heads are equal in number, and therefore one axis."""
        sizes = {"heads": set(), "kv_heads": set()}
        where = _scan_axis({p: s for p, s in shapes.items() if fnmatchcase(p, self.scanned)})
        for path, shape in shapes.items():
            names = next((n for pattern, n in self.table.items() if fnmatchcase(path, pattern)), ())
            scanned = fnmatchcase(path, self.scanned)
            for i, name in enumerate(names):
                if name in sizes and i + (scanned and i >= where) < len(shape):
                    sizes[name].add(shape[i + (scanned and i >= where)])
        return sizes["heads"] == sizes["kv_heads"]


def plain(path: str) -> str:
    """Remove the suffix that Flax NNX adds to the path of a variable.

    Example:
      >>> plain("layers/0/mlp/kernel/value")
      'layers/0/mlp/kernel'
    """
    return path.removesuffix("/value").removesuffix("/raw_value")


def _scan_axis(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The dimension with one size in all stacked leaves; 1, as in MaxText, if 0 and 1 both fit."""
    same = [
        dim
        for dim in (1, 0)
        if len({shape[dim] for shape in shapes.values() if len(shape) > dim}) == 1
    ]
    return same[0] if same else 1


MAXTEXT = Format(
    name="maxtext",
    marks=("decoder/decoder_norm/scale", "token_embedder/embedding"),
    table={
        "token_embedder/embedding": ("vocab", "embed"),
        "decoder/position_embedder/embedding": ("context", "embed"),
        "decoder/logits_dense/kernel": ("embed.in", "vocab"),
        **_FLAX_ATTENTION,
        "*/wi*/kernel": ("embed.in", "mlp"),
        "*/wo/kernel": ("mlp.in", "embed"),
        "*/query_norm/scale": ("head_dim.norm.scale",),
        "*/key_norm/scale": ("head_dim.in.norm.scale",),
        "*norm*/scale": ("embed.norm.scale",),
    },
    layers="decoder/layers_{}",
    scanned="decoder/layers/*",
    renewed="nnx_aux/*",
    final_norm="decoder/decoder_norm/scale",
    head="decoder/logits_dense/kernel",
    settings={
        "embed": "base_emb_dim",
        "heads": "base_num_query_heads",
        "kv_heads": "base_num_kv_heads",
        "mlp": "base_mlp_dim",
        "layers": "base_num_decoder_layers",
        "head_dim": "head_dim",
    },
)
TUNIX = Format(
    name="tunix",
    marks=("embedder/input_embedding", "final_norm/w"),
    table={
        "embedder/input_embedding": ("vocab", "embed"),
        "lm_head/w": ("embed.in", "vocab"),
        **_PROJECTIONS,
        "*/q_norm/w": ("head_dim.norm.scale",),
        "*/k_norm/w": ("head_dim.in.norm.scale",),
        "*norm/w": ("embed.norm.scale",),
    },
    layers="layers/{}",
    final_norm="final_norm/w",
    head="lm_head/w",
    settings={
        "embed": "embed_dim",
        "heads": "num_heads",
        "kv_heads": "num_kv_heads",
        "mlp": "hidden_dim",
        "layers": "num_layers",
        "head_dim": "head_dim",
    },
)
NANODO = Format(
    name="nanodo",
    marks=("embed/embedding", "pos_embed/embedding", "out_ln/scale"),
    table={
        "embed/embedding": ("vocab", "embed"),
        "pos_embed/embedding": ("context", "embed"),
        "*/query/kernel": ("embed.in", "heads", "head_dim"),
        "*/key/kernel": ("embed.in", "heads", "head_dim.in"),
        "*/value/kernel": ("embed.in", "heads", "head_dim.value"),
        "*/attn_out_proj/kernel": ("heads.in", "head_dim.in", "embed"),
        "*/Mlp_0/Dense_0/kernel": ("embed.in", "mlp"),
        "*/Mlp_0/Dense_1/kernel": ("mlp.in", "embed"),
        "*/scale": ("embed.norm.scale",),
    },
    layers="blocks_{}",
    final_norm="out_ln/scale",
    head="head/kernel",
    settings={"embed": "D", "heads": "H", "context": "L", "layers": "N", "vocab": "V", "mlp": "F"},
    traits={"norm": "layer"},
)
FORMATS = {known.name: known for known in (MAXTEXT, TUNIX, NANODO)}


def recognised(paths: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint with these paths, if one fits."""
    return next((known for known in FORMATS.values() if known.prefix(paths) is not None), None)


def from_file(file: Path) -> Format:
    """Read a format from a JSON file.

    Args:
      file: a file with a JSON object. ``names`` contains ``{pattern: [axis names]}`` for all
        parameters. Optional keys are ``layers`` (such as ``"blocks_{}"``), ``scanned`` (such as
        ``"decoder/layers/*"``) and ``params``, the path of one parameter relative to the
        parameters, by which their position in the checkpoint is found.

    Returns:
      The format.

    Raises:
      CheckpointError: the file does not contain such an object.
    """
    content = read_json(file)
    try:
        table = {
            str(pattern): tuple(map(str, names)) for pattern, names in content["names"].items()
        }
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
