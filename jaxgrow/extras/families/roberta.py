"""How are RoBERTa, XLM-R, CamemBERT and DistilBERT stored?

Their layers are those of BERT, and DistilBERT has other names for them. Their heads are different.
"""

from dataclasses import replace
from functools import partial

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.families import bert
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.extras.families.encoder_tasks import (
    STATES,
    pooled_head,
    states_head,
    task_families,
)
from jaxgrow.models.bert import BERTConfig

_DISTIL_LAYER = {
    "attention/query": "attention.q_lin",
    "attention/key": "attention.k_lin",
    "attention/value": "attention.v_lin",
    "attention/out": "attention.out_lin",
    "mlp/up": "ffn.lin1",
    "mlp/down": "ffn.lin2",
    "attention_norm": "sa_layer_norm",
    "mlp_norm": "output_layer_norm",
}


def _roberta_families(model: str, model_type: str) -> tuple[Family, ...]:
    """Return the architectures of a model that is stored like RoBERTa."""
    base = replace(
        bert.BERT_BASE,
        architecture=model,
        model_type=model_type,
        # The first position embedding is in the row after this index.
        settings=bert.SETTINGS | {"pad_token_id": (1,)},
        fixed={"norm": "post", "first_position": 2},
        renamed={},
        ignored=("*.position_ids", "roberta.pooler.*"),
        stray="roberta.",
    )
    tokens = bert.masked_token_head(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"
    )
    ignored = (*base.ignored, "lm_head.bias", "lm_head.decoder.*")
    copies = bert.unused_bias("lm_head.bias")
    return (
        bert.masked_family(base, tokens, copies=copies, ignored=ignored),
        *task_families(
            base,
            classes=(pooled_head("classifier.dense", "classifier.out_proj"), {}),
            states=(states_head, STATES | dict(ignored=("*.position_ids", "lm_head.*"))),
        ),
    )


ROBERTA = _roberta_families("Roberta", "roberta")
XLM_ROBERTA = _roberta_families("XLMRoberta", "xlm-roberta")
CAMEMBERT = _roberta_families("Camembert", "camembert")


# --- DistilBERT ---


_DISTIL = Family(
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
    fixed={**bert.BERT_BASE.fixed, "types": 0, "eps": 1e-12, "pooling": "relu"},
    names=states_head,
    stray="distilbert.",
)
_DISTIL_TOKENS = bert.masked_token_head(
    "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
)
_distil_layouts = partial(bert.bert_layouts, layers="transformer.layer", layer=_DISTIL_LAYER)
DISTILBERT = (
    bert.masked_family(
        _DISTIL, _DISTIL_TOKENS, _distil_layouts, ignored=("vocab_projector.weight",)
    ),
    *task_families(
        _DISTIL,
        classes=(pooled_head("pre_classifier", "classifier"), {}),
        states=(lambda config: {}, dict(ignored=("vocab_*",))),
        named=_distil_layouts,
    ),
)

for _model in (ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT):
    register_families(*_model)
