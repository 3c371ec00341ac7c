"""BERT's and RoBERTa's names (XLM-R's are the same), which differ in the head. PyTorch's kernels lie output first."""

from collections.abc import Callable
from typing import Any

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.labels import classes, labelled, problem
from jaxgrow.models.bert import BERTConfig


def _names(model: str, head: Callable[[BERTConfig], dict[str, Stored]]) -> Callable[[BERTConfig], dict[str, Stored]]:
    """The table of a model: what is alike in all, under its own name, and its head."""
    e, h = f"{model}.embeddings.", f"{model}.encoder.layer.{{layers}}."

    def names(config: BERTConfig) -> dict[str, Stored]:
        out = {
            "token_embedding": Stored(e + "word_embeddings.weight", "vocab embed"),
            "position_embedding": Stored(e + "position_embeddings.weight", "context embed"),
            "type_embedding": Stored(e + "token_type_embeddings.weight", "types embed"),
        }
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
        ):
            out[f"{ours}/scale"] = Stored(f"{theirs}.weight", "embed")
            out[f"{ours}/bias"] = Stored(f"{theirs}.bias", "embed")
        return out | head(config)

    return names


def _linear(ours: str, theirs: str, outputs: str, inputs: str = "embed") -> dict[str, Stored]:
    return {
        f"{ours}/kernel": Stored(f"{theirs}.weight", f"{outputs} {inputs}"),
        f"{ours}/bias": Stored(f"{theirs}.bias", outputs),
    }


def _tokens(transform: str, norm: str, decoder: str, bias: str) -> Callable[[BERTConfig], dict[str, Stored]]:
    def head(config: BERTConfig) -> dict[str, Stored]:
        out = _linear("transform", transform, "embed", "embed_in") | {
            "head_norm/scale": Stored(f"{norm}.weight", "embed"),
            "head_norm/bias": Stored(f"{norm}.bias", "embed"),
            # An untied decoder has a bias of its own; the other one is not used then.
            "head_bias": Stored(bias if config.tied else f"{decoder}.bias", "vocab"),
        }
        return out if config.tied else out | {"head_kernel": Stored(f"{decoder}.weight", "vocab embed")}

    return head


def _classes(pooler: str, classifier: str) -> Callable[[BERTConfig], dict[str, Stored]]:
    return lambda config: _linear("pooler", pooler, "embed", "embed_in") | _linear("classifier", classifier, "classes")


def _spans(config: BERTConfig) -> dict[str, Stored]:
    return _linear("classifier", "qa_outputs", "classes")


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

_COMMON: dict[str, Any] = dict(config=BERTConfig, fields=_FIELDS, absent=_ABSENT)
_BERT: dict[str, Any] = dict(
    model_type="bert",
    settings=_SETTINGS,
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    **_COMMON,
)
_ROBERTA: dict[str, Any] = dict(
    settings=_SETTINGS | {"pad_token_id": (1,)},  # the row before the first position
    **_COMMON,
)
# What a model has by its head: of classes as many as labels; of spans, labels for their begin and end.
_CLASSES: dict[str, Any] = dict(inferred=classes, derived=problem)
_SPANS: dict[str, Any] = dict(inferred=classes, derived=labelled)


def _fixed(head: str, first_position: int) -> dict[str, Any]:
    return {"norm": "post", "first_position": first_position, "head": head}


BertForMaskedLM = Family(
    architecture="BertForMaskedLM",
    names=_names(
        "bert",
        _tokens(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
    ),
    copies=_unused("cls.predictions.bias"),
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
    names=_names("bert", _classes("bert.pooler.dense", "classifier")),
    fixed=_fixed("classes", 0),
    ignored=("*.position_ids",),
    **_BERT | _CLASSES,
)
BertForQuestionAnswering = Family(
    architecture="BertForQuestionAnswering",
    names=_names("bert", _spans),
    fixed=_fixed("spans", 0),
    ignored=("*.position_ids", "bert.pooler.*"),
    **_BERT | _SPANS,
)


def _masked(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        names=_names("roberta", _tokens("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")),
        copies=_unused("lm_head.bias"),
        fixed=_fixed("tokens", 2),
        ignored=("*.position_ids", "roberta.pooler.*", "lm_head.bias", "lm_head.decoder.*"),
        **_ROBERTA,
    )


def _classifying(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        names=_names("roberta", _classes("classifier.dense", "classifier.out_proj")),
        fixed=_fixed("classes", 2),
        ignored=("*.position_ids", "roberta.pooler.*"),
        **_ROBERTA | _CLASSES,
    )


RobertaForMaskedLM = _masked("RobertaForMaskedLM", "roberta")
XLMRobertaForMaskedLM = _masked("XLMRobertaForMaskedLM", "xlm-roberta")
RobertaForSequenceClassification = _classifying("RobertaForSequenceClassification", "roberta")
XLMRobertaForSequenceClassification = _classifying("XLMRobertaForSequenceClassification", "xlm-roberta")
RobertaForQuestionAnswering = Family(
    architecture="RobertaForQuestionAnswering",
    model_type="roberta",
    names=_names("roberta", _spans),
    fixed=_fixed("spans", 2),
    ignored=("*.position_ids", "roberta.pooler.*"),
    **_ROBERTA | _SPANS,
)
