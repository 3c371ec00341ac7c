"""Check that every operator and every plan works on every family.

Shapes must match the grown config, and every step must be traceable.
"""

import json
import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import tiny
from cases import cases
from families import (
    FAMILIES,
    HEADED,
    VARIANTS,
    assert_fits,
    batch,
    doubled,
    halved,
    parameters,
    shapes,
)
from growths import DEPTH

from jaxgrow import checkpoints, operators, preserves_function, sizes
from jaxgrow.axes import is_names
from jaxgrow.checkpoints.source import leaves_by_path
from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.layerdrop import KeepMask, LayerDrop, Sensitivity
from jaxgrow.models import BERTConfig, Config, LlamaConfig, ViTConfig, from_json
from jaxgrow.operators import ligo
from train import pretrain
from train.extras.images.images import Images
from train.extras.inherit import Inherit, Teacher
from train.extras.modifiers import DropTokens, FreezeParts
from train.plan.lifetimes import after
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.training import Measure, Modifier, Train
from train.plan.transforms import Grouping, Transform
from train.state.optim import Optim, transformation
from train.step.step import StepInputs, train_step


@pytest.mark.parametrize(
    "name",
    cases(["GPT-2", "BERT", "CaiT", "BERT, pre-LN", "Llama", "ViT"], ["GPT-2", "BERT"], ["CaiT"]),
)
def test_the_scale_of_a_kept_layer_is_never_rounded_to_bfloat16(name):
    """Check by the trace that no bfloat16 scalar is created.

    A rounded 1 / p would be off by up to 0.4 % for every number of a layer.
    """
    config = replace(FAMILIES[name], dtype="bfloat16")

    def outputs(params, inputs, scale):
        keep_mask = KeepMask(np.array([True, False, True, True]), scale, "sublayer")
        return config.module.apply({"params": params}, inputs, keep_mask=keep_mask)

    scale = jax.ShapeDtypeStruct((4,), jnp.float32)
    traced = str(jax.make_jaxpr(outputs)(shapes(config), batch(config)[0], scale))
    assert "bf16[8]" in traced or "bf16[2," in traced
    assert not re.findall(r"bf16\[4?\] = convert_element_type.*", traced)


ALL = FAMILIES | HEADED
# The default suite runs the families of the core. Configs that differ from another family only in
# the head or in the sizes of their parts run most operators in the slow suite.
CORE = ("GPT-2", "BERT", "Llama", "ViT")
ALIKE = {*HEADED, *VARIANTS}
EACH = ("hypercloning", "stack")
every_family = pytest.mark.parametrize("config", cases(ALL, CORE))


def for_every_family(name, values, always):
    """Parametrize the families and values; families that are alike run few values fast."""
    rows = {f"{value}-{of}": (c, value) for of, c in ALL.items() for value in values}
    core = [f"{value}-{of}" for of in CORE for value in values]
    extra = [
        f"{value}-{of}" for of in ALL for value in values if of not in ALIKE or value in always
    ]
    return pytest.mark.parametrize(("config", name), cases(rows, core, extra))


@for_every_family("name", (*DEPTH, *operators.WIDTH), EACH)
def test_operators(config, name):
    if name in DEPTH:
        target, operator = doubled(config, "layers"), DEPTH[name]
    else:
        target = doubled(config, "embed", "heads", "kv_heads", "mlp")
        operator = operators.WIDTH[name]
    large = assert_fits(operator(config.sizes(), target), config)
    assert {axis: large.sizes()[axis] for axis in target} == target


# Configs whose paths, shapes and axis names are the content of a file.
TEXT = dict(vocab=11, context=7, dtype="float64")
LLAMA = TEXT | dict(layers=3, heads=4, kv_heads=2, embed=12, mlp=20, head_dim=6)
NEOX = dict(layer_norm=True, gated=False, bias=True, qkv_bias=True, norms="after", query_norm="all")
BERT = TEXT | dict(types=4, head_dim=5, layers=2, heads=3, embed=6, mlp=9)
VIT = dict(image=10, patch=5, channels=2, classes=11, layers=2, embed=6, heads=3, head_dim=7, mlp=9)
CLASSES = dict(head="classes", classes=3)
GOLDEN = {
    "gpt2": [tiny.config(), tiny.config(tied=False), tiny.config(**CLASSES)],
    "llama": [
        LlamaConfig(**LLAMA | more)
        for more in (
            {},
            {"tied": True, "qkv_bias": True},
            CLASSES,
            {"norms": "both", "query_norm": "head"},
            NEOX,
        )
    ],
    "bert": [BERTConfig(**BERT | more) for more in ({}, {"tied": False}, {"norm": "pre"}, CLASSES, {"head": "spans"})],
    "vit": [
        *(ViTConfig(**VIT, distillation=d, dtype="float64") for d in ("none", "token", "head")),
        ViTConfig(**VIT, layer_scale=0.5, gated=True, mean_head=True, dtype="float64"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_parameter_shapes_and_axes_match_the_golden_file(name):
    title = (lambda c: json.dumps(c.as_json())) if name == "llama" else str
    tiny.assert_golden(name, *GOLDEN[name], title=title)


@every_family
def test_a_config_knows_its_sizes_and_its_json(config):
    assert sizes(shapes(config), config.axes()) == config.sizes()
    assert from_json(json.loads(json.dumps(config.as_json()))) == config


@every_family
def test_every_family_reads_what_grows(config):
    """Check that the ``.in`` mark of the norm makes a tied head read the grown features.

    Without the mark the logits of a tied model would be doubled.
    """
    axes, target = config.axes(), doubled(config, "embed", "heads", "kv_heads", "mlp")
    growth = operators.hypercloning(config.sizes(), target)
    assert preserves_function(growth, axes)
    unread = jax.tree.map(
        lambda names: tuple(n.replace("embed.in.norm", "embed.norm") for n in names),
        axes,
        is_leaf=is_names,
    )
    assert preserves_function(growth, unread) == (unread == axes)


@for_every_family("groups", ("far", "adjacent"), ["far"])
def test_coalescing(config, groups):
    growth = operators.coalesce(config.sizes(), heads=groups, layers="adjacent")
    small = assert_fits(growth, config)
    assert small == halved(config)
    up = operators.decoalesce(config.sizes(), heads=groups, layers="adjacent")
    assert assert_fits(up, small) == config


@for_every_family("tied", (True, False), [True])
def test_learned_maps(config, tied):
    target = doubled(config, "layers", "embed", "heads", "kv_heads", "mlp")
    axes = parameters(config)[1]
    maps = jax.eval_shape(
        lambda: ligo.init_coefficients(
            ligo.LiGO(tied=tied), axes, config.sizes(), target, jax.random.key(0)
        )
    )
    maps = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), maps)
    assert (
        assert_fits(ligo.learned_growth(maps, axes, config.sizes()), config).sizes().items()
        >= target.items()
    )


# The settings, besides the fixed ones, without which an architecture lacks some of its tensors.
NEEDED = {
    "dinov2": {"layer_scale": 0.5},
    "dinov2_with_registers": {"layer_scale": 0.5, "registers": 2},
    "qwen2_moe": {"shared": 5},
    "gpt_oss": {"clamp": 7.0},
}


@pytest.mark.parametrize("architecture", checkpoints.FAMILIES)
def test_an_architecture_has_a_tensor_for_every_leaf(architecture):
    """Check the Hugging Face names with the first config of each class, without `transformers`."""
    family = checkpoints.FAMILIES[architecture]
    config = next(c for c in FAMILIES.values() if type(c) is family.config)
    experts = {"experts": 3} if family.mixture else {}
    more = NEEDED.get(family.model_type, {})
    config = replace(config, **{**experts, **family.fixed, **more})
    assert family.names(config).keys() == leaves_by_path(config.axes()).keys()


# --- plans ---

TX = transformation(Optim())


@cache
def step(modifiers: tuple[Modifier, ...]):
    """Trace a step once for equal shapes, for any plan."""
    return jax.jit(train_step(TX, 1, modifiers))


def methods(config: Config):
    small = halved(config)
    pld, sbld = LayerDrop(), LayerDrop(sensitivity=Sensitivity(batches=1, after=0.25))
    drop = DropTokens(TokenDrop(0.5, first=1, last=1))
    some = (drop,) if config.modality == "text" else ()
    stage = TrainStage(0.5, modifiers=some)
    return {
        "dropping by sensitivity": Scratch((DropLayers(sbld),)),
        "V-cycle, dropping": VCycle(
            (TrainStage(0.1, modifiers=(DropLayers(pld),)),),
            (
                TrainStage(0.4),
                TrainStage(0.5, modifiers=(DropLayers(replace(pld, execution="gather")),)),
            ),
            moments_up="exact",
        ),
        "V-cycle, published tables": VCycle(groupings=(Grouping(tied="paper"),), correction=True),
        "learned, then dropping tokens": Growing(
            small, TrainStage(0.5), (GrowTo((stage,), Learned()),)
        ),
        "widened, then deepened, frozen": Growing(
            small,
            TrainStage(0.5),
            (
                GrowTo(
                    (TrainStage(0.5, modifiers=(FreezeParts(Freeze(layers=(0,))),)),),
                    ("hypercloning", "stack"),
                    moments="copy",
                ),
            ),
        ),
        "taught": Inherit(small),
    }


def inputs(modifier: Modifier, phase: Train, held):
    """Return an example of the input that a modifier gives to a step."""
    if isinstance(modifier, DropLayers):
        layers = phase.config.depth
        open_ = np.ones((1, layers), bool)
        if modifier.drop.execution == "gather":
            stages = tuple(np.arange(n - 1)[None] for n in phase.config.depths)
            open_ = stages if len(stages) > 1 else stages[0]
        return KeepMask(open_, np.ones((1, layers), np.float32), "sublayer")
    if isinstance(modifier, Teacher):
        return replace(held[modifier.name], opt=None), np.float32(0.5)
    return None


# In the extra suite, the variants run only this plan, which changes the parts most.
CHANGED = ("widened, then deepened, frozen",)
# These families use parts of other families with different sizes or in a different order, so they
# run in the slow suite only.
BARELY = ("GPT-2, untied", "BERT, pre-LN", "RoBERTa", "Qwen2", "DeiT")
# The programs of these families, whose layers form several stacks, take longest to trace, so their
# plans run in the slow suite only.
STAGED = ("CaiT", "Swin")
# These plans depend little on the family. A teacher uses logits only, and the published tables
# exist for text models. For layer and token dropping, the families with the most parts are shown:
# inputs by name, grouped keys, two stacks.
SHOWN = {
    "taught": ("GPT-2", "ViT"),
    "V-cycle, published tables": ("GPT-2", "BERT"),
    "dropping by sensitivity": ("BERT",),
    "V-cycle, dropping": ("Llama",),
    "learned, then dropping tokens": ("BERT",),
}


PLANS = {
    f"{method}-{name}": (FAMILIES[name], method)
    for name in FAMILIES
    for method in methods(FAMILIES["GPT-2"])
}
FAST = [
    f"{method}-{name}"
    for config, method in PLANS.values()
    for name in SHOWN.get(method, FAMILIES)
    if FAMILIES[name] is config
    and name not in (*BARELY, *STAGED)
    and (name not in VARIANTS or method in CHANGED)
]
IN_CORE = [
    "widened, then deepened, frozen-GPT-2",
    "V-cycle, published tables-GPT-2",
    "dropping by sensitivity-BERT",
    "V-cycle, dropping-Llama",
    "learned, then dropping tokens-BERT",
    "widened, then deepened, frozen-ViT",
]


@pytest.mark.parametrize(("config", "method"), cases(PLANS, IN_CORE, FAST))
def test_plans(config, method):
    held = {}
    plan = methods(config)[method].plan(config, Optim(warmup=0), 40)
    # one micro-batch
    micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), batch(config))
    for i, phase in enumerate(plan):
        if isinstance(phase, Measure):
            result = jax.eval_shape(phase.measure, held[phase.name], micro)
        elif isinstance(phase, Transform):
            result = jax.eval_shape(lambda m, p=phase: p.apply(m, TX), held)
        else:
            assert isinstance(phase, Train)
            result = jax.eval_shape(lambda m, p=phase: p.start(m, TX, jax.random.key(0)), held)
            given = tuple(inputs(m, phase, held) for m in phase.modifiers)
            programs = tuple(m.program() for m in phase.modifiers)
            run = jax.make_jaxpr(step(programs), return_shape=True)
            found, metrics = run(result, batch(config), StepInputs(np.float32(0.1), given=given))[1]
            assert jax.tree.structure(found) == jax.tree.structure(result)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
                lambda x: (x.shape, x.dtype), result
            )
            assert metrics["loss"].shape == ()
        held = after(plan, i, held, result)
    assert held["large"].config.sizes() == config.sizes()


@pytest.mark.extra
@pytest.mark.parametrize(("name", "method"), [
    ("BERT", Scratch()),
    pytest.param("ModernBERT", Scratch(), marks=pytest.mark.slow),
    pytest.param("DeiT", Scratch(), marks=pytest.mark.slow),
    *(pytest.param(name, runs.VCYCLE, marks=pytest.mark.slow) for name in ("BERT", "DeiT")),
], ids=["BERT", "ModernBERT", "DeiT", "BERT, V-cycle", "DeiT, V-cycle"])  # fmt: skip
def test_runs(name, method, tmp_path):
    """Check the data, the steps, the phases between them, validation and checkpoints."""
    config = FAMILIES[name]
    data = {"data": Images(valid_fraction=0.1)} if config.modality == "images" else {}
    e = runs.experiment(tmp_path, model=config, method=method, steps=4, **data)
    result = pretrain.run_experiment(e, tmp_path / "run")
    assert result["steps"] == (4 if method == Scratch() else 5) and 0 <= result["val_accuracy"] <= 1
    assert result["model"] == config.as_json()
    assert result["val_loss"] == pytest.approx(np.log(config.sizes().get("vocab", 10)), rel=0.2)
