"""The optimizer state of PyTorch runs grows with its Hugging Face model, and the run continues.

The demonstration is a small Llama that the Trainer of transformers trains before and after the
growth.
"""

from pathlib import Path

import numpy as np
import pytest

from jaxgrow import operators
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.cli.program import main
from jaxgrow.extras.integrations import torch_optimizer

torch, transformers = (
    pytest.importorskip(name, reason="pip install -e '.[interop-test]'")
    for name in ("torch", "transformers")
)
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

SIZES = dict(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
STEPS, MORE = 60, 20


class Tokens(torch.utils.data.Dataset):
    """Sequences that count upwards from a random number, so that there is something to learn."""

    def __len__(self):
        return 64 * 8

    def __getitem__(self, i):
        begin, step = np.random.default_rng(i).integers(0, 11, 2)
        ids = torch.tensor((begin + (1 + step % 3) * np.arange(12)) % 11)
        return {"input_ids": ids, "labels": ids}


def llama():
    torch.manual_seed(0)
    own = dict(max_position_embeddings=16, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **own))


def widened(source: Path, target: Path) -> list[str]:
    """Return a command that doubles every width."""
    wide = "--method hypercloning --embed 32 --heads 4 --kv-heads 2 --mlp 64"
    return f"grow {source} {target} {wide}".split()


def trainer(model, folder: Path, steps: int):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())


def loss(model) -> float:
    model.eval()
    batch = torch.utils.data.default_collate([Tokens()[1000 + i] for i in range(32)])
    with torch.no_grad():
        return float(model(**batch).loss)


def opened(folder: Path) -> HuggingFace:
    found = open_checkpoint(folder)
    assert isinstance(found, HuggingFace)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a checkpoint that the Trainer wrote."""
    folder = tmp_path_factory.mktemp("run")
    trainer(llama(), folder, STEPS).train()
    return folder / f"checkpoint-{STEPS}"


def resumed(folder: Path, where: Path) -> tuple[float, float, list[float]]:
    """Return the loss of a checkpoint, the loss 20 steps later, and the losses in between."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before, going_on = loss(model), trainer(model, where, STEPS + MORE)
    going_on.train(resume_from_checkpoint=str(folder))
    assert going_on.state.global_step == STEPS + MORE
    steps = [
        entry["loss"]
        for entry in going_on.state.log_history
        if "loss" in entry and entry["step"] > STEPS
    ]
    return before, loss(going_on.model), steps


def test_a_run_of_the_trainer_continues_after_growth(run, tmp_path):
    """Compares the loss before growth, after growth, and 20 steps later.

    The control loses its second moments.
    """
    before, straight, _ = resumed(run, tmp_path / "straight")
    assert main([*widened(run, tmp_path / "wide"), "--optimizer", "exact"]) == 0
    after, later, steps = resumed(tmp_path / "wide", tmp_path / "on")
    print(
        f"before {before:.4f}, after growth {after:.4f}, 20 steps later {later:.4f} (not grown {straight:.4f})"
    )
    assert after == pytest.approx(before, abs=1e-5)
    assert later < after and max(steps) < 2 * before

    file = tmp_path / "wide" / "optimizer.pt"
    content = torch.load(file, weights_only=True)
    for entry in content["state"].values():
        entry["exp_avg_sq"] *= (
            1e-4  # as if the moments had been scaled by the wrong power of the maps
        )
    torch.save(content, file)
    *_, wrong = resumed(tmp_path / "wide", tmp_path / "wrong")
    print(f"largest loss of a batch: {max(steps):.4f}, with wrong second moments {max(wrong):.4f}")
    assert max(wrong) > 2 * max(steps)


def gradients(model) -> dict[str, np.ndarray]:
    model.zero_grad()
    batch = torch.utils.data.default_collate([Tokens()[i] for i in range(8)])
    model(**batch).loss.backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def test_exact_moments_match_those_of_the_grown_model(run, tmp_path):
    """Gradients of the small model, grown as first moments, are the gradients of the grown model."""
    source = opened(run)
    growth = operators.hypercloning(
        source.sizes(), {"embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64}
    )
    small = {
        n: torch.tensor(g)
        for n, g in gradients(transformers.LlamaForCausalLM.from_pretrained(run)).items()
    }
    assert main(widened(run, tmp_path / "wide")) == 0
    large = gradients(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide"))
    state = torch_optimizer.OptimizerState(
        {"exp_avg": small, "exp_avg_sq": {n: g**2 for n, g in small.items()}}, {}
    )
    made = torch_optimizer.grow_state(
        source, opened(tmp_path / "wide"), state, growth, "exact"
    ).arrays
    for name, expected in large.items():
        np.testing.assert_allclose(made["exp_avg"][name], expected, atol=1e-6)
        np.testing.assert_allclose(made["exp_avg_sq"][name], expected**2, atol=1e-6)
    copied = torch_optimizer.grow_state(
        source, opened(tmp_path / "wide"), state, growth, "copy"
    ).arrays
    wrong = copied["exp_avg"]["model.embed_tokens.weight"] - large["model.embed_tokens.weight"]
    # The control: moments are not divided among the copies of a unit.
    assert np.abs(wrong).max() > 1e-3


@pytest.mark.parametrize("distributed", [False, True], ids=["optimizer.pt", "distributed"])
def test_exact_moments_of_fused_kernels_match_those_of_the_grown_model(tmp_path, distributed):
    """A GPT-2 has one tensor for queries, keys and values. PyTorch writes the files."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=16, n_embd=16, n_layer=2, n_head=2, n_inner=32,
        initializer_range=0.3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    small, where = transformers.GPT2LMHeadModel(config), tmp_path / "a"
    small.save_pretrained(where)
    optimizer = torch.optim.AdamW(small.parameters(), betas=(0.5, 0.75))
    gradients(small)
    optimizer.step()  # the weights in the folder are those before it, like the gradients
    content = optimizer.state_dict()
    if distributed:
        names = [name for name, _ in small.named_parameters()]
        entries = {
            f"optimizer.state.{names[i]}.{kind}": x
            for i, entry in content["state"].items()
            for kind, x in entry.items()
        }
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(where / "optimizer_0"), no_dist=True)
    else:
        torch.save(content, where / "optimizer.pt")
    wide = "--method hypercloning --embed 32 --heads 4 --mlp 64 --optimizer exact"
    assert main(f"grow {where} {tmp_path}/b {wide}".split()) == 0

    grown, read = opened(tmp_path / "b"), torch_optimizer.read_optimizer
    read = torch_optimizer.read_distributed if distributed else read
    state, _ = read(torch_optimizer.find_optimizer(tmp_path / "b"), grown)
    large = gradients(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "b"))
    assert large["transformer.h.0.attn.c_attn.weight"].any()
    for name, expected in large.items():
        moments = (state.arrays[kind][name] for kind in ("exp_avg", "exp_avg_sq"))
        for found, part in zip(moments, (0.5 * expected, 0.25 * expected**2), strict=True):
            np.testing.assert_allclose(found, part, rtol=1e-4, atol=1e-6, err_msg=name)


def test_new_layers_begin_without_state(run, tmp_path):
    deep = f"grow {run} {tmp_path}/deep --method llama_pro --layers 4 --optimizer asymmetric"
    assert main(deep.split()) == 0
    content = torch.load(tmp_path / "deep" / "optimizer.pt", weights_only=True)
    names = [
        n for group in torch_optimizer.parameter_groups(opened(tmp_path / "deep"), 2) for n in group
    ]
    new = {n for i, n in enumerate(names) if i not in content["state"]}
    assert {n.split(".")[2] for n in new} == {"1", "3"} and len(new) == 2 * 9
    before, later, _ = resumed(tmp_path / "deep", tmp_path / "on")
    assert later < before + 0.01


@pytest.mark.parametrize("sources", [[1, 0, 1], [1]])
def test_the_state_of_a_list_of_layers_follows_the_layers(run, tmp_path, sources):
    layers = ",".join(map(str, sources))
    command = f"grow {run} {tmp_path}/list --layers-from {layers} --optimizer copy"
    assert main(command.split()) == 0
    old, new = (
        torch_optimizer.read_optimizer(folder / "optimizer.pt", opened(folder))[0].arrays
        for folder in (run, tmp_path / "list")
    )
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, x in new[kind].items():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(sources[int(parts[2])])
            torch.testing.assert_close(x, old[kind][".".join(parts)], rtol=0, atol=0)
    before, later, _ = resumed(tmp_path / "list", tmp_path / "on")
    assert later < before


def test_what_does_not_fit_is_refused(run, tmp_path, capsys):
    assert main([*widened(run, tmp_path / "wide"), "--optimizer", "asymmetric"]) == 1
    assert (
        "PyTorch counts steps per tensor" in capsys.readouterr().err
        and not (tmp_path / "wide").exists()
    )
    source = opened(run)
    state = torch_optimizer.OptimizerState({"exp_avg": {"lm_head.weight": torch.ones(3, 3)}}, {})
    with pytest.raises(CheckpointError, match=r"lm_head.weight: \(3, 3\), not \(11, 16\)"):
        torch_optimizer.grow_state(source, source, state, {}, "copy")
    odd = torch_optimizer.OptimizerState({"momentum": {}}, {})
    with pytest.raises(CheckpointError, match="'exact' supports only exp_avg"):
        torch_optimizer.grow_state(source, source, odd, {}, "exact")


def test_states_of_experts_that_transformers_fuses_are_refused(tmp_path, capsys):
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(11)[None], labels=torch.arange(11)[None]).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "a")
    torch.save(optimizer.state_dict(), tmp_path / "a" / "optimizer.pt")
    grow = widened(tmp_path / "a", tmp_path / "b")
    assert main([*grow, "--optimizer", "exact"]) == 1
    told = capsys.readouterr().err
    assert "one array for all experts of a layer" in told and "experts.gate_up_proj" in told
    assert not (tmp_path / "b").exists()
    assert main(grow) == 0


def test_a_distributed_folder_is_the_same_state(run, tmp_path):
    """The layout of FSDP: its grown arrays equal the grown arrays of optimizer.pt."""
    import torch.distributed.checkpoint as dcp

    source = opened(run)
    state, _ = torch_optimizer.read_optimizer(run / "optimizer.pt", source)
    entries = {
        f"optimizer.state.{n}.{kind}": x for kind, of in state.arrays.items() for n, x in of.items()
    }
    entries |= {f"optimizer.state.{n}.step": of["step"] for n, of in state.scalars.items()}
    entries["optimizer.param_groups.lr"] = torch.tensor(1e-2)
    dcp.save(entries, storage_writer=dcp.FileSystemWriter(tmp_path / "optimizer_0"), no_dist=True)
    for name, more in (("one", []), ("two", ["--optimizer-state", str(tmp_path / "optimizer_0")])):
        assert main([*widened(run, tmp_path / name), "--optimizer", "exact", *more]) == 0
    one, _ = torch_optimizer.read_optimizer(
        tmp_path / "one" / "optimizer.pt", opened(tmp_path / "one")
    )
    two, every = torch_optimizer.read_distributed(
        tmp_path / "two" / "optimizer_0", opened(tmp_path / "two")
    )
    assert float(every["optimizer.param_groups.lr"]) == pytest.approx(1e-2)
    for kind, of in one.arrays.items():
        for name, x in of.items():
            torch.testing.assert_close(two.arrays[kind][name], x)
    assert two.scalars["lm_head.weight"]["step"] == one.scalars["lm_head.weight"]["step"] == STEPS
