"""How are BERT, RoBERTa, XLM-R, CamemBERT and DistilBERT stored?

RoBERTa, XLM-R and CamemBERT differ from BERT in the head. PyTorch stores kernels as [outputs, inputs].
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from jaxgrow.checkpoints.hf.base import Family, Stored, linear
from jaxgrow.checkpoints.hf.labels import classes, labelled, problem
from jaxgrow.models.bert import BERTConfig
from jaxgrow.models.config import Head

# The function from a config to the places of the leaves of its head, or of the whole model.
NamesOf: TypeAlias = Callable[[Any], dict[str, Stored]]

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

    def names(config: BERTConfig) -> dict[str, Stored]:
        out = {
            "token_embedding": Stored(e + "word_embeddings.weight", "vocab embed"),
            "position_embedding": Stored(e + "position_embeddings.weight", "context embed"),
        }
        if config.types:
            out["type_embedding"] = Stored(e + "token_type_embeddings.weight", "types embed")
        for ours, outputs, inputs in (
            ("attention/query", "heads head_dim", "embed"),
            ("attention/key", "heads head_dim", "embed"),
            ("attention/value", "heads head_dim", "embed"),
            ("attention/out", "embed", "heads head_dim"),
            ("mlp/up", "mlp", "embed"),
            ("mlp/down", "embed", "mlp"),
        ):
            out[f"blocks/{ours}/kernel"] = Stored(
                f"{h}{layer[ours]}.weight", f"({outputs}) ({inputs})"
            )
            out[f"blocks/{ours}/bias"] = Stored(f"{h}{layer[ours]}.bias", f"({outputs})")
        for ours, theirs in (
            ("embedding_norm", e + "LayerNorm"),
            ("blocks/attention_norm", h + layer["attention_norm"]),
            ("blocks/mlp_norm", h + layer["mlp_norm"]),
        ):
            out[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
            out[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
        return out | head(config)

    return names


def token_head(transform: str, norm: str, decoder: str, bias: str) -> NamesOf:
    """Return the names of a head that predicts masked tokens, from the names of its modules."""

    def head(config: BERTConfig) -> dict[str, Stored]:
        out = linear("transform", transform, "embed", "embed_in") | {
            "head_norm/scale": Stored(f"{norm}.weight", "embed"),
            "head_norm/bias": Stored(f"{norm}.bias", "embed"),
            # An untied decoder has a separate bias, and the other one is not used.
            "head_bias": Stored(bias if config.tied else f"{decoder}.bias", "vocab"),
        }
        return (
            out
            if config.tied
            else out | {"head_kernel": Stored(f"{decoder}.weight", "vocab embed")}
        )

    return head


def pooled_head(pooler: str, classifier: str) -> NamesOf:
    """Return the names of a head that classifies the sequence by its pooled first token."""
    return lambda config: (
        linear("pooler", pooler, "embed", "embed_in") | linear("classifier", classifier, "classes")
    )


def span_head(config: BERTConfig) -> dict[str, Stored]:
    """The head that marks the first and the last token of an answer."""
    return linear("classifier", "qa_outputs", "classes")


def token_class_head(config: BERTConfig) -> dict[str, Stored]:
    """The head that classifies each token."""
    return linear("classifier", "classifier", "classes")


def states_head(config: BERTConfig) -> dict[str, Stored]:
    """The head of a model without a task."""
    return linear("pooler", "pooler.dense", "embed", "embed_in") if config.pooler else {}


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


_COMMON: dict[str, Any] = dict(config=BERTConfig, fields=FIELDS, absent=ABSENT)
_BERT: dict[str, Any] = dict(
    model_type="bert",
    settings=_SETTINGS,
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    **_COMMON,
)
_ROBERTA: dict[str, Any] = dict(
    # The first position embedding is in the row after this index.
    settings=_SETTINGS | {"pad_token_id": (1,)},
    **_COMMON,
)
# The fields that depend on the head. A head for classes has one class per label. A head for spans
# has labels for their begin and end.
_CLASSES: dict[str, Any] = dict(inferred=classes, derived=problem)
_SPANS: dict[str, Any] = dict(inferred=classes, derived=labelled)
_TOKEN_CLASSES = _SPANS
# A model without a head. Its tensor names have no prefix, except in some files.
_STATES: dict[str, Any] = dict(seen=_pooled, folded=("pooler",))


def _fixed(head: Head, first_position: int) -> dict[str, Any]:
    return {"norm": "post", "first_position": first_position, "head": head}


BertForMaskedLM = Family(
    architecture="BertForMaskedLM",
    names=names_of(
        "bert.",
        token_head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
    ),
    copies=unused_bias("cls.predictions.bias"),
    fixed=_fixed("tokens", 0),
    ignored=(
        "*.position_ids",
        "bert.pooler.*",
        "cls.seq_relationship.*",
        "cls.predictions.bias",
        "cls.predictions.decoder.*",
    ),
    **_BERT,
)
BertForSequenceClassification = Family(
    architecture="BertForSequenceClassification",
    names=names_of("bert.", pooled_head("bert.pooler.dense", "classifier")),
    fixed=_fixed("classes", 0),
    ignored=("*.position_ids",),
    **_BERT | _CLASSES,
)
BertForTokenClassification = Family(
    architecture="BertForTokenClassification",
    names=names_of("bert.", token_class_head),
    fixed=_fixed("token_classes", 0),
    ignored=("*.position_ids", "bert.pooler.*"),
    **_BERT | _TOKEN_CLASSES,
)
BertModel = Family(
    architecture="BertModel",
    names=names_of("", states_head),
    fixed=_fixed("states", 0),
    ignored=("*.position_ids", "cls.*"),
    stray="bert.",
    **_BERT | _STATES,
)
BertForQuestionAnswering = Family(
    architecture="BertForQuestionAnswering",
    names=names_of("bert.", span_head),
    fixed=_fixed("spans", 0),
    ignored=("*.position_ids", "bert.pooler.*"),
    **_BERT | _SPANS,
)


_LM_HEAD = token_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
# For each task: the head, its names, and the fields of `Family` that depend on it.
_ROBERTA_TASKS: dict[str, tuple[Head, NamesOf, dict[str, Any]]] = {
    "ForMaskedLM": (
        "tokens",
        _LM_HEAD,
        dict(
            copies=unused_bias("lm_head.bias"),
            ignored=("*.position_ids", "roberta.pooler.*", "lm_head.bias", "lm_head.decoder.*"),
        ),
    ),
    "ForSequenceClassification": (
        "classes",
        pooled_head("classifier.dense", "classifier.out_proj"),
        _CLASSES,
    ),
    "ForQuestionAnswering": ("spans", span_head, _SPANS),
    "ForTokenClassification": ("token_classes", token_class_head, _TOKEN_CLASSES),
    "Model": (
        "states",
        states_head,
        _STATES | dict(stray="roberta.", ignored=("*.position_ids", "lm_head.*")),
    ),
}


def _robertas(model: str, model_type: str) -> dict[str, Family]:
    """Return the architectures of a model that is stored like RoBERTa, by task."""
    return {
        task: Family(
            architecture=f"{model}{task}",
            model_type=model_type,
            names=names_of("" if head == "states" else "roberta.", names),
            fixed=_fixed(head, 2),
            **{"ignored": ("*.position_ids", "roberta.pooler.*"), **_ROBERTA, **of_head},
        )
        for task, (head, names, of_head) in _ROBERTA_TASKS.items()
    }


ROBERTA = _robertas("Roberta", "roberta")
XLM_ROBERTA = _robertas("XLMRoberta", "xlm-roberta")
CAMEMBERT = _robertas("Camembert", "camembert")


# --- DistilBERT ---


def _distil(task: str, head: Head, names: NamesOf, **more: Any) -> Family:
    return Family(
        architecture=f"DistilBert{task}",
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
        fixed={**_fixed(head, 0), "types": 0, "eps": 1e-12, "pooling": "relu"},
        names=names_of(
            "" if head == "states" else "distilbert.", names, "transformer.layer", _DISTIL
        ),
        **more,
    )


_DISTIL_TOKENS = token_head(
    "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
)

DISTILBERT = (
    _distil("ForMaskedLM", "tokens", _DISTIL_TOKENS, ignored=("vocab_projector.weight",)),
    _distil(
        "ForSequenceClassification",
        "classes",
        pooled_head("pre_classifier", "classifier"),
        **_CLASSES,
    ),
    _distil("ForQuestionAnswering", "spans", span_head, **_SPANS),
    _distil("ForTokenClassification", "token_classes", token_class_head, **_TOKEN_CLASSES),
    _distil("Model", "states", lambda config: {}, stray="distilbert.", ignored=("vocab_*",)),
)

FAMILIES = (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertModel,
    *ROBERTA.values(),
    *XLM_ROBERTA.values(),
    *CAMEMBERT.values(),
    *DISTILBERT,
)
