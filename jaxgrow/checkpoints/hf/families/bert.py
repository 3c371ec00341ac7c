"""How are BERT, RoBERTa, XLM-R, CamemBERT and DistilBERT stored?

RoBERTa, XLM-R and CamemBERT differ from BERT in the head. PyTorch stores kernels as [outputs, inputs].
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from jaxgrow.checkpoints.hf.base import Family, with_head
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.models.bert import BERTConfig

# The function from a config to the places of the leaves of its head, or of the whole model.
NamesOf: TypeAlias = Callable[[Any], dict[str, TensorLayout]]

LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_norm": "output.LayerNorm",
}
_DISTIL = {
    "attention/query": "attention.q_lin",
    "attention/key": "attention.k_lin",
    "attention/value": "attention.v_lin",
    "attention/out": "attention.out_lin",
    "mlp/up": "ffn.lin1",
    "mlp/down": "ffn.lin2",
    "attention_norm": "sa_layer_norm",
    "mlp_norm": "output_layer_norm",
}


def names_of(
    model: str,
    head: NamesOf,
    layers: str = "encoder.layer",
    layer: Mapping[str, str] = LAYER,
) -> NamesOf:
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
        for ours, outputs, inputs in (
            ("attention/query", "(heads head_dim)", "embed"),
            ("attention/key", "(heads head_dim)", "embed"),
            ("attention/value", "(heads head_dim)", "embed"),
            ("attention/out", "embed", "(heads head_dim)"),
            ("mlp/up", "mlp", "embed"),
            ("mlp/down", "embed", "mlp"),
        ):
            out |= linear_layouts(f"blocks/{ours}", h + layer[ours], outputs, inputs)
        norms = {f"blocks/{norm}": h + layer[norm] for norm in ("attention_norm", "mlp_norm")}
        return out | norm_layouts({"embedding_norm": e + "LayerNorm", **norms}) | head(config)

    return names


def token_head(transform: str, norm: str, decoder: str, bias: str) -> NamesOf:
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


def pooled_head(pooler: str, classifier: str) -> NamesOf:
    """Return the names of a head that classifies the sequence by its pooled first token."""
    return lambda config: (
        linear_layouts("pooler", pooler, "embed", "embed_in")
        | linear_layouts("classifier", classifier, "classes")
    )


def span_head(config: BERTConfig) -> dict[str, TensorLayout]:
    """The head that marks the first and the last token of an answer."""
    return linear_layouts("classifier", "qa_outputs", "classes")


def token_class_head(config: BERTConfig) -> dict[str, TensorLayout]:
    """The head that classifies each token."""
    return linear_layouts("classifier", "classifier", "classes")


def states_head(config: BERTConfig) -> dict[str, TensorLayout]:
    """The head of a model without a task."""
    return linear_layouts("pooler", "pooler.dense", "embed", "embed_in") if config.pooler else {}


def _pooled(config: BERTConfig, tensors: Collection[str]) -> BERTConfig:
    """Set whether the model has a pooler, which ``config.json`` does not state."""
    return replace(config, pooler="pooler.dense.weight" in tensors)


def unused_bias(bias: str) -> Any:
    """Copy the bias of an untied decoder to a second tensor, which the model does not use."""
    return lambda config: {} if config.tied else {bias: "head_bias"}


FIELDS = {
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
ABSENT = {
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_SETTINGS = {
    "hidden_act": ("gelu", "gelu_python"),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def of_tasks(
    base: Family,
    tokens: tuple[NamesOf, dict[str, Any]],
    classes: tuple[NamesOf, dict[str, Any]],
    states: tuple[NamesOf, dict[str, Any]],
    named: Callable = names_of,
) -> dict[str, Family]:
    """Return the architectures of a model, by task.

    Args:
      base: an architecture with the name of the model, and with the name prefix of its body.
      tokens: the names of the head that predicts masked tokens, and its further fields of `Family`.
      classes: the same for the head that classifies texts.
      states: the same for the model without a head, whose names have a prefix only in some files.
      named: the function from a name prefix and the names of a head to all names.
    """
    tasks = {
        "ForMaskedLM": ("tokens", *tokens),
        "ForSequenceClassification": ("classes", *classes),
        "ForQuestionAnswering": ("spans", span_head, {}),
        "ForTokenClassification": ("token_classes", token_class_head, {}),
        "Model": ("states", states[0], {"stray": base.stray, **states[1]}),
    }
    return {
        task: with_head(
            base,
            f"{base.architecture}{task}",
            head,
            **{"names": named("" if head == "states" else base.stray, names), "stray": "", **more},
        )
        for task, (head, names, more) in tasks.items()
    }


_BERT = Family(
    architecture="Bert",
    model_type="bert",
    config=BERTConfig,
    fields=FIELDS,
    absent=ABSENT,
    settings=_SETTINGS,
    fixed={"norm": "post", "first_position": 0},
    names=states_head,
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=("*.position_ids", "bert.pooler.*"),
    stray="bert.",
)
BERT_TOKENS = token_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_STATES: dict[str, Any] = dict(seen=_pooled, folded=("pooler",))
_UNREAD = ("cls.seq_relationship.*", "cls.predictions.bias", "cls.predictions.decoder.*")
BERT = of_tasks(
    _BERT,
    tokens=(
        BERT_TOKENS,
        dict(copies=unused_bias("cls.predictions.bias"), ignored=(*_BERT.ignored, *_UNREAD)),
    ),
    classes=(pooled_head("bert.pooler.dense", "classifier"), dict(ignored=("*.position_ids",))),
    states=(states_head, _STATES | dict(ignored=("*.position_ids", "cls.*"))),
)


def _robertas(model: str, model_type: str) -> dict[str, Family]:
    """Return the architectures of a model that is stored like RoBERTa, by task."""
    base = replace(
        _BERT,
        architecture=model,
        model_type=model_type,
        # The first position embedding is in the row after this index.
        settings=_SETTINGS | {"pad_token_id": (1,)},
        fixed={"norm": "post", "first_position": 2},
        renamed={},
        ignored=("*.position_ids", "roberta.pooler.*"),
        stray="roberta.",
    )
    tokens = token_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
    ignored = (*base.ignored, "lm_head.bias", "lm_head.decoder.*")
    return of_tasks(
        base,
        tokens=(tokens, dict(copies=unused_bias("lm_head.bias"), ignored=ignored)),
        classes=(pooled_head("classifier.dense", "classifier.out_proj"), {}),
        states=(states_head, _STATES | dict(ignored=("*.position_ids", "lm_head.*"))),
    )


ROBERTA = _robertas("Roberta", "roberta")
XLM_ROBERTA = _robertas("XLMRoberta", "xlm-roberta")
CAMEMBERT = _robertas("Camembert", "camembert")


# --- DistilBERT ---


DISTILBERT = of_tasks(
    Family(
        architecture="DistilBert",
        model_type="distilbert",
        config=BERTConfig,
        fields={
            "vocab_size": "vocab",
            "max_position_embeddings": "context",
            "n_layers": "layers",
            "dim": "embed",
            "n_heads": "heads",
            "hidden_dim": "mlp",
            "tie_word_embeddings": "tied",
        },
        absent={"max_position_embeddings": 512, "tie_word_embeddings": True},
        settings={"activation": ("gelu", "gelu_python")},
        fixed={**_BERT.fixed, "types": 0, "eps": 1e-12, "pooling": "relu"},
        names=states_head,
        stray="distilbert.",
    ),
    tokens=(
        token_head(
            "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
        ),
        dict(ignored=("vocab_projector.weight",)),
    ),
    classes=(pooled_head("pre_classifier", "classifier"), {}),
    states=(lambda config: {}, dict(ignored=("vocab_*",))),
    named=partial(names_of, layers="transformer.layer", layer=_DISTIL),
)

FAMILIES = tuple(
    family
    for model in (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT)
    for family in model.values()
)
