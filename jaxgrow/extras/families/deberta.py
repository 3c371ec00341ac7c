"""How are DeBERTa v2 and v3 stored? The names equal the names of BERT, except in the attention."""

from dataclasses import replace

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.families import bert
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts, norm_layouts
from jaxgrow.extras.families.encoder_tasks import pooled_head, states_head, task_families
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.typed import Json

_LAYER = {
    **bert.BERT_LAYER,
    "attention/query": "attention.self.query_proj",
    "attention/key": "attention.self.key_proj",
    "attention/value": "attention.self.value_proj",
}
_RELATIVE = {
    "attention/relative_query": "attention.self.pos_query_proj",
    "attention/relative_key": "attention.self.pos_key_proj",
}

_FIELDS = {key: field for key, field in bert.BERT_FIELDS.items() if key != "type_vocab_size"}
_FIELDS["share_att_key"] = "shared"


def _deberta_layouts(model: str, head: bert.LayoutsOf) -> bert.LayoutsOf:
    """Return the function from a config to the places of its leaves.

    Args:
      model: the name prefix of the model without its head.
      head: a function from a config to the places of the leaves of the head.
    """
    body = bert.bert_layouts(model, head, layer=_LAYER)

    def names(config: DeBERTaConfig) -> dict[str, TensorLayout]:
        out = body(config)
        del out["position_embedding"]
        out["relative_embedding"] = TensorLayout(
            f"{model}encoder.rel_embeddings.weight", "distances embed"
        )
        if config.relative_norm:
            out |= norm_layouts({"relative_norm": f"{model}encoder.LayerNorm"})
        for path, used in zip(_RELATIVE, (config.p2c, config.c2p), strict=True):
            if used and not config.shared:
                module = f"{model}encoder.layer.{{layers}}.{_RELATIVE[path]}"
                out |= linear_layouts(f"blocks/{path}", module, "(heads head_dim)")
        return out

    return names


def _read_deberta(hf_config: Json) -> Json:
    """Return the fields of the config that describe the relative positions.

    Raises:
      ValueError: the model has no relative positions, or a size in ``hf_config`` must equal the hidden
        size or the size of the heads, but does not.
    """
    if hf_config.get("relative_attention", False) is not True:
        raise ValueError(
            "relative_attention is not true, but jaxgrow supports DeBERTa only with relative positions"
        )
    if hf_config.get("position_biased_input", True) is not False:
        raise ValueError(
            "position_biased_input is not false, but jaxgrow supports DeBERTa only without absolute "
            "positions in its input"
        )
    _check_equal(
        hf_config,
        "the hidden size",
        hf_config["hidden_size"],
        "embedding_size",
        "pooler_hidden_size",
    )
    size = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    _check_equal(hf_config, "the size of the heads", size, "attention_head_size")
    kinds = hf_config.get("pos_att_type") or []
    kinds = [k.strip() for k in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    farthest = hf_config.get("max_relative_positions", -1)
    if farthest < 1:
        farthest = hf_config.get("max_position_embeddings", 512)
    buckets = hf_config.get("position_buckets", -1)
    norms = [norm.strip() for norm in hf_config.get("norm_rel_ebd", "none").lower().split("|")]
    return {
        "distances": 2 * (buckets if buckets > 0 else farthest),
        "farthest": farthest,
        "buckets": buckets > 0,
        "c2p": "c2p" in kinds,
        "p2c": "p2c" in kinds,
        "relative_norm": "layer_norm" in norms,
    }


def _check_equal(hf_config: Json, what: str, size: int, *keys: str) -> None:
    for key in keys:
        if hf_config.get(key, size) != size:
            raise ValueError(
                f"{key} is {hf_config[key]}, but jaxgrow supports DeBERTa only if it is {what}, {size}"
            )


def _written_deberta(config: DeBERTaConfig) -> Json:
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
    absent=bert.BERT_ABSENT | {"layer_norm_eps": 1e-7, "share_att_key": False},
    settings=_SETTINGS,
    fixed={"types": 0, "pooling": "gelu"},
    inferred=_read_deberta,
    derived=_written_deberta,
    names=states_head,
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
    names=_deberta_layouts(
        "deberta.",
        bert.masked_token_head(
            "lm_predictions.lm_head.dense",
            "lm_predictions.lm_head.LayerNorm",
            "lm_predictions.lm_head",
            "lm_predictions.lm_head.bias",
        ),
    ),
    stray="",
)
FAMILIES = (
    bert.masked_family(
        _DEBERTA,
        bert.BERT_TOKENS,
        _deberta_layouts,
        settings={**_SETTINGS, "legacy": (True,)},
        copies=bert.unused_bias("cls.predictions.bias"),
        ignored=(*_UNREAD, "cls.predictions.bias", "cls.predictions.decoder.*"),
        variant=lambda hf_config: _PUBLISHED if hf_config.get("legacy") is False else None,
    ),
    *task_families(
        _DEBERTA,
        classes=(pooled_head("pooler.dense", "classifier"), {}),
        states=(
            lambda config: {},
            dict(ignored=(*_UNREAD, "cls.*", "lm_predictions.*", "pooler.*", "classifier.*")),
        ),
        named=_deberta_layouts,
    ),
)

register_families(*FAMILIES)
