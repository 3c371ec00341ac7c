"""The command grow with layers of several models: join them, without changing them."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxgrow import operators
from jaxgrow.axes.names import LAYERS, layers_of
from jaxgrow.checkpoints import CheckpointError, Grown, Source, open_checkpoint
from jaxgrow.checkpoints.io.files import listed
from jaxgrow.checkpoints.source import Checkpoint, Leaf
from jaxgrow.cli.errors import errors_with_options, refuse_options
from jaxgrow.cli.grow_commands import GROWING
from jaxgrow.cli.options import AXES
from jaxgrow.cli.writing import write_model
from jaxgrow.extras.commands.merge import describe_differences
from jaxgrow.models.llama import repeated_kinds
from jaxgrow.typed import Json

# Settings that a layer does not depend on, apart from its kind, which follows it.
_OUTSIDE = ("layers", "kinds", "vocab", "context", "tied", "head", "classes")


class JoinedLayers(Source):
    """Models of equal widths as one: the layers of the first model, then those of the next one.

    All parameters outside of the layers, and all settings but the kinds of the layers, are those of
    the first model.

    Args:
      models: the models.

    Raises:
      CheckpointError: a model has other layers, by their shapes or their settings.
    """

    def __init__(self, models: Sequence[Checkpoint]):
        first = models[0]
        for other in models[1:]:
            _check_layers_alike(first, other)
        self.sources = models
        self._places = [(model, i) for model in models for i in range(model.config.layers)]
        settings: Json = {"layers": len(self._places)}
        if hasattr(first.config, "kinds"):
            kinds = "".join(model.config.layer_kinds for model in models)
            settings["kinds"] = repeated_kinds(kinds)
        self.config = replace(first.config, **settings)
        self.leaves = {path: self._joined(path, leaf) for path, leaf in first.leaves.items()}

    def _joined(self, path: str, leaf: Leaf) -> Leaf:
        if layers_of(leaf.names) != LAYERS:
            return leaf
        dtype = jnp.result_type(*(model.leaves[path].dtype for model in self.sources))
        return Leaf(leaf.names, (len(self._places), *leaf.shape[1:]), np.dtype(dtype))

    def _place(self, path: str, layer: int | None) -> tuple[Source, int | None]:
        """The model that holds a layer of a leaf, and the index of the layer in that model."""
        stacked = layers_of(self.leaves[path].names) == LAYERS
        return self._places[layer] if stacked and layer is not None else (self.sources[0], layer)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        model, own = self._place(path, layer)
        return model.read(path, own).astype(self.leaves[path].dtype, copy=False)

    def origin(self, path: str, layer: int | None) -> tuple[Source, int | None] | None:
        model, own = self._place(path, layer)
        same = model.leaves[path].dtype == self.leaves[path].dtype
        return model.origin(path, own) if same else None


def _check_layers_alike(first: Checkpoint, other: Checkpoint) -> None:
    """Check that the layers of two models fit into one model."""
    a, b = first.config, other.config
    mine, theirs = a.as_json(), b.as_json()
    # The context of these rotary positions changes their frequencies.
    outside = {*_OUTSIDE} - ({"context"} if mine.get("rope_by") == "dynamic" else set())
    names = [name for name in mine | theirs if name not in {*a.run_by, *b.run_by, *outside}]
    if differ := [name for name in names if mine.get(name) != theirs.get(name)]:
        about = listed(describe_differences(first, other, differ), most=5)
        raise CheckpointError(
            f"the layers of A, {first.folder}, and of B, {other.folder}, do not fit into one model: {about}; give "
            "models of equal widths and settings"
        )


def grow_from_models(a: argparse.Namespace) -> None:
    """Run ``jaxgrow grow`` with a list of layers of several models."""
    policy = () if a.optimizer == "drop" else ("optimizer",)
    why = "the layers of several models have neither one optimizer state nor one LoRA"
    refuse_options(a, why, *policy, "optimizer_state", "lora", "lora_only")
    why = "layers of several models are joined without another change"
    others = ("loop", "blend", "experts", "active", "noise", "seed", "format", "names", "head_dim")
    refuse_options(a, why, *AXES, *others)
    folders = list(dict.fromkeys(["", *(folder for folder, _ in a.layers_from)]))
    models = [open_checkpoint(Path(folder) if folder else a.src) for folder in folders]
    for folder, model in zip(folders, models, strict=True):
        own = [layer for name, layer in a.layers_from if name == folder]
        try:
            if own:
                operators.passthrough(model.sizes(), {}, own)
        except ValueError as error:
            raise CheckpointError(f"{model.folder}: {error}") from error
    with errors_with_options():
        joined = JoinedLayers(models)
        first = np.cumsum([0, *(model.config.layers for model in models)])
        sources = [int(first[folders.index(name)]) + layer for name, layer in a.layers_from]
        growth = operators.passthrough(joined.sizes(), {}, sources)
        grown = Grown(joined, growth)
    named = [f"{folder or a.src}:{layer}" for folder, layer in a.layers_from]
    notes = [
        f"everything outside of the layers is that of {a.src}, such as embeddings, head and tokenizer"
    ]
    write_model(a, grown, {"method": "passthrough", "sources": named}, notes)


GROWING.add("several models", grow_from_models)
