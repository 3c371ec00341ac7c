"""How are DeBERTa v2 and v3 stored? The names equal the names of BERT, except in the attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.families import bert
from jaxgrow.checkpoints.hf.registry import register
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.extras.models.deberta import DeBERTaConfig

_LAYER = {
    **bert.LAYER,
    "attention/query": "attention.self.query_proj",
    "attention/key": "attention.self.key_proj",
    "attention/value": "attention.self.value_proj",
}
_RELATIVE = {
    "attention/relative_query": "attention.self.pos_query_proj",
    "attention/relative_key": "attention.self.pos_key_proj",
}

_FIELDS = {key: field for key, field in bert.FIELDS.items() if key != "type_vocab_size"}
_FIELDS["share_att_key"] = "shared"


def _names(model: str, head: bert.NamesOf) -> bert.NamesOf:
    """Return the function from a config to the places of its leaves.

    Args:
      model: the name prefix of the model without its head.
      head: a function from a config to the places of the leaves of the head.
    """
    body = bert.names_of(model, head, layer=_LAYER)

    def names(config: DeBERTaConfig) -> dict[str, TensorLayout]:
        out = body(config)
        del out["position_embedding"]
        out["relative_embedding"] = TensorLayout(
            f"{model}encoder.rel_embeddings.weight", "distances embed"
        )
        if config.relative_norm:
            out |= norm_layouts({"relative_norm": f"{model}encoder.LayerNorm"})
        for ours, used in zip(_RELATIVE, (config.p2c, config.c2p), strict=True):
            if used and not config.shared:
                theirs = f"{model}encoder.layer.{{layers}}.{_RELATIVE[ours]}"
                out |= linear_layouts(f"blocks/{ours}", theirs, "(heads head_dim)")
        return out

    return names


def _read(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the config that describe the relative positions.

    Raises:
      ValueError: the model has no relative positions, or a size in ``theirs`` must equal the hidden
        size or the size of the heads, but does not.
    """
    if theirs.get("relative_attention", False) is not True:
        raise ValueError(
            "relative_attention is not true, but jaxgrow supports DeBERTa only with relative positions"
        )
    if theirs.get("position_biased_input", True) is not False:
        raise ValueError(
            "position_biased_input is not false, but jaxgrow supports DeBERTa only without absolute "
            "positions in its input"
        )
    _equal(theirs, "the hidden size", theirs["hidden_size"], "embedding_size", "pooler_hidden_size")
    size = theirs["hidden_size"] // theirs["num_attention_heads"]
    _equal(theirs, "the size of the heads", size, "attention_head_size")
    kinds = theirs.get("pos_att_type") or []
    kinds = [k.strip() for k in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    farthest = theirs.get("max_relative_positions", -1)
    if farthest < 1:
        farthest = theirs.get("max_position_embeddings", 512)
    buckets = theirs.get("position_buckets", -1)
    norms = [norm.strip() for norm in theirs.get("norm_rel_ebd", "none").lower().split("|")]
    return {
        "distances": 2 * (buckets if buckets > 0 else farthest),
        "farthest": farthest,
        "buckets": buckets > 0,
        "c2p": "c2p" in kinds,
        "p2c": "p2c" in kinds,
        "relative_norm": "layer_norm" in norms,
    }


def _equal(theirs: Mapping[str, Any], what: str, size: int, *keys: str) -> None:
    for key in keys:
        if theirs.get(key, size) != size:
            raise ValueError(
                f"{key} is {theirs[key]}, but jaxgrow supports DeBERTa only if it is {what}, {size}"
            )


def _written(config: DeBERTaConfig) -> dict[str, Any]:
    kinds = {"p2c": config.p2c, "c2p": config.c2p}
    return {
        "relative_attention": True,
        "position_biased_input": False,
        "max_relative_positions": config.farthest,
        "position_buckets": config.distances // 2 if config.buckets else -1,
        "pos_att_type": [kind for kind, used in kinds.items() if used],
        "norm_rel_ebd": "layer_norm" if config.relative_norm else "none",
        "pooler_hidden_size": config.embed,
    }


# A file may have these tensors, which `transformers` does not read either.
_UNREAD = ("*.position_ids", "*embeddings.position_embeddings.*", "mask_predictions.*")
_SETTINGS = {
    "hidden_act": ("gelu", "gelu_python"),
    "pooler_hidden_act": ("gelu", "gelu_python"),
    "type_vocab_size": (0,),
    "conv_kernel_size": (0,),
}
_DEBERTA = Family(
    architecture="DebertaV2",
    model_type="deberta-v2",
    config=DeBERTaConfig,
    fields=_FIELDS,
    absent=bert.ABSENT | {"layer_norm_eps": 1e-7, "share_att_key": False},
    settings=_SETTINGS,
    fixed={"types": 0, "pooling": "gelu"},
    inferred=_read,
    derived=_written,
    names=bert.states_head,
    ignored=_UNREAD,
    stray="deberta.",
)
# The head that `transformers` reads if ``legacy`` is false, which is always tied. The published
# files also have it.
_PUBLISHED = replace(
    _DEBERTA,
    architecture="DebertaV2ForMaskedLM",
    settings={**_SETTINGS, "legacy": (False,)},
    fields={key: field for key, field in _FIELDS.items() if field != "tied"},
    fixed={**_DEBERTA.fixed, "head": "tokens", "tied": True},
    names=_names(
        "deberta.",
        bert.token_head(
            "lm_predictions.lm_head.dense",
            "lm_predictions.lm_head.LayerNorm",
            "lm_predictions.lm_head",
            "lm_predictions.lm_head.bias",
        ),
    ),
    stray="",
)
FAMILIES = tuple(
    bert.of_tasks(
        _DEBERTA,
        tokens=(
            bert.BERT_TOKENS,
            dict(
                settings={**_SETTINGS, "legacy": (True,)},
                copies=bert.unused_bias("cls.predictions.bias"),
                ignored=(*_UNREAD, "cls.predictions.bias", "cls.predictions.decoder.*"),
                variant=lambda theirs: _PUBLISHED if theirs.get("legacy") is False else None,
            ),
        ),
        classes=(bert.pooled_head("pooler.dense", "classifier"), {}),
        states=(
            lambda config: {},
            dict(ignored=(*_UNREAD, "cls.*", "lm_predictions.*", "pooler.*", "classifier.*")),
        ),
        named=_names,
    ).values()
)

register(*FAMILIES)
