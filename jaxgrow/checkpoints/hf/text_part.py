"""How is the text model in the folder of a model of images and texts read?

It is read without the other parts, and written as a separate text model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class TextPart:
    """The place of the text model of an architecture for images and texts.

    The other parts of the model are not kept. The projector outputs features of the text model, so
    it would no longer fit after a growth of ``embed``.

    Args:
      architecture: the architecture of the text model alone.
      defaults: keys of ``config.json`` that are missing in ``text_config`` of published files.
      others: name prefixes of the tensors that do not belong to the text model.
    """

    architecture: str
    defaults: Mapping[str, Any]
    others: tuple[str, ...]

    def config(self, foreign: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``config.json`` of the text model.

        Args:
          foreign: the ``config.json`` of the model.

        Raises:
          ValueError: there is no ``text_config``.
        """
        text = foreign.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(
                f"text_config is {text!r}, but has to be an object with the settings of the text model"
            )
        shared = {
            key: foreign[key]
            for key in ("dtype", "torch_dtype", "transformers_version")
            if key in foreign
        }
        tied = foreign.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
        own = {"architectures": [self.architecture], "tie_word_embeddings": tied}
        return {**self.defaults, **shared, **text, **own}

    def tensors(self, stored: Mapping[str, T]) -> dict[str, T]:
        """Return the tensors of the text model, with the names of a separate text model."""
        out = {}
        for name, tensor in stored.items():
            # A wrapper may have put a prefix before all names.
            if any(f".{other}" in f".{name}" for other in self.others):
                continue
            # Published files have the first prefix, and the modules of transformers 5 the second.
            name = name.replace("model.language_model.", "model.").replace("language_model.", "")
            out[name] = tensor
        return out

    def note(self, foreign: Mapping[str, Any]) -> str:
        """Return the remark for the user that only the text model is read."""
        (architecture,) = foreign["architectures"]
        return (
            f"the source is a {architecture}. Only its text model, a {self.architecture}, is read, because the vision part "
            "would not fit a text model of another width"
        )


_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart(
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        ("vision_tower.", "multi_modal_projector."),
    )
}


def text_part(foreign: Mapping[str, Any]) -> TextPart | None:
    """Return the place of the text model, if the folder has a supported model of images and texts.

    Args:
      foreign: the content of ``config.json``.

    Returns:
      The place, or None for another model.
    """
    named = foreign.get("architectures")
    one = named[0] if isinstance(named, list) and len(named) == 1 else None
    return _PARTS.get(one) if isinstance(one, str) else None


def of_text(stored: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the text model, if those of a model of images and texts are given.

    Args:
      stored: tensors, such as those of an adapter, by the names in such a model.
    """
    named = any("language_model." in name for name in stored)
    return next(iter(_PARTS.values())).tensors(stored) if named else dict(stored)
