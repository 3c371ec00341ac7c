"""Every setting has an effect, or is an error: no choice ignores a setting silently."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from types import GenericAlias
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.peft.lora import LoRA, init_lora, merge_lora
from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.layerdrop import LayerDrop, Sensitivity, Variance
from jaxgrow.layerdrop.schedules import schedule
from jaxgrow.models import Adapter, BERTConfig, Config, LlamaConfig, Loop, ViTConfig
from jaxgrow.operators.ligo import LiGO
from jaxgrow.typed import allowed_values, field_types
from train.common.errors import UserError
from train.config.experiment import Experiment, experiment_json, load_experiment
from train.config.resuming import class_of
from train.data.dataset import DATASETS
from train.data.text import Data
from train.data.windows import next_tokens
from train.extras.effect import declared_conditions, refuse_unused
from train.extras.fine_tune import Best, FineTune
from train.extras.images.augment import Augment
from train.extras.images.images import Images
from train.extras.inherit import Inherit
from train.extras.labelled.task import Labelled
from train.extras.modifiers import DropTokens, DropUnits, FreezeParts, Ramp, Rewarm, ShortContext
from train.extras.pruning import Pruning
from train.plan.lifetimes import Plan, shapes
from train.plan.methods import METHODS as METHODS_BY_NAME
from train.plan.methods import Continue, Growing, GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.training import MODIFIERS, Modifier, PhaseStart, Train
from train.plan.transforms import Grouping
from train.state.mesh import Mesh
from train.state.model import TrainState
from train.state.optim import Optim, learning_rate, transformation
from train.step.inputs import step_plans
from train.step.step import train_step

TEXTS = {"own": 8, "other": 3, "valid": 2}  # folders, with their numbers of files
TINY = dict(layers=2, embed=8, heads=2, head_dim=4, mlp=16)
VIT = ViTConfig(**TINY, image=8, patch=4, channels=1, classes=10)


def other(node: Any, name: str) -> Any:
    """Return a value of the field that is not its value in ``node``."""
    old, hint = getattr(node, name), field_types(type(node))[name]
    if isinstance(old, bool):
        return not old
    if isinstance(old, tuple) and old and isinstance(old[0], int):
        return tuple(2 * x for x in old)
    allowed = allowed_values(hint)
    literals = [x for x in allowed if not isinstance(x, type | GenericAlias) and x != old]
    if literals and not isinstance(old, int | float):
        return literals[0]
    if isinstance(old, int | float):
        return old / 2 if isinstance(old, float) and old else old + 1
    if isinstance(old, str):
        return f"{old}x"
    kinds = [x for x in allowed if isinstance(x, type) and x is not type(None)]
    return {int: 2, float: 0.5, str: "x"}.get(kinds[0] if kinds else int, (1,))


def unused(node: Any, **more: Any) -> bool:
    """Whether the check of the settings refuses ``node``."""
    try:
        refuse_unused(node, **more)
    except ValueError as error:
        assert "has no effect" in str(error) and "leave out" in str(error)
        return True
    return False


def used(node: Any, **more: Any) -> Any:
    """Return ``node``, unless it is refused."""
    if unused(node, **more):
        raise ValueError("refused")
    return node


def effects(
    base: Any, observe: Any, values: dict[str, Any], skip: Any = (), otherwise: Any = str
) -> None:
    """Check that each field of ``base`` has an effect that ``observe`` sees, or is refused.

    What ``observe`` does not see, the slower ``otherwise`` must see.
    """
    before = observe(base)
    ignored = []
    for f in dataclasses.fields(base):
        if f.name in skip:
            continue
        try:
            changed = replace(base, **{f.name: values.get(f.name, other(base, f.name))})
            after = observe(changed)
        except (ValueError, UserError):
            continue
        same = str(after) == str(before)
        if same and (otherwise is str or otherwise(changed) == otherwise(base)):
            ignored.append(f.name)
    assert ignored == []


# --- models ---

_LLAMA: dict[str, Any] = {"vocab": 8, "context": 8, "kv_heads": 1, "head_dim": 16}
_SCALED: dict[str, Any] = {"rope_factor": 4.0, "rope_context": 64}
_PATCHES: dict[str, Any] = {"image": 8, "patch": 4, "channels": 1}
SIZES: dict[str, Any] = {
    "GPT2Config": {"vocab": 8, "context": 8},
    "LlamaConfig": _LLAMA,
    "BERTConfig": {"vocab": 8, "context": 8},
    "DeBERTaConfig": {"vocab": 8, "context": 24, "distances": 8, "farthest": 8},
    "ModernBERTConfig": _LLAMA | {"window": 2},
    "ViTConfig": _PATCHES,
    "CaiTConfig": _PATCHES,
    "SwinConfig": _PATCHES
    | {"layers": (2, 2), "embed": (8, 16), "heads": (2, 4), "mlp": (16, 32), "image": 16}
    | {"patch": 2, "window": 4, "position_mlp": 4},
}
# Each family, and another choice with which some of its fields have an effect.
CHOICES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in SIZES]
CHOICES += [
    ("LlamaConfig", {"experts": 2, "active": 1, "capacity": 1.25}),
    ("LlamaConfig", {"rope_by": "yarn", **_SCALED}),
    ("LlamaConfig", {"rope_by": "llama3", **_SCALED}),
    ("LlamaConfig", {"rope_by": "longrope", "rope_short": (2.0,) * 8, "rope_long": (3.0,) * 8}),
    ("LlamaConfig", {"kinds": "n"}),
    ("LlamaConfig", {"query_norm": "all", "bias": True, "layer_norm": True, "kinds": "fs"}),
    ("BERTConfig", {"head": "states"}),
    ("BERTConfig", {"head": "classes"}),
    ("ModernBERTConfig", {"head": "classes"}),
    ("ViTConfig", {"head": "states"}),
    ("ViTConfig", {"gated": True, "distillation": "token"}),
]


def computed(config: Config) -> str:
    """Return the program of the forward pass with its parameters, and the costs that are counted."""
    shapes = jax.eval_shape(used(config).init, jax.random.key(0))
    example = config.batch_shapes(1)[0]
    if config.modality == "text" and hasattr(config, "head") and config.head != "tokens":
        example = config.task_shapes(1, config.length)[0]
    program = jax.make_jaxpr(config.module.apply)({"params": shapes}, example)
    constants = [*map(str, map(np.asarray, program.consts))]
    return f"{shapes}{program}{constants}{config.cost(config.length)}"


FAST = [(name, {}) for name in ("GPT2Config", "LlamaConfig", "BERTConfig", "ViTConfig")]


@pytest.mark.parametrize(
    ("family", "choice"),
    [pytest.param(*c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CHOICES],
    ids=lambda x: str(x)[:40],
)
def test_each_field_of_a_model(family, choice):
    base = Config.families[family](**TINY | SIZES[family] | choice)
    values = {"adapter": Adapter(size=2), "loop": Loop(0, 1), "masked": 0.5, "local_theta": 100.0}
    values |= {"kinds": "n" if choice.get("kinds") != "n" else "f", "trained_windows": (2, 2)}
    values |= {"window": 3 if family != "SwinConfig" else 2}
    values |= {"rope_factor": 2.0, "rope_low": 0.01, "rope_context": 640}
    values |= {"rope_short": (5.0,) * 8, "rope_long": (5.0,) * 8}
    # The fields that say how the model is executed, the losses of experts, which are not in the
    # forward pass, and scaled positions, which begin after more tokens than these models read.
    declared = {*base.executed_by, "balance", "z_loss"}
    declared |= set() if "rope_factor" in choice else {"rope_factor", "rope_context", "rope_long"}
    effects(base, computed, values, skip=declared)


# --- what the other settings change ---

SHALLOW, DEEP = replace(runs.MODEL, layers=1), replace(runs.MODEL, layers=4)
BERT = BERTConfig(**TINY, vocab=256, context=8)
LLAMA = LlamaConfig(**TINY, kv_heads=1, vocab=256, context=8)
MIXTURE = replace(LLAMA, experts=2, active=1)


def runs_with(**changes: Any) -> Experiment:
    values: dict[str, Any] = {"name": "tiny", "model": runs.MODEL, "steps": 20, "batch": 8}
    return Experiment(**values | {"optim": Optim(warmup=2)} | changes)


def optimized(optim: Optim) -> str:
    """Return the learning rates of some steps, and the program of the update."""
    e, given = runs_with(optim=optim), [f"optim.{f.name}" for f in dataclasses.fields(optim)]
    plan = used(e, plan=e.plan, given=given).plan
    rates = [learning_rate(optim, 20, step) for step in range(20)]
    axes = runs.MODEL.axes()
    params = jax.eval_shape(runs.MODEL.init, jax.random.key(0))
    tx = transformation(optim, axes)
    state = jax.eval_shape(tx.init, params)
    update = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p, axes=axes))(params, state, params)
    averages = shapes(plan, 1, tx)["large"].average
    return f"{rates}{update}{averages}"


def shaped(parallel: str, mesh: Mesh) -> str:
    e = used(runs_with(mesh=mesh, parallel=parallel))
    return str(mesh.over(jax.devices(), e.parallel))


def read(data: Any, model: Config = VIT) -> str:
    """Return samples of the data for training and validation."""
    train, sets = used(runs_with(data=data, model=model)).data.sources(model)
    valid = next(iter(sets.values()))
    samples = [train.sample(i, np.random.default_rng(i)) for i in range(min(40, len(train)))]
    return f"{len(train)}{len(valid)}{samples}"


def planned(method: Any) -> str:
    experiment = runs_with(method=method)
    return str(used(experiment, plan=experiment.plan).plan)


def probabilities(drop: LayerDrop) -> str:
    return str([schedule(used(drop), 4, t, 40, jnp.arange(4.0)) for t in range(1, 40, 3)])


@cache
def initial_state(model: Config) -> TrainState:
    tx, params = transformation(Optim(), model.axes()), model.init(jax.random.key(0))
    return TrainState(params, tx.init(params), model, jnp.arange(1.0, 1 + model.depth))


def phases_of(modifier: Modifier) -> Plan:
    method, optim = Scratch(modifiers=(modifier,)), Optim(warmup=0)
    experiment = runs_with(model=DEEP, steps=12, method=method, optim=optim)
    return used(experiment, plan=experiment.plan).plan


def plans_of(modifier: Modifier) -> str:
    """Return the phases of a training, and the inputs and costs of its steps."""
    out = []
    for phase in phases_of(modifier):
        out.append(replace(phase, modifiers=()) if isinstance(phase, Train) else phase)
        if isinstance(phase, Train):
            at = step_plans(phase, initial_state(DEEP), PhaseStart({}, 0, 8, 2, 0))
            steps = range(phase.begin, phase.end)
            out += [phase.flops(64), *(str(at(step, step)) for step in steps)]
    return str(out)


def programs_of(modifier: Modifier) -> str:
    """Return the program of the last step of a training."""
    phase, state = phases_of(modifier)[-1], initial_state(DEEP)
    assert isinstance(phase, Train)
    plan = step_plans(phase, state, PhaseStart({}, 0, 8, 2, 0))(11, 11)
    step = train_step(transformation(Optim(), DEEP.axes()), 2, (modifier.program(),))
    batch = next_tokens(np.zeros((8, phase.length + 1), np.int32))
    return str(jax.make_jaxpr(step)(state, batch, plan.inputs))


def tuned(method: FineTune) -> str:
    return str(used(method).plan(replace(runs.MODEL, adapter=method.adapter), Optim(), 8))


def merged(lora: LoRA) -> str:
    params, axes = initial_state(DEEP).params, DEEP.axes()
    adapter = init_lora(lora, axes, DEEP.sizes(), jax.random.key(0))
    return str(jax.make_jaxpr(lambda p, a: merge_lora(p, a, lora))(params, adapter))


# Other values of the fields, by name.
OF_IMAGES = {"size": 12, "channels": 3, "mean": (0.1,), "augment": Augment(flip=True)}
OF_AUGMENT = {"crop": "pad", "erasing": 1.0, "mixup": 1.0, "cutmix": 1.0, "smoothing": 0.1}
OF_METHODS = {"down": (TrainStage(0.1),), "up": (TrainStage(0.1), TrainStage(0.2))}
OF_METHODS |= {"source": TrainStage(0.25), "stage": TrainStage(0.5)}
OF_METHODS |= {"groupings": (Grouping(layers=None),), "small": replace(SHALLOW, mlp=8)}
OF_METHODS |= {"to": (GrowTo(by=("interleave",)),), "moments_down": "copy", "moments_up": "copy"}
OF_STAGES = {"schedule": "linear", "warmup": 3, "floor": 0.5, "lr": 2.0}
OF_GROWTHS = {"by": ("interleave",), "noise": 5.0, "moments": "copy", "fresh": True, "redrawn": 0.5}
OF_GROWTHS |= {"stages": (TrainStage(0.25),)}
OF_MAPS = {"ligo": LiGO(noise=0.1), "warmup": 3, "steps": 7}
OF_MODIFIERS = {"steps": 5, "parts": 4, "drop": TokenDrop(0.5), "freeze": Freeze((0, 1))}
OF_DROPS = {"sensitivity": Sensitivity(beta=0.5), "recovery": 0.25, "programs": 3}
OF_DROPS |= {"variance": Variance(0.4, 3.0)}
OF_SENSITIVITIES = {"after": 0.5, "every": 0.1, "share": 1.0, "block": (1,), "allow": (3,)}
OF_TUNINGS = {"source": "y", "length": 4, "dropout": 0.5, "drop": LayerDrop(), "best": Best()}
OF_TUNINGS |= {"freeze": Freeze((0,)), "lora": LoRA(4), "adapter": Adapter(2), "saved": "y.npz"}
METHODS = [
    *(Scratch(), Continue("folder"), VCycle(), replace(VCycle(), groupings=(Pruning(1),))),
    *(Growing(SHALLOW), Growing(SHALLOW, to=(GrowTo(by=Learned()),)), Inherit(runs.SMALL)),
]
# The step, not the probabilities, treats kept and dropped layers.
IN_STEPS = {"keep", "scale", "execution", "programs", "dropped", "variance"}
# Settings, what shows the effect of their fields, other values, and fields that are not changed.
SETTINGS = [
    *((Optim(name=name, schedule=schedule, warmup=2), optimized, {"base": replace(runs.MODEL, embed=4, heads=1)}, ())
      for name, schedule in (("adamw", "cosine"), ("adamw", "wsd"), ("muon", "cosine"), ("sgd", "cosine"))),
    # The order of the devices of several hosts depends on `replica`.
    *((Mesh(), partial(shaped, parallel), {}, {"replica"}) for parallel in ("mesh", "pmap")),
    # The standard deviation goes with the mean; processes and the cache only execute.
    (Images(), read, OF_IMAGES, {"cache", "workers", "std"}),
    *((Augment(randaugment=n), lambda x: read(Images(augment=x)), OF_AUGMENT, ()) for n in (0, 2)),
    *((method, planned, OF_METHODS, {"modifiers"}) for method in METHODS),
    (Grouping(), lambda g: planned(VCycle(groupings=(g,))), {"layers": None, "heads": None, "mlp": "far"}, ()),
    *((stage, lambda s: planned(Growing(SHALLOW, s)), OF_STAGES, {"modifiers"})
      for stage in (TrainStage(0.5, warmup=1), TrainStage(0.0))),
    *((grown, lambda g: planned(Growing(SHALLOW, to=(g,))), OF_GROWTHS, {"config"})
      for grown in (GrowTo(), GrowTo(by=("average",)), GrowTo(by=Learned()))),
    *((learned, lambda x: planned(Growing(SHALLOW, to=(GrowTo(by=x),))), OF_MAPS, ())
      for learned in (Learned(), Learned(steps=0))),
    *((LayerDrop(time=time, sensitivity=by), probabilities, {"sensitivity": Sensitivity(beta=0.5), "recovery": 0.25},
       IN_STEPS) for time in ("pld", "constant", "linear") for by in (None, Sensitivity())),
    (Adapter(size=2), lambda x: computed(replace(runs.MODEL, adapter=x)), {"at": ("mlp",)}, ()),
    (Loop(0, 1, 2), lambda x: computed(replace(DEEP, loop=x)), {"last": 2, "times": 3}, ()),
    *((method, tuned, OF_TUNINGS, ()) for method in (FineTune("x"), FineTune("x", lora=LoRA()))),
    (Best(evaluations=2), lambda b: tuned(FineTune("x", best=b)), {"by": "val_loss", "patience": 3}, ()),
    (LoRA(), merged, {"targets": ("*/attention/query",)}, ()),
]  # fmt: skip
# A modifier, or a part of one; the modifier that has it, and other values of its fields.
MODIFIED = [
    (Rewarm(steps=3), lambda m: m, OF_MODIFIERS),
    (Ramp((2, 4, 6, 8)), lambda m: m, OF_MODIFIERS | {"steps": (1, 1, 1, 1)}),
    (ShortContext(2), lambda m: m, OF_MODIFIERS),
    (DropTokens(TokenDrop(0.25)), lambda m: m, OF_MODIFIERS),
    (FreezeParts(Freeze((0,))), lambda m: m, OF_MODIFIERS),
    (DropUnits(0.5), lambda m: m, OF_MODIFIERS),
    (DropLayers(LayerDrop()), lambda m: m, {"drop": LayerDrop(theta=0.25)}),
    (LayerDrop(), DropLayers, OF_DROPS),
    (LayerDrop(sensitivity=Sensitivity(after=0.2, every=0.3)), DropLayers, OF_DROPS),
    (LayerDrop(execution="gather", programs=2), DropLayers, OF_DROPS),
    (LayerDrop(time="variance", variance=Variance(0.5, 2.0)), DropLayers, OF_DROPS),
    (Sensitivity(after=0.2, every=0.3, share=0.5), lambda s: DropLayers(LayerDrop(sensitivity=s)), OF_SENSITIVITIES),
    (Variance(0.5, 2.0), lambda v: DropLayers(LayerDrop(time="variance", variance=v)), {}),
    (TokenDrop(0.25), DropTokens, {"rate": 0.5, "first": 2, "last": 2}),
    (Freeze((0,)), FreezeParts, {"layers": (0, 1), "paths": ("head*",)}),
]  # fmt: skip


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: type(row[0]).__name__)
def test_each_field(row):
    effects(*row)


@pytest.mark.parametrize("row", MODIFIED, ids=lambda row: type(row[0]).__name__)
def test_each_field_of_what_modifies_the_steps(row):
    part, modifier, values = row
    plans, programs = (partial(lambda f, x: f(modifier(x)), f) for f in (plans_of, programs_of))
    effects(part, plans, values, otherwise=programs)


def test_each_field_of_a_text_corpus(tmp_path):
    corpus, other_texts, valid = (str(runs.corpus(tmp_path / x, files=n)) for x, n in TEXTS.items())
    values = {"source": "tfds", "path": other_texts, "valid_path": valid, "bos": True}
    base = Data("text", corpus, valid_fraction=0.25, cache=str(tmp_path / "cache"))
    # The cache stores the result. Only JSON has fields, and only names such as valid.txt are split.
    skip = {"cache", "field", "splits"}
    effects(base, lambda data: read(data, runs.MODEL), values, skip=skip)
    stdlib = Data(cache=str(tmp_path / "cache"))
    for name in ("path", "valid_path", "splits", "name", "field", "ids", "whole_words"):
        with pytest.raises(ValueError, match="has no effect"):
            refuse_unused(runs_with(data=replace(stdlib, **{name: other(stdlib, name)})))


def test_each_field_of_a_table_of_labelled_text(tmp_path):
    rows = [f"{c},{c}{c},{'xy'[i % 2]},{'zw'[i // 2 % 2]}" for i, c in enumerate("abcdefgh" * 3)]
    for name in ("one", "two"):
        rows = rows[1:]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,more,label,other", *rows, ""]))
    base = Labelled("table", str(tmp_path / "one.csv"), length=8)
    values = {"path": str(tmp_path / "two.csv"), "valid_path": str(tmp_path / "two.csv")}
    values |= {"length": 4, "text": ("more",), "label": "other"}
    values |= {"labels": ("y", "x"), "examples": 3}
    # A tokenizer that is no file is an error, and the padding is that of the batches.
    model = replace(BERT, head="classes")
    effects(base, lambda data: read(data, model), values, skip={"tokenizer"})


def test_the_fields_of_tables_are_refused_for_other_tasks():
    glue, squad, table = (Labelled(name, "x") for name in ("cola", "squad1", "table"))
    values = {"stride": 64, "text": ("a",), "label": "b", "labels": ("a", "b"), "number": True}
    values |= {"valid_path": "y", "valid_fraction": 0.2}
    for name, value in values.items():
        own = squad if name == "stride" else table
        assert unused(replace(glue, **{name: value})), name
        assert not unused(replace(own, **{name: value})), name


# --- the experiment, and the check at load ---


def test_each_field_of_an_experiment_is_in_the_plan_or_only_executed(tmp_path):
    base = runs.experiment(tmp_path)
    names = [f.name for f in dataclasses.fields(base)]
    objective = {"name", "model", "steps", "epochs", "seconds", "batch", "ramp"}
    objective |= {"data", "optim", "method", "seed"}
    found = {name for name in names if class_of(name, experiment_json(base)) == "objective"}
    assert found == objective
    assert base.plan != replace(base, ramp=(0.5,)).plan


def test_stages_that_replace_a_setting_of_the_optimizer():
    own = TrainStage(0.5, warmup=0, floor=1.0, schedule="linear")
    method = Growing(runs.SMALL, own, (GrowTo((own,), by=("hypercloning",)),))
    for change in ({"warmup": 3}, {"floor": 0.5}, {"schedule": "wsd"}):
        experiment = runs_with(method=method, optim=Optim(**{"warmup": 100} | change))
        given = {f"optim.{name}" for name in change}
        assert unused(experiment, plan=experiment.plan, given=given), change
        assert not unused(experiment, plan=experiment.plan), "as in a config that replaces a method"
        partly = replace(method, source=TrainStage(0.5))
        experiment = replace(experiment, method=partly)
        assert not unused(experiment, plan=experiment.plan, given=given), change


COPIES, TABLE = GrowTo(by=("expert_copies",), utility=2), Labelled("table", "x", source="tfds")
# A setting that nothing uses (None: a row of the next test), and another choice that uses it.
USED_WITH = [
    (replace(COPIES, by=("upcycle",)), COPIES),
    (Pruning(1, kept=(0,), by=other(Pruning(1), "by")), Pruning(1, by=other(Pruning(1), "by"))),
    (Pruning(1, kept=(0,), batches=3), Pruning(1, batches=3)),
    (LiGO("normalised", "gaussian", noise=0.1), LiGO("normalised", "selection", noise=0.1)),
    (LayerDrop(programs=8), LayerDrop(execution="gather", programs=8)),
    (TABLE, replace(TABLE, task="cola")),
    (runs_with(mesh=Mesh(replica=2), parallel="pmap"), runs_with(mesh=Mesh(replica=2))),
    (runs_with(mesh=Mesh(expert=2), model=LLAMA), runs_with(mesh=Mesh(expert=2), model=MIXTURE)),
    (runs_with(data=Images("idx", "x", valid_fraction=0.2), model=VIT), None),
    (runs_with(most_skipped=3), runs_with(most_skipped=3, on_nan="skip")),
    # Masking is the default of a BERT, and 100 steps are the default of learned maps.
    (None, runs_with(model=BERT, data=Data(whole_words=True))),
    (None, Learned(lr=0.5)),
    (None, Inherit(runs.SMALL, temperature=3.0)),
]


@pytest.mark.parametrize(("ignored", "right"), USED_WITH)
def test_a_setting_is_refused_unless_another_choice_uses_it(ignored, right):
    assert (ignored is None or unused(ignored)) and (right is None or not unused(right))


@pytest.mark.parametrize(("overrides", "says"), [
    (
        ["data.path=there"],
        "data.path='there' has no effect with data.source='stdlib': set data.source to 'text', 'tokens' or 'tfds', "
        "or leave out data.path",
    ),
    (["optim.muon_rms=1"], "set optim.name to 'muon'"),
    (["optim.cautious_decay=true", "optim.weight_decay=0"], "set optim.weight_decay, or leave"),
    (["optim.decay=0.5"], "set optim.schedule to 'wsd'"),
    (["mesh.gradients=step"], "with mesh.fsdp=1: set mesh.fsdp, or leave out"),
    (["mesh.expert=4"], "with model.experts=None: leave out mesh.expert"),  # a GPT-2 has none
    (["data.whole_words=true"], "with model.masked=0.0: leave out data.whole_words"),
    (["most_skipped=3"], "with on_nan='stop': set on_nan to 'skip'"),
    (["method.drop.gamma=3", "method.drop.time=linear"], "set method.drop.time to 'pld'"),
])  # fmt: skip
def test_a_setting_that_nothing_uses_is_an_error(tmp_path, overrides, says):
    config = runs.script(tmp_path, runs.experiment(tmp_path, data=Data()))
    with pytest.raises(UserError) as found:
        load_experiment(config, overrides)
    assert says in str(found.value) and str(found.value).startswith(f"config {config}: ")


def settings_classes(hint: object) -> Iterator[type]:
    """Yield the dataclasses that a value of the type may contain, with all registered ones."""
    inside = [*get_args(hint)]
    if isinstance(hint, type) and hint.__module__.startswith(("jaxgrow.", "train.")):
        inside += hint.__subclasses__()
        if dataclasses.is_dataclass(hint):
            yield hint
            inside += field_types(hint).values()
    for part in inside:
        yield from settings_classes(part)


# Classes whose fields the tests above change; every other class is a base of these.
CHANGED_ABOVE = {type(part) for part, *_ in (*SETTINGS, *MODIFIED)}
CHANGED_ABOVE |= {*map(Config.families.get, SIZES)}
CHANGED_ABOVE |= {Data, LiGO, Pruning, Labelled, Experiment}


def test_no_class_of_settings_is_left_out():
    for registry in (METHODS_BY_NAME, MODIFIERS, DATASETS):
        assert all(registry[name] for name in registry)  # imports the extras
    found = {kind for kind in settings_classes(Experiment) if not kind.__subclasses__()}
    # A modifier without a key is no setting: a method makes it.
    found -= {x for x in found if issubclass(x, Modifier) and x not in {*MODIFIERS.values()}}
    assert sorted(kind.__name__ for kind in found - CHANGED_ABOVE) == []


def test_each_condition_names_fields_that_exist():
    """A condition with a field that was renamed is always met, so the setting is never refused."""
    for kind in CHANGED_ABOVE:
        fields = {f.name for f in dataclasses.fields(kind)}
        for field, alternatives in declared_conditions(kind).items():
            needs = {name for each in alternatives for name in each if name[0] != "/"}
            assert {field, *needs} <= fields, (kind, field)
