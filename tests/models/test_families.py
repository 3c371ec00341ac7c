"""Every operator and plan has the right shapes on every family, and every step is traceable."""

import json
import re
from dataclasses import replace
from functools import cache

import chex
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
from jaxgrow.models import BERTConfig, Config, GPT2Config, LlamaConfig, ViTConfig, from_json
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


@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_the_scale_of_a_kept_layer_is_never_rounded_to_bfloat16(name):
    """A rounded 1 / p would be off by up to 0.4 % for every number of a layer."""
    config = replace(FAMILIES[name], dtype="bfloat16")

    def outputs(params, inputs, scale):
        keep_mask = KeepMask(np.array([True, False, True, True]), scale, "sublayer")
        return config.module.apply({"params": params}, inputs, keep_mask=keep_mask)

    scale = jax.ShapeDtypeStruct((4,), jnp.float32)
    traced = str(jax.make_jaxpr(outputs)(shapes(config), batch(config)[0], scale))
    assert "bf16[8]" in traced or "bf16[2," in traced
    assert not re.findall(r"bf16\[4?\] = convert_element_type.*", traced)


ALL = FAMILIES | HEADED
# The families of the core. Configs that differ from another family only in the head or in the sizes
# of their parts run few operators.
CORE = ("GPT-2", "BERT", "Llama", "ViT")
ALIKE = {*HEADED, *VARIANTS}
EACH = ("hypercloning", "stack")
every_family = pytest.mark.parametrize("config", cases(ALL, CORE))


def for_every_family(name, values, always):
    """Parametrize the families and values; the default suite runs all values of two families."""
    of_each = {of: [v for v in values if of not in ALIKE or v in always] for of in ALL}
    rows = {f"{v}-{of}": (ALL[of], v) for of, chosen in of_each.items() for v in chosen}
    core = [f"{v}-{of}" for of in CORE for v in values if of in ("GPT-2", "Llama") or v in always]
    return pytest.mark.parametrize(("config", name), cases(rows, core))


@for_every_family("name", (*DEPTH, *operators.WIDTH), EACH)
def test_operators(config, name):
    if name in DEPTH:
        target, operator = doubled(config, "layers"), DEPTH[name]
    else:
        target = doubled(config, "embed", "heads", "kv_heads", "mlp")
        operator = operators.WIDTH[name]
    large = assert_fits(operator(config.sizes(), target), config)
    assert {axis: large.sizes()[axis] for axis in target} == target


@pytest.mark.parametrize(("make", "message"), [
    (lambda: GPT2Config(heads=0, mlp=-1), "heads is 0, less than 1, mlp is -1, less than 1"),
    (lambda: GPT2Config(dtype="float16"), "dtype must be 'float32', 'bfloat16' or 'float64', not 'float16'"),
    (lambda: LlamaConfig(heads=4, kv_heads=3), "4 query heads are not divisible by 3 key/value heads"),
    (lambda: LlamaConfig(head_dim=5), "need an even number of dimensions, but rotary=1 of head_dim=5 is 5"),
    (lambda: LlamaConfig(kv_heads=0), "kv_heads is 0, less than 1"),
    (lambda: BERTConfig(types=-1), "types is -1, less than 0"),
    (lambda: BERTConfig(norm="sandwich"), "norm must be 'post' or 'pre', not 'sandwich'"),
    (lambda: BERTConfig(masked=0.0), "masked must be above 0 and at most 1, but is 0.0"),
    (lambda: BERTConfig(context=2, first_position=2), "context=2 leaves no position after first_position=2"),
    (lambda: ViTConfig(image=10, patch=3), "image=10 must be a multiple of patch=3"),
    (lambda: ViTConfig(image=10, patch=0), "image=10 must be a multiple of patch=0, and patch at least 1"),
    (lambda: ViTConfig(classes=0), "classes is 0, less than 1"),
    (lambda: ViTConfig(distillation="head", mean_head=True), "mean_head does not support a distillation token"),
    (lambda: ViTConfig(distillation="hard"), "distillation must be 'none', 'token' or 'head', not 'hard'"),
])  # fmt: skip
def test_config_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Configs whose paths, shapes and axis names are the content of a file.
TEXT = dict(vocab=11, context=7, dtype="float64")
LLAMA = TEXT | dict(layers=3, heads=4, kv_heads=2, embed=12, mlp=20, head_dim=6)
NEOX = dict(layer_norm=True, gated=False, bias=True, qkv_bias=True, norms="after", query_norm="all")
BERT = TEXT | dict(types=4, head_dim=5, layers=2, heads=3, embed=6, mlp=9)
VIT = dict(image=10, patch=5, channels=2, classes=11, layers=2, embed=6, heads=3, head_dim=7, mlp=9)
CLASSES = dict(head="classes", classes=3)
GOLDEN = {
    "gpt2": [tiny.config(), tiny.config(tied=False), tiny.config(**CLASSES)],
    "llama": [LlamaConfig(**LLAMA | more) for more in
              ({}, {"tied": True, "qkv_bias": True}, CLASSES, {"norms": "both", "query_norm": "head"}, NEOX)],
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
    """Without the ``.in`` mark of the norm, a tied model would have doubled logits."""
    axes, target = config.axes(), doubled(config, "embed", "heads", "kv_heads", "mlp")
    growth = operators.hypercloning(config.sizes(), target)
    assert preserves_function(growth, axes)

    def without(names):
        return tuple(n.replace("embed.in.norm", "embed.norm") for n in names)

    unread = jax.tree.map(without, axes, is_leaf=is_names)
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
    how, key = ligo.LiGO(tied=tied), jax.random.key(0)
    maps = jax.eval_shape(lambda: ligo.init_coefficients(how, axes, config.sizes(), target, key))
    maps = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), maps)
    large = assert_fits(ligo.learned_growth(maps, axes, config.sizes()), config)
    assert large.sizes().items() >= target.items()


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
    small, half = halved(config), TrainStage(0.5)
    pld, sbld = LayerDrop(), LayerDrop(sensitivity=Sensitivity(batches=1, after=0.25))
    gather = DropLayers(replace(pld, execution="gather"))
    tokens = DropTokens(TokenDrop(0.5, first=1, last=1))
    some = (tokens,) if config.modality == "text" else ()
    frozen = TrainStage(0.5, modifiers=(FreezeParts(Freeze(layers=(0,))),))
    return {
        "dropping by sensitivity": Scratch((DropLayers(sbld),)),
        "V-cycle, dropping": VCycle(
            (TrainStage(0.1, modifiers=(DropLayers(pld),)),),
            (TrainStage(0.4), TrainStage(0.5, modifiers=(gather,))),
            moments_up="exact",
        ),
        "V-cycle, published tables": VCycle(groupings=(Grouping(tied="paper"),), correction=True),
        "learned, then dropping tokens": Growing(
            small, half, (GrowTo((TrainStage(0.5, modifiers=some),), Learned()),)
        ),
        "widened, then deepened, frozen": Growing(
            small, half, (GrowTo((frozen,), ("hypercloning", "stack"), moments="copy"),)
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


# The families of each plan, in the default, the extra and the slow suite. All families with different
# parts run the plan that changes the parts most. The other plans depend little on the family: a
# teacher uses logits only, and the published tables exist for text models. For layer and token
# dropping, the families with the most parts are shown: inputs by name, grouped keys, several stacks.
# The programs of several stacks take longest to trace.
PLANS = {
    "widened, then deepened, frozen": (
        ["GPT-2", "ViT"],
        ["BERT", "Llama", "Gemma", "Pythia", "ModernBERT", "DeBERTa", "DINOv2"],
        ["CaiT", "Swin"],
    ),
    "V-cycle, published tables": (["GPT-2"], ["BERT"], []),
    "dropping by sensitivity": (["BERT"], [], []),
    "V-cycle, dropping": (["Llama"], [], ["CaiT", "Swin"]),
    "learned, then dropping tokens": (["BERT"], [], ["CaiT"]),
    "taught": ([], ["GPT-2", "ViT"], []),
}
IN_CORE, FAST, SLOW = (
    {f"{method}-{of}": (FAMILIES[of], method) for method, suites in PLANS.items() for of in suites[i]} for i in range(3)
)  # fmt: skip


@pytest.mark.parametrize(("config", "method"), cases(IN_CORE | FAST | SLOW, IN_CORE, FAST))
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
            chex.assert_trees_all_equal_shapes_and_dtypes(found, result)
            assert metrics["loss"].shape == ()
        held = after(plan, i, held, result)
    assert held["large"].config.sizes() == config.sizes()


@pytest.mark.extra
@pytest.mark.parametrize(("name", "method"), [
    ("BERT", runs.VCYCLE), pytest.param("DeiT", Scratch(), marks=pytest.mark.slow)
], ids=["BERT, V-cycle", "DeiT"])  # fmt: skip
def test_runs(name, method, tmp_path):
    """Check the data, the steps, the phases between them, validation and checkpoints."""
    config = FAMILIES[name]
    data = {"data": Images(valid_fraction=0.1)} if config.modality == "images" else {}
    e = runs.experiment(tmp_path, model=config, method=method, steps=4, **data)
    result = pretrain.run_experiment(e, tmp_path / "run")
    assert result["steps"] == (4 if method == Scratch() else 5) and 0 <= result["val_accuracy"] <= 1
    assert result["model"] == config.as_json()
    assert result["val_loss"] == pytest.approx(np.log(config.sizes().get("vocab", 10)), rel=0.2)
