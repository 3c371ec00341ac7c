"""Extras: modules that a reader of the methods may skip. They import the core, which never imports them.

`EXTRAS` tells the core which names a module adds to a registry (`jaxgrow.registry`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["completep", "freeze", "importance"])

_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForTokenClassification",
)
_ENCODER = (*_HEADS, "Model")
_DECODER = ("ForCausalLM", "ForSequenceClassification", "Model")
_DENSE = (
    "Qwen2",
    "Mistral",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "Phi3",
    "SmolLM3",
    "GPTNeoX",
)


def _named(models: tuple[str, ...], heads: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(model + head for model in models for head in heads)


# The architectures that each module can read and write.
_ARCHITECTURES = {
    "jaxgrow.extras.families.llama_like": (
        *_named(_DENSE, _DECODER),
        *_named(("Granite", "GraniteMoeHybrid"), ("ForCausalLM", "Model")),
        *("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", "Gemma3TextModel"),
    ),
    "jaxgrow.extras.families.mixtures": (
        *_named(("Mixtral", "Qwen3Moe", "Qwen2Moe", "GptOss"), _DECODER),
        *("OlmoeForCausalLM", "OlmoeModel"),
    ),
    "jaxgrow.extras.families.encoder_tasks": tuple(f"Bert{task}" for task in _ENCODER[1:]),
    "jaxgrow.extras.families.opt": _named(("OPT",), _DECODER),
    "jaxgrow.extras.families.roberta": _named(
        ("Roberta", "XLMRoberta", "Camembert", "DistilBert"), _ENCODER
    ),
    "jaxgrow.extras.families.deberta": _named(("DebertaV2",), _ENCODER),
    "jaxgrow.extras.families.modernbert": _named(("ModernBert",), _ENCODER),
    "jaxgrow.extras.families.vision": (
        *("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", "ViTModel"),
        *_named(("Dinov2", "Dinov2WithRegisters"), ("ForImageClassification", "Model")),
        *("CLIPVisionModel", "CLIPVisionModelWithProjection", "SiglipVisionModel"),
    ),
    "jaxgrow.extras.families.swin": ("Swinv2ForImageClassification",),
}

# The functions that `jaxgrow.operators` also provides.
_OPERATORS = (
    *("mslt", "midas", "midas_lengths", "lidas", "solar", "passthrough", "g_stack_tokens"),
    *("loop", "unloop"),
    *("upcycle", "expert_copies", "virtual_groups"),
    *("zero_pad", "staged", "sparkling", "average"),
    *("keep_units", "best_units", "prune"),
)

_COMMANDS = "jaxgrow.extras.commands.arguments"

EXTRAS: dict[str, dict[str, str]] = {
    "run checkpoint": {"run": "jaxgrow.extras.run_checkpoint"},
    "checkpoint format": {"other trainers": "jaxgrow.extras.integrations.command"},
    "command": {
        "inspect": f"{_COMMANDS}: show the config of a model and the shape, axes, dtype and location of "
        "each parameter",
        "architectures": f"{_COMMANDS}: list the supported architectures of transformers",
        "suggest": f"{_COMMANDS}: list the growth methods that fit a model, with the FLOPs that they "
        "saved in our measurements",
        "show": f"{_COMMANDS}: plot the maps from old to new units that grow would apply",
        "prune": f"{_COMMANDS}: make a model smaller by removing the layers and units that are least "
        "important on given data",
        "report": f"{_COMMANDS}: compare the outputs of two models on the same inputs",
        "completion": f"{_COMMANDS}: print a shell script that completes commands, options and methods",
    },
    "growing method": {
        "vocab": "jaxgrow.extras.commands.vocabulary",
        "several models": "jaxgrow.extras.commands.passthrough",
        **dict.fromkeys(("untie", "tie"), "jaxgrow.extras.commands.retie"),
        **dict.fromkeys(
            ("upcycle", "expert_copies", "virtual_groups"), "jaxgrow.extras.commands.grow_experts"
        ),
    },
    "growth without sizes": {"loop": "jaxgrow.extras.commands.loop"},
    "card of a changed model": {"transformers": "jaxgrow.extras.commands.card"},
    "operator function": dict.fromkeys(_OPERATORS, "jaxgrow.extras.operators"),
    "note on groups": dict.fromkeys(("odd", "key heads"), "jaxgrow.extras.commands.group_notes"),
    "location of a model": {"snapshot": "jaxgrow.extras.hub_cache"},
    "merge": {"fine-tunes": "jaxgrow.extras.commands.merge"},
    "conversion": {"images": "jaxgrow.extras.changed_models"},
    "noise": {"copies": "jaxgrow.extras.changed_models"},
    "stored experts": {"fused": "jaxgrow.extras.families.fused_experts"},
    "adapter module": {"bottleneck": "jaxgrow.extras.peft.bottleneck"},
    "adapter": {"lora": "jaxgrow.extras.hf_peft.alone"},
    "diagnosis": {
        "other content": "jaxgrow.extras.other_content",
        "quantised": "jaxgrow.extras.families.quantised",
        **dict.fromkeys(
            ("misfits", "empty", "other head", "unsupported", "not stored"),
            "jaxgrow.extras.families.misfits",
        ),
    },
    "stored rotary scaling": dict.fromkeys(
        ("linear", "dynamic", "llama3", "yarn", "longrope"), "jaxgrow.extras.families.rope_scalings"
    ),
    "new units": dict.fromkeys(("fresh", "spectral"), "jaxgrow.extras.fresh"),
    "multipliers": {"completep": "jaxgrow.extras.completep"},
    "naming": {
        "text model": "jaxgrow.extras.families.text_part",
        **dict.fromkeys(
            ("unwrapped", "predicted layers", "predicted tensors"),
            "jaxgrow.extras.families.tensor_names",
        ),
    },
    "repeated keys": dict.fromkeys(
        ("contradictions", "own names", "old lists", "corrected", "removed"),
        "jaxgrow.extras.families.layer_lists",
    ),
    "rounding": {"notes": "jaxgrow.extras.rounding"},
    "companion": {
        "lora": "jaxgrow.extras.hf_peft.companion",
        "optimizer": "jaxgrow.extras.integrations.torch_optimizer",
    },
    "generation": dict.fromkeys(("attention", "layers"), "jaxgrow.extras.models.cache"),
    "attention kernel": dict.fromkeys(("cudnn", "ring", "splash"), "jaxgrow.extras.models.kernels"),
    "fused operation": dict.fromkeys(
        ("norm", "log sum", "projections", "units"), "jaxgrow.extras.models.fused"
    ),
    "pooler": {"attention": "jaxgrow.extras.models.pooler"},
    "mixture of experts": {
        **dict.fromkeys(("Experts", "expert_rows"), "jaxgrow.extras.models.mixture"),
        **dict.fromkeys(("add_router_noise", "redraw_units"), "jaxgrow.extras.models.upcycling"),
    },
    "rotary scaling": dict.fromkeys(
        ("dynamic", "longrope", "yarn"), "jaxgrow.extras.models.rotary"
    ),
    "scaling of segments": dict.fromkeys(("dynamic", "longrope"), "jaxgrow.extras.models.rotary"),
    "image size": {"positions": "jaxgrow.extras.models.image_sizes"},
    "model family": {
        "CaiTConfig": "jaxgrow.extras.models.cait",
        "DeBERTaConfig": "jaxgrow.extras.models.deberta",
        "ModernBERTConfig": "jaxgrow.extras.models.modernbert",
        "SwinConfig": "jaxgrow.extras.models.swin",
    },
    "architecture": {name: module for module, names in _ARCHITECTURES.items() for name in names},
}
