"""How is the text model in the folder of a model of images and texts read?

It is read without the other parts, and written as a separate text model. The other parts of the
model are not kept. The projector outputs features of the text model, so it would no longer fit after
a growth of ``embed``.
"""

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from jaxgrow.checkpoints.hf.registry import NAMING
from jaxgrow.checkpoints.hf.storage import named_architecture
from jaxgrow.checkpoints.io.files import CheckpointError, listed, spelt
from jaxgrow.checkpoints.io.safetensors import FILE, INDEX, Tensor
from jaxgrow.typed import Json

T = TypeVar("T")

# The keys of ``config.json`` that are missing in ``text_config`` of published files.
_GEMMA3_DEFAULTS: Json = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
# The names of files of the weights of a model.
_OTHER_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "consolidated*.pth"),
    *("*.gguf", "tf_model.h5", "flax_model.msgpack"),
)
# The beginnings of the names of tensors that do not belong to the text model.
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def text_model(
    folder: Path, hf_config: Json, stored: Mapping[str, Tensor]
) -> tuple[Json, Mapping[str, Tensor], tuple[str, ...]]:
    """Return the ``config.json`` and the tensors of the text model in a folder, and remarks.

    Args:
      folder: the folder.
      hf_config: its ``config.json``; a model of images and texts has a ``text_config``.
      stored: the tensors by their names in the files.

    Raises:
      CheckpointError: a model of images and texts has no ``text_config``.
    """
    if named_architecture(hf_config) != "Gemma3ForConditionalGeneration":
        return hf_config, stored, unread_files(folder, stored)
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"{folder / 'config.json'}: text_config is {spelt(text)}, but has to be an object with the settings of the text "
            "model. Download config.json again"
        )
    shared = {
        key: hf_config[key]
        for key in ("dtype", "torch_dtype", "transformers_version")
        if key in hf_config
    }
    tied = hf_config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    own = {"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": tied}
    note = (
        "the source is a Gemma3ForConditionalGeneration. Only its text model, a Gemma3ForCausalLM, is read, because the "
        "vision part would not fit a text model of another width"
    )
    return (
        {**_GEMMA3_DEFAULTS, **shared, **text, **own},
        text_tensors(stored),
        (*unread_files(folder, stored), note),
    )


def unread_files(folder: Path, stored: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return a note if a folder has other files of weights than those of its tensors."""
    read = {FILE}
    if not os.path.lexists(folder / FILE):
        read = {INDEX, *(tensor.file.name for tensor in stored.values())}
    other = sorted(
        file.name
        for file in folder.iterdir()
        if file.name not in read
        and not file.name.startswith(("adapter", "optimizer"))
        and any(fnmatchcase(file.name, pattern) for pattern in _OTHER_FILES)
    )
    which = f"the files that {INDEX} names" if INDEX in read else FILE
    note = f"{which} were read; these other weights were not: {listed(other)}"
    return (note,) if other else ()


def text_tensors(stored: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors that a model of images and texts shares with its text model.

    Args:
      stored: the tensors of a model or of an adapter. A wrapper may have put a prefix before all
        names. The names of a text model stay.
    """
    # Published files have the first prefix, and the modules of transformers 5 the second.
    return {
        name.replace("model.language_model.", "model.").replace("language_model.", ""): tensor
        for name, tensor in stored.items()
        if not any(f".{other}" in f".{name}" for other in _OTHER_PARTS)
    }


NAMING.add("text model", text_model)
