"""An optimizer state in a safetensors file grows with its Hugging Face model, without PyTorch."""

import jax
import numpy as np
import pytest
from checkpoints import saved, tensors
from safetensors.numpy import load_file, save_file

from jaxgrow import checkpoints
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.cli.program import main
from jaxgrow.extras.integrations import torch_optimizer
from jaxgrow.extras.models.modernbert import ModernBERTConfig


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A GPT-2 with an optimizer state; importing PyTorch fails."""
    refuse = lambda name: pytest.fail(f"imports {name}")  # noqa: E731
    monkeypatch.setattr(torch_optimizer, "import_module_of", refuse)
    folder, rng = saved(tmp_path / "a"), np.random.default_rng(0)
    content: dict[str, np.ndarray] = {"lr": np.ones(1, np.float32)}
    for name, x in tensors(folder).items():
        moment = rng.normal(size=x.shape).astype(np.float32)
        content[f"state.{name}.exp_avg"] = moment
        content[f"state.{name}.exp_avg_sq"] = np.square(moment).astype(np.float64)
        content[f"state.{name}.step"] = np.array(7.0, np.float32)
    save_file(content, folder / "optimizer.safetensors")
    return folder


def grow(source, target, words: str) -> int:
    """Run ``jaxgrow grow`` and return its status."""
    return main(["grow", str(source), str(target), *words.split()])


DEEPER = "--method llama_pro --layers 6 --optimizer"


def test_moments_grow_as_gradients_do(run, tmp_path):
    """The product of moment and parameter is the product of the grown moment and parameter."""
    wide = "--method hypercloning --embed 24 --heads 8 --mlp 40 --optimizer exact"
    assert grow(run, tmp_path / "b", wide) == 0
    old, grown = (load_file(f / "optimizer.safetensors") for f in (run, tmp_path / "b"))
    models = [load_file(f / "model.safetensors") for f in (run, tmp_path / "b")]
    assert grown.keys() == old.keys() and grown["lr"] == 1
    for name, p in models[1].items():
        first, second = grown[f"state.{name}.exp_avg"], grown[f"state.{name}.exp_avg_sq"]
        assert first.shape == p.shape and first.dtype == np.float32 and second.dtype == np.float64
        np.testing.assert_allclose(second, np.square(first), rtol=1e-5, atol=1e-9)
        expected = np.sum(old[f"state.{name}.exp_avg"] * models[0][name])
        np.testing.assert_allclose(np.sum(first * p), expected, rtol=1e-4, atol=1e-4)
        assert grown[f"state.{name}.step"] == 7


def test_new_layers_copy_the_moments(run, tmp_path):
    assert grow(run, tmp_path / "b", f"{DEEPER} copy") == 0
    grown = load_file(tmp_path / "b" / "optimizer.safetensors")
    for name, p in load_file(tmp_path / "b" / "model.safetensors").items():
        assert grown[f"state.{name}.exp_avg"].shape == p.shape
        assert grown[f"state.{name}.step"] == 7


@pytest.mark.parametrize("part", ["kernel", "bias"])
def test_a_growth_of_nothing_keeps_the_state_whatever_was_read_before(run, part):
    """A tensor of the model with several parts is kept while they are read, but not for the state."""
    model = checkpoints.open_checkpoint(run)
    assert isinstance(model, HuggingFace)
    state, _ = torch_optimizer.read_safetensors(run / "optimizer.safetensors", model)
    model.read(f"blocks/attention/query/{part}", 0)
    same = torch_optimizer.grow_state(model, model, state, {}, "copy")
    old = load_file(run / "optimizer.safetensors")
    for kind in ("exp_avg", "exp_avg_sq"):
        assert same.arrays[kind].keys() == model.tensors.keys()
        for name, x in same.arrays[kind].items():
            np.testing.assert_allclose(x, old[f"state.{name}.{kind}"], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("policy", ["copy", "exact"])
def test_a_norm_that_the_source_layer_does_not_have_starts_at_zero(tmp_path, policy):
    """The first layer of ModernBERT has no norm before its attention, but a copy of it has one."""
    config = ModernBERTConfig(
        vocab=11, context=8, layers=2, embed=12, heads=3, kv_heads=3, head_dim=4, mlp=10, kinds="f"
    )
    folder = tmp_path / "a"
    checkpoints.save(folder, config, config.init(jax.random.key(0)))
    state = {f"state.{name}.exp_avg": np.full_like(x, 2.0) for name, x in tensors(folder).items()}
    state |= {name + "_sq": x for name, x in state.items()}
    save_file(state, folder / "optimizer.safetensors")
    assert grow(folder, tmp_path / "b", f"--method stack --layers 4 --optimizer {policy}") == 0
    grown = load_file(tmp_path / "b" / "optimizer.safetensors")
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not grown[f"state.model.layers.2.attn_norm.weight.{kind}"].any()
        assert grown[f"state.model.layers.3.attn_norm.weight.{kind}"].all()


def test_new_layers_have_no_state_under_asymmetric(run, tmp_path):
    """PyTorch initialises the state of a parameter only if none of it is there."""
    assert grow(run, tmp_path / "b", f"{DEEPER} asymmetric") == 0
    old, grown = (load_file(f / "optimizer.safetensors") for f in (run, tmp_path / "b"))
    assert len(grown) == len(old)
    new = [name for name in grown if ".h.2." in name or ".h.5." in name]
    assert not new and "state.transformer.h.0.ln_1.weight.step" in grown


def test_copies_of_the_parameters_are_an_error(run, tmp_path, capsys):
    """The state `z` of schedule-free optimizers would otherwise grow like a gradient."""
    state = load_file(run / "optimizer.safetensors")
    z = {name.replace("exp_avg", "z"): x for name, x in state.items() if name.endswith(".exp_avg")}
    save_file(state | z, run / "optimizer.safetensors")
    assert grow(run, tmp_path / "b", f"{DEEPER} copy") == 1
    assert "optimizer state 'z' is a copy of the parameters" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_names_of_other_models_are_an_error(run, tmp_path, capsys):
    save_file({"state.other.exp_avg": np.ones(3, np.float32)}, run / "optimizer.safetensors")
    assert grow(run, tmp_path / "b", f"{DEEPER} copy") == 1
    assert "has no optimizer state for the parameters" in capsys.readouterr().err


def test_the_record_names_the_file_of_pytorch_that_is_written(tmp_path, monkeypatch):
    """Accelerate calls it ``optimizer.bin``, and the Trainer reads only ``optimizer.pt``."""
    empty = torch_optimizer.OptimizerState({}, {})
    monkeypatch.setattr(torch_optimizer, "read_optimizer", lambda file, model: (empty, {}))
    monkeypatch.setattr(torch_optimizer, "write_optimizer", lambda file, *rest: file.write_text(""))
    source = saved(tmp_path / "a")
    (tmp_path / "optimizer.bin").write_bytes(b"")
    words = f"{DEEPER} copy --optimizer-state {tmp_path}/optimizer.bin"
    for more in ("", " --overwrite"):
        assert grow(source, tmp_path / "b", words + more) == 0
