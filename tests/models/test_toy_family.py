"""A new model family is a model and its Hugging Face names. Every part of the library works on it.

The first two sections of this file are the two files that an author writes. The third file is a
test row, as in ``tests/support/families.py``. No other code names the family.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from counting import products, programs
from families import assert_fits, doubled
from flax import linen as nn

from jaxgrow import checkpoints, flops, grow, models, operators, preserves_function
from jaxgrow.checkpoints.hf import families, registry
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.extras.models.generation import generate
from jaxgrow.extras.other_models.rule_checks import check_rules
from jaxgrow.layerdrop import KeepMask, LayerDrop
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models import Config, from_json
from jaxgrow.models.config import Cost, TextConfig, head_cost
from jaxgrow.models.decoder import Decoder
from jaxgrow.models.loss import last_tokens
from jaxgrow.models.model import INIT, Call, Stack
from jaxgrow.models.modules import MLP
from jaxgrow.models.norms import RMSNorm
from train import pretrain
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.state.optim import Optim

ROOT = Path(__file__).parents[2]

# --- the model: jaxgrow/models/toy.py ---


@dataclass(frozen=True)
class ToyConfig(TextConfig):
    """Config of a toy: pre-LN MLPs on the mean of the tokens so far."""

    vocab: int = 256
    context: int = 8
    causal: ClassVar = True
    # The toy has no heads, so these fields are not sizes of axes.
    no_axes: ClassVar = ("context", "heads", "head_dim")
    tied_parts: ClassVar = ("token_embedding", "final_norm")

    @property
    def module(self) -> nn.Module:
        return Toy(self)

    def cost(self, length: int) -> Cost:
        head = head_cost(self, length)
        return Cost(2 * 2 * self.embed * self.mlp, head, embedding=head if self.ties else 0)


class Block(nn.Module):
    config: ToyConfig

    @nn.compact
    def __call__(self, x_BTD, scale=None):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        h_BTD = RMSNorm("embed", c.eps, dtype, name="norm")(x_BTD)
        counts_1T1 = jnp.arange(1, x_BTD.shape[1] + 1, dtype=dtype)[None, :, None]
        h_BTD = jnp.cumsum(h_BTD, 1) / counts_1T1
        mlp = MLP(c.embed, c.mlp, INIT, INIT, dtype, bias=False, name="mlp")
        return x_BTD + rescaled(mlp(h_BTD), scale, "mlp")


class Toy(Decoder):
    config: ToyConfig

    # It has no KV cache.
    supports: ClassVar = ("targets", "each")

    def norm(self, name: str, axis: str) -> nn.Module:
        return RMSNorm(axis, self.config.eps, self.dtype, name=name)

    def embeddings(self) -> dict[str, jax.Array]:
        return {"token_embedding": self.embedding("token_embedding", "vocab", self.config.vocab)}

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        return self.stack_of(Block(self.config, parent=None))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        tokens_BT, _ = last_tokens(call.inputs)
        return jnp.take(embeddings["token_embedding"], tokens_BT, axis=0).astype(self.dtype)


# --- its Hugging Face names: jaxgrow/checkpoints/hf/families/toy.py ---


def _names(config: ToyConfig) -> dict[str, TensorLayout]:
    layer = "layers.{layers}."
    names = {
        "token_embedding": TensorLayout("embed.weight", "vocab embed"),
        "blocks/norm/scale": TensorLayout(layer + "norm.weight", "embed"),
        "final_norm/scale": TensorLayout("norm.weight", "embed"),
    }
    names |= linear_layouts("blocks/mlp/up", layer + "up", "mlp")
    names |= linear_layouts("blocks/mlp/down", layer + "down", "embed", "mlp")
    names = {leaf: stored for leaf, stored in names.items() if not leaf.endswith("bias")}
    head = {} if config.tied else {"head_kernel": TensorLayout("head.weight", "vocab embed")}
    return names | head


ToyForCausalLM = Family(
    architecture="ToyForCausalLM",
    model_type="toy",
    config=ToyConfig,
    fields={
        "vocab_size": "vocab",
        "max_position_embeddings": "context",
        "num_layers": "layers",
        "hidden_size": "embed",
        "intermediate_size": "mlp",
        "norm_eps": "eps",
        "tie_word_embeddings": "tied",
    },
    names=_names,
    fixed={"head": "tokens", "heads": 1, "head_dim": 1},
    heads="free",
)

# --- the test row ---

TOY = ToyConfig(layers=2, embed=8, mlp=12, heads=1, head_dim=1)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Register the architecture, as the registry does with the modules of its folder."""
    registry.register_families(ToyForCausalLM)
    yield
    registry.FAMILIES._added.pop(ToyForCausalLM.architecture)


@pytest.fixture(scope="module")
def params() -> dict:
    """Return parameters with random norm scales."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (x + rng.normal(size=x.shape) / 4).astype(np.float32), TOY.init(jax.random.key(0))
    )


def logits(config: Config, params: dict, **options) -> np.ndarray:
    tokens = np.arange(10).reshape(2, 5)
    run = jax.jit(lambda p: config.module.apply({"params": p}, tokens, **options))
    return np.asarray(run(params))


def test_a_family_is_found_in_its_folder():
    """Check that both packages import every module in them, and register its classes."""
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        found = vars(importlib.import_module(module.name)).values()
        configs = [c for c in found if isinstance(c, type) and issubclass(c, Config)]
        assert {c.__name__ for c in configs} <= {*Config.families, "Config"}
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        added = importlib.import_module(module.name).FAMILIES
        assert added and all(registry.FAMILIES[f.architecture] is f for f in added)


def test_no_other_file_names_a_family_or_a_config_class():
    """Check every file except those of the families themselves."""
    bases = {"TextConfig", "EncoderConfig", "PatchConfig"}
    own = {Path(inspect.getfile(c)) for n, c in Config.families.items() if n not in bases}
    # The pooler of the ViT, the exports, the rotary settings of the Llama files, and the writer of JSON.
    own |= {ROOT / "jaxgrow/extras/models" / name for name in ("rotary.py", "pooler.py")}
    own |= {ROOT / "jaxgrow/models/__init__.py", ROOT / "jaxgrow/checkpoints/hf/rope.py"}
    writes = ROOT / "train/config/experiment.py"
    wrong = []
    for file in [*ROOT.glob("jaxgrow/**/*.py"), *ROOT.glob("train/**/*.py")]:
        if file in own or "families" in file.parts:
            continue
        tree = ast.parse(file.read_text())
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        wrong += [f"{file} names {n}" for n in named & Config.families.keys() - bases]
        wrong += [
            f"{file}:{node.lineno} tests for a config class"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("isinstance", "issubclass")
            and set(re.findall(r"\w*Config\b", ast.unparse(node.args[1]))) - bases
            and file != writes
        ]
    assert not wrong, "\n".join(wrong)


def test_it_is_built_by_its_name():
    assert Config.families["ToyConfig"] is ToyConfig
    assert from_json(TOY.as_json()) == TOY
    inputs, targets = TOY.batch_shapes(3)
    assert inputs.shape == targets.shape == (3, 8)
    assert (TOY.modality, TOY.predicts, TOY.layer_kinds) == ("text", "tokens", "aa")


def test_its_axis_names_are_correct(params):
    def outputs(p):
        up = p["blocks"]["mlp"]["up"]["kernel"]
        sizes = {"embed": p["token_embedding"].shape[1], "mlp": up.shape[2]}
        return logits(TOY.with_sizes(sizes), p)

    assert check_rules(outputs, params, TOY.axes())


@pytest.mark.parametrize(("operator", "axes"), [
    (operators.hypercloning, ("embed", "mlp")), (operators.llama_pro, ("layers",)),
], ids=["wider", "deeper"])  # fmt: skip
def test_it_grows_and_keeps_its_function(operator, axes, params):
    growth = operator(TOY.sizes(), doubled(TOY, *axes))
    large = assert_fits(growth, TOY)
    grown = grow(growth, params, TOY.axes())
    np.testing.assert_allclose(logits(large, grown), logits(TOY, params), atol=2e-5)
    # A change of one parameter changes the function, so the comparison can fail.
    grown["token_embedding"] = 1.01 * grown["token_embedding"]
    assert abs(logits(large, grown) - logits(TOY, params)).max() > 1e-3
    if operator is operators.hypercloning:
        assert preserves_function(growth, TOY.axes())


def test_its_products_are_counted():
    (forward, *steps), arguments = programs(TOY)
    tokens = 2 * TOY.length
    assert flops.forward_flops(TOY, tokens) == products(jax.make_jaxpr(forward)(*arguments).jaxpr)
    for step in steps:
        assert flops.train_flops(TOY, tokens) == products(jax.make_jaxpr(step)(*arguments).jaxpr)


@pytest.mark.parametrize("layers", [np.array([False, True]), np.array([1], np.int32)])
def test_a_dropped_layer_does_not_run(layers, params):
    upper = params | {"blocks": jax.tree.map(lambda x: x[1:], params["blocks"])}
    found = logits(TOY, params, keep_mask=KeepMask(layers))
    np.testing.assert_array_equal(found, logits(replace(TOY, layers=1), upper))


def test_it_is_trained_and_exported(tmp_path):
    """Train two steps with layer dropping, and write and read a Hugging Face folder."""
    method, optim = Scratch((DropLayers(LayerDrop()),)), Optim(warmup=1)
    e = runs.experiment(tmp_path, model=TOY, method=method, steps=2, eval_every=2, optim=optim)
    result = pretrain.run_experiment(e, tmp_path / "run")
    assert result["steps"] == 2 and result["val_loss"] == pytest.approx(np.log(256), rel=0.1)
    runs.export(tmp_path / "run", tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["architectures"] == ["ToyForCausalLM"]
    config, params = checkpoints.load(tmp_path / "hf")
    assert config == TOY
    chex.assert_trees_all_equal(params, runs.load_params(tmp_path / "run"))
    growth = operators.hypercloning(TOY.sizes(), doubled(TOY, "embed", "mlp"))
    checkpoints.transform(tmp_path / "hf", tmp_path / "wide", growth)
    assert checkpoints.load(tmp_path / "wide")[0] == TOY.resized(growth)


def test_what_it_does_not_support_is_refused(tmp_path, params):
    """Check the controls: no cache, no heads, no architecture of this name twice."""
    with pytest.raises(ValueError, match="a Toy does not support past"):
        generate(TOY, params, [[1, 2]], max_new=1)
    with pytest.raises(ValueError, match="another kind of model"):
        TOY.as_mixture()
    with pytest.raises(ValueError, match="registered already"):
        registry.register_families(ToyForCausalLM)
    classes = TOY.with_head("classes", 3)
    with pytest.raises(CheckpointError, match="no architecture stores a ToyConfig"):
        checkpoints.save(tmp_path / "c", classes, classes.init(jax.random.key(0)))
