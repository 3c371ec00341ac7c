"""How is BERT stored?

PyTorch stores kernels as [outputs, inputs]. `jaxgrow.extras.families.encoder_tasks` has its other
heads, and `jaxgrow.extras.families.roberta` the models that differ from BERT in the head.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxgrow.checkpoints.hf.base import Family, with_head
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.models.bert import BERTConfig

# The function from a config to the places of the leaves of its head, or of the whole model.
LayoutsOf: TypeAlias = Callable[[Any], dict[str, TensorLayout]]

BERT_LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_norm": "output.LayerNorm",
}


def bert_layouts(
    model: str,
    head: LayoutsOf,
    layers: str = "encoder.layer",
    layer: Mapping[str, str] = BERT_LAYER,
) -> LayoutsOf:
    """Return the function from a config to the places of its leaves.

    Args:
      model: the name prefix of the model without its head, such as ``"bert."``; empty for a model
        without a head.
      head: a function from a config to the places of the leaves of the head.
      layers: the name of the list of layers.
      layer: the names of the modules in a layer.
    """
    e = f"{model}embeddings."
    h = f"{model}{layers}.{{layers}}."

    def names(config: BERTConfig) -> dict[str, TensorLayout]:
        out = {
            "token_embedding": TensorLayout(e + "word_embeddings.weight", "vocab embed"),
            "position_embedding": TensorLayout(e + "position_embeddings.weight", "context embed"),
        }
        if config.types:
            out["type_embedding"] = TensorLayout(e + "token_type_embeddings.weight", "types embed")
        for path, outputs, inputs in (
            ("attention/query", "(heads head_dim)", "embed"),
            ("attention/key", "(heads head_dim)", "embed"),
            ("attention/value", "(heads head_dim)", "embed"),
            ("attention/out", "embed", "(heads head_dim)"),
            ("mlp/up", "mlp", "embed"),
            ("mlp/down", "embed", "mlp"),
        ):
            out |= linear_layouts(f"blocks/{path}", h + layer[path], outputs, inputs)
        norms = {f"blocks/{norm}": h + layer[norm] for norm in ("attention_norm", "mlp_norm")}
        return out | norm_layouts({"embedding_norm": e + "LayerNorm", **norms}) | head(config)

    return names


def masked_token_head(transform: str, norm: str, decoder: str, bias: str) -> LayoutsOf:
    """Return the names of a head that predicts masked tokens, from the names of its modules."""

    def head(config: BERTConfig) -> dict[str, TensorLayout]:
        """Return the places of the leaves of the head."""
        out = linear_layouts("transform", transform, "embed", "embed_in") | norm_layouts(
            {"head_norm": norm}
        )
        # An untied decoder has a separate bias, and the other one is not used.
        out["head_bias"] = TensorLayout(bias if config.tied else f"{decoder}.bias", "vocab")
        kernel = {"head_kernel": TensorLayout(f"{decoder}.weight", "vocab embed")}
        return out if config.tied else out | kernel

    return head


def unused_bias(bias: str) -> Callable[[Any], dict[str, str]]:
    """Copy the bias of an untied decoder to a second tensor, which the model does not use."""
    return lambda config: {} if config.tied else {bias: "head_bias"}


BERT_FIELDS = {
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
BERT_ABSENT = {
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
SETTINGS = {
    "hidden_act": ("gelu", "gelu_python"),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def masked_family(
    base: Family,
    head: LayoutsOf,
    named: Callable[[str, LayoutsOf], LayoutsOf] = bert_layouts,
    **more: object,
) -> Family:
    """Return the architecture that predicts masked tokens.

    Args:
      base: an architecture with the name of the model, and with the name prefix of its body.
      head: the places of the leaves of the head.
      named: the function from a name prefix and the places of the head to all places.
      **more: further fields of the result.
    """
    task = f"{base.architecture}ForMaskedLM"
    return with_head(base, task, "tokens", names=named(base.stray, head), stray="", **more)


BERT_TOKENS = masked_token_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
BERT_BASE = Family(
    architecture="Bert",
    model_type="bert",
    config=BERTConfig,
    fields=BERT_FIELDS,
    absent=BERT_ABSENT,
    settings=SETTINGS,
    fixed={"norm": "post", "first_position": 0},
    names=BERT_TOKENS,
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=("*.position_ids", "bert.pooler.*"),
    stray="bert.",
)
_UNREAD = ("cls.seq_relationship.*", "cls.predictions.bias", "cls.predictions.decoder.*")
FAMILIES = (
    masked_family(
        BERT_BASE,
        BERT_TOKENS,
        copies=unused_bias("cls.predictions.bias"),
        ignored=(*BERT_BASE.ignored, *_UNREAD),
    ),
)
