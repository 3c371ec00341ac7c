"""Extras: what a reader of the methods may skip. They import the core, which never imports them.

`EXTRAS` tells the core which names a module adds to a registry (`jaxgrow.registry`).
"""

EXTRAS: dict[str, dict[str, str]] = {
    "attention kernel": dict.fromkeys(("cudnn", "ring", "splash"), "jaxgrow.extras.models.kernels"),
    "mixture of experts": dict.fromkeys(
        ("Experts", "expert_rows"), "jaxgrow.extras.models.mixture"
    ),
    "model family": {
        "CaiTConfig": "jaxgrow.extras.models.cait",
        "DeBERTaConfig": "jaxgrow.extras.models.deberta",
        "ModernBERTConfig": "jaxgrow.extras.models.modernbert",
        "SwinConfig": "jaxgrow.extras.models.swin",
    },
    "architecture": {
        "DebertaV2ForMaskedLM": "jaxgrow.extras.families.deberta",
        "DebertaV2ForQuestionAnswering": "jaxgrow.extras.families.deberta",
        "DebertaV2ForSequenceClassification": "jaxgrow.extras.families.deberta",
        "DebertaV2ForTokenClassification": "jaxgrow.extras.families.deberta",
        "DebertaV2Model": "jaxgrow.extras.families.deberta",
        "ModernBertForMaskedLM": "jaxgrow.extras.families.modernbert",
        "ModernBertForQuestionAnswering": "jaxgrow.extras.families.modernbert",
        "ModernBertForSequenceClassification": "jaxgrow.extras.families.modernbert",
        "ModernBertForTokenClassification": "jaxgrow.extras.families.modernbert",
        "ModernBertModel": "jaxgrow.extras.families.modernbert",
        "Swinv2ForImageClassification": "jaxgrow.extras.families.swin",
    },
}
