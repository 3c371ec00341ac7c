"""How is the text model in the folder of a model of images and texts read?

It is read without the other parts, and written as a separate text model. The other parts of the
model are not kept. The projector outputs features of the text model, so it would no longer fit after
a growth of ``embed``.
"""

from collections.abc import Mapping
from typing import TypeVar

from jaxgrow.checkpoints.hf.registry import NAMING
from jaxgrow.checkpoints.hf.storage import named_architecture
from jaxgrow.checkpoints.io.files import CheckpointError, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath

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
# The beginnings of the names of tensors that do not belong to the text model.
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def text_model(
    file: CheckedPath, hf_config: Json, stored: Mapping[str, Tensor]
) -> tuple[Json, Mapping[str, Tensor], tuple[str, ...]]:
    """Return the ``config.json`` and the tensors of the text model in a folder, and remarks.

    Args:
      file: the file ``config.json``.
      hf_config: its content, which may be that of a model of images and texts.
      stored: the tensors by their names in the files.

    Raises:
      CheckpointError: a model of images and texts has no ``text_config``.
    """
    if named_architecture(hf_config) != "Gemma3ForConditionalGeneration":
        return hf_config, stored, ()
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"{file}: text_config is {spelt(text)}, but has to be an object with the settings of the text model. Download "
            "config.json again"
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
    return {**_GEMMA3_DEFAULTS, **shared, **text, **own}, text_tensors(stored), (note,)


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
