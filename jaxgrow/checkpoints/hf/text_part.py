"""The text model in the folder of a model of images and texts: it is read alone, and written as a model of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class TextPart:
    """Where the text model of an architecture is.

    The rest of the model is not kept. Its projector writes features of the text model, so they
    would no longer fit after a growth of ``embed``.
    """

    architecture: str  # of the text model alone
    defaults: Mapping[str, Any]  # the keys that ``text_config`` of published files leaves out
    others: tuple[str, ...]  # prefixes of the tensors of the rest

    def config(self, foreign: Mapping[str, Any]) -> dict[str, Any]:
        """The ``config.json`` of the text model.

        Raises:
          ValueError: there is no ``text_config``.
        """
        text = foreign.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(
                f"text_config is {text!r}, but it has to hold the settings of the text model"
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
        """The tensors of the text model, by the names that they have in a model of its own."""
        out = {}
        for name, tensor in stored.items():
            inner = name.removeprefix("model.")
            if inner.startswith(self.others):
                continue
            # As published, and as the modules of transformers 5 are called.
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
            out[name] = tensor
        return out

    def note(self, foreign: Mapping[str, Any]) -> str:
        """What to tell of it."""
        (architecture,) = foreign["architectures"]
        return (
            f"the source is a {architecture}; this is its text model alone, a {self.architecture}, because the vision part "
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
    """Where the text model is, if the folder is of a model of images and texts whose text model can be read."""
    named = foreign.get("architectures")
    one = named[0] if isinstance(named, list) and len(named) == 1 else None
    return _PARTS.get(one) if isinstance(one, str) else None
