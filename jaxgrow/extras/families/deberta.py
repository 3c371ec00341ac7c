"""How are DeBERTa v2 and v3 stored? The names equal the names of BERT, except in the attention."""

from dataclasses import replace

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.families import bert
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, norm_layouts
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.extras.families.encoder_tasks import pooled_head, states_head, task_families
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.typed import Json

_LAYER = {
    **bert.BERT_LAYER,
    "attention/query": "attention.self.query_proj",
    "attention/key": "attention.self.key_proj",
    "attention/value": "attention.self.value_proj",
}
_FIELDS = {key: field for key, field in bert.BERT_FIELDS.items() if key != "type_vocab_size"}


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
        return out | norm_layouts({"relative_norm": f"{model}encoder.LayerNorm"})

    return names


def _read_deberta(hf_config: Json) -> Json:
    """Return the fields of the config that describe the relative positions.

    Raises:
      ValueError: the positions are not as in the published models, or a size in ``hf_config`` must
        equal the hidden size or the size of the heads, but does not.
    """
    kinds = hf_config.get("pos_att_type") or []
    kinds = [k.strip() for k in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    norms = [norm.strip() for norm in hf_config.get("norm_rel_ebd", "none").lower().split("|")]
    buckets = hf_config.get("position_buckets", -1)
    for key, fits, form in (
        (
            "relative_attention",
            hf_config.get("relative_attention") is True,
            "with relative positions",
        ),
        (
            "position_biased_input",
            hf_config.get("position_biased_input", True) is False,
            "without absolute positions in its input",
        ),
        ("share_att_key", hf_config.get("share_att_key") is True, "if it is true"),
        ("pos_att_type", {"c2p", "p2c"} <= {*kinds}, "with p2c|c2p"),
        ("norm_rel_ebd", "layer_norm" in norms, "with layer_norm"),
        ("position_buckets", buckets > 0, "with buckets"),
    ):
        if not fits:
            raise ValueError(
                f"{key} is {spelt(hf_config.get(key))}, but jaxgrow supports DeBERTa only {form}. Choose a model "
                "with the settings of microsoft/deberta-v3-base"
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
    farthest = hf_config.get("max_relative_positions", -1)
    if farthest < 1:
        farthest = hf_config.get("max_position_embeddings", 512)
    return {"distances": 2 * buckets, "farthest": farthest}


def _check_equal(hf_config: Json, what: str, size: int, *keys: str) -> None:
    for key in keys:
        if hf_config.get(key, size) != size:
            raise ValueError(
                f"{key} is {hf_config[key]}, but jaxgrow supports DeBERTa only if it is {what}, {size}"
            )


def _written_deberta(config: DeBERTaConfig) -> Json:
    return {
        "relative_attention": True,
        "position_biased_input": False,
        "max_relative_positions": config.farthest,
        "position_buckets": config.distances // 2,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "pooler_hidden_size": config.embed,
        # A source may have these keys, whose default is the same.
        "embedding_size": config.embed,
        "attention_head_size": config.head_dim,
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
    absent=bert.BERT_ABSENT | {"layer_norm_eps": 1e-7},
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
