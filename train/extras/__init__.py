"""Extras of the trainer, which a reader of the methods may skip.

Extras import the core. The core never imports an extra. `EXTRAS` tells the core which names a
module adds to a registry (`jaxgrow.registry`).
"""

_COMMANDS = (
    "advise",
    "evaluate",
    "finetune",
    "generate",
    "ligo_maps",
    "predict",
    "preflight",
    "race",
    "scaling",
    "show",
    "sweep",
    "tokenizer",
    "variance",
)
EXTRAS: dict[str, dict[str, str]] = {
    "corpus": {
        "text": "train.extras.text.corpora",
        "tokens": "train.extras.text.token_files",
        "tfds": "train.extras.text.tfds",
    },
    "sample order": {"sources": "train.extras.sample_order"},
    "trace": {"profile": "train.extras.profiling"},
    "unused": {"settings": "train.extras.effect"},
    "sharing": {"steps": "train.extras.sharing"},
    "origin": {"run": "train.extras.branching"},
    "listing": {"settings": "train.extras.listings"},
    "text": {"files": "train.extras.text.mixing"},
    "dataset": {
        "Images": "train.extras.images.images",
        "Labelled": "train.extras.labelled.task",
    },
    "batch ramp": {"plan": "train.extras.ramp"},
    "measure": {"influence": "train.extras.influence"},
    "phase": {"experts": "train.extras.expert_utility"},
    "method": {"FineTune": "train.extras.fine_tune", "Inherit": "train.extras.inherit"},
    "modifier": dict.fromkeys(
        ("tokens", "freeze", "rewarm", "ramp", "windows", "dropout"), "train.extras.modifiers"
    ),
    "command": dict.fromkeys(_COMMANDS, "train.extras.arguments"),
    "holding": {"layers": "train.extras.modifiers"},
    "joining": {"processes": "train.extras.joining"},
    "memory check": {"memory": "train.extras.aot.memory"},
    "model card": {"transformers": "train.extras.model_card"},
    "board": {"tensorboard": "train.extras.tensorboard"},
    "trackers": {"services": "train.extras.trackers"},
    "automatic settings": {"memory": "train.extras.aot.estimate"},
    "arguments": {"compare": "train.extras.arguments"},
    "announcer": {"runs": "train.extras.upcoming"},
    "lengths": {"alike": "train.extras.lengths"},
    "comparison report": {"markdown": "train.extras.comparison_report"},
    "timing": {"seconds": "train.extras.timing"},
    "comparison score": dict.fromkeys(("evaluate", "finetune"), "train.extras.comparison_scores"),
}
