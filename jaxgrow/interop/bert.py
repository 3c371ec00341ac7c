"""BERT's and RoBERTa's names (XLM-R's are the same), which differ in the head. PyTorch's kernels lie output first."""

from collections.abc import Callable
from typing import Any

from jaxgrow.interop.family import Family, Stored
from jaxgrow.models.bert import BERTConfig


def _names(model: str, transform: str, norm: str, decoder: str, bias: str) -> Callable[[BERTConfig], dict[str, Stored]]:
    """The table of a model, by the names of what is not alike in both."""
    e, h = f"{model}.embeddings.", f"{model}.encoder.layer.{{layers}}."

    def names(config: BERTConfig) -> dict[str, Stored]:
        out = {
            "token_embedding": Stored(e + "word_embeddings.weight", "vocab embed"),
            "position_embedding": Stored(e + "position_embeddings.weight", "context embed"),
            "type_embedding": Stored(e + "token_type_embeddings.weight", "types embed"),
            "transform/kernel": Stored(f"{transform}.weight", "embed embed_in"),
            "transform/bias": Stored(f"{transform}.bias", "embed"),
            # An untied decoder has a bias of its own; the other one is not used then.
            "head_bias": Stored(bias if config.tied else f"{decoder}.bias", "vocab"),
        }
        if not config.tied:
            out["head_kernel"] = Stored(f"{decoder}.weight", "vocab embed")
        for ours, theirs, outputs, inputs in (
            ("attention/query", "attention.self.query", "heads head_dim", "embed"),
            ("attention/key", "attention.self.key", "heads head_dim", "embed"),
            ("attention/value", "attention.self.value", "heads head_dim", "embed"),
            ("attention/out", "attention.output.dense", "embed", "heads head_dim"),
            ("mlp/up", "intermediate.dense", "mlp", "embed"),
            ("mlp/down", "output.dense", "embed", "mlp"),
        ):
            out[f"blocks/{ours}/kernel"] = Stored(f"{h}{theirs}.weight", f"({outputs}) ({inputs})")
            out[f"blocks/{ours}/bias"] = Stored(f"{h}{theirs}.bias", f"({outputs})")
        for ours, theirs in (
            ("embedding_norm", e + "LayerNorm"),
            ("blocks/attention_norm", h + "attention.output.LayerNorm"),
            ("blocks/mlp_norm", h + "output.LayerNorm"),
            ("head_norm", norm),
        ):
            out[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
            out[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
        return out

    return names


def _unused(bias: str) -> Any:
    """The bias that a model with a decoder of its own has beside the decoder's, and does not add."""
    return lambda config: {} if config.tied else {bias: "head_bias"}


_FIELDS = {
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
    "type_vocab_size": "types",
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp",
    "layer_norm_eps": "eps",
    "tie_word_embeddings": "tied",
}
_ABSENT = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "tie_word_embeddings": True}
_SETTINGS = {
    "hidden_act": ("gelu", "gelu_python"),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}

BertForMaskedLM = Family(
    architecture="BertForMaskedLM",
    model_type="bert",
    config=BERTConfig,
    fields=_FIELDS,
    names=_names(  # type: ignore[arg-type]
        "bert",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
    copies=_unused("cls.predictions.bias"),
    fixed={"norm": "post", "first_position": 0},
    absent=_ABSENT,
    settings=_SETTINGS,
    ignored=(
        "*.position_ids",
        "bert.pooler.*",
        "cls.seq_relationship.*",
        "cls.predictions.bias",
        "cls.predictions.decoder.*",
    ),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)

_ROBERTA: dict[str, Any] = dict(
    config=BERTConfig,
    fields=_FIELDS,
    names=_names("roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),  # type: ignore[arg-type]
    copies=_unused("lm_head.bias"),
    fixed={"norm": "post", "first_position": 2},
    absent=_ABSENT,
    settings=_SETTINGS | {"pad_token_id": (1,)},  # the row before the first position
    ignored=("*.position_ids", "roberta.pooler.*", "lm_head.bias", "lm_head.decoder.*"),
)
RobertaForMaskedLM = Family(architecture="RobertaForMaskedLM", model_type="roberta", **_ROBERTA)
XLMRobertaForMaskedLM = Family(architecture="XLMRobertaForMaskedLM", model_type="xlm-roberta", **_ROBERTA)
