"""The optimizer state of PyTorch runs grows with its Hugging Face model, and the run continues."""

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

SIZES = dict(vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1)
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
    about = dict(
        per_device_train_batch_size=8, learning_rate=1e-2, weight_decay=0.1, logging_steps=1
    )
    about |= dict(lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True)
    about |= dict(output_dir=str(folder), max_steps=steps, save_steps=STEPS)
    arguments = transformers.TrainingArguments(**about, dataloader_num_workers=0)
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
    log = going_on.state.log_history
    steps = [entry["loss"] for entry in log if "loss" in entry and entry["step"] > STEPS]
    return before, loss(going_on.model), steps


def test_a_run_of_the_trainer_continues_after_growth(run, tmp_path):
    """The control multiplies the second moments as the wrong power of the maps would do."""
    before = loss(transformers.AutoModelForCausalLM.from_pretrained(run))
    assert main([*widened(run, tmp_path / "wide"), "--optimizer", "exact"]) == 0
    after, later, steps = resumed(tmp_path / "wide", tmp_path / "on")
    assert after == pytest.approx(before, abs=1e-5)
    assert later < after and max(steps) < 2 * before

    file = tmp_path / "wide" / "optimizer.pt"
    content = torch.load(file, weights_only=True)
    for entry in content["state"].values():
        entry["exp_avg_sq"] *= 1e-4
    torch.save(content, file)
    *_, wrong = resumed(tmp_path / "wide", tmp_path / "wrong")
    assert max(wrong) > 2 * max(steps)


def gradients(model) -> dict[str, np.ndarray]:
    model.zero_grad()
    batch = torch.utils.data.default_collate([Tokens()[i] for i in range(8)])
    model(**batch).loss.backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def test_exact_moments_match_those_of_the_grown_model(run, tmp_path):
    """The control are copies: they are not divided among the copies of a unit."""
    source = opened(run)
    sizes = {"embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64}
    growth = operators.hypercloning(source.sizes(), sizes)
    assert main(widened(run, tmp_path / "wide")) == 0
    small, large = (
        gradients(transformers.LlamaForCausalLM.from_pretrained(folder))
        for folder in (run, tmp_path / "wide")
    )
    powers = {"exp_avg": 1, "exp_avg_sq": 2}
    arrays = {k: {n: torch.tensor(g**p) for n, g in small.items()} for k, p in powers.items()}
    state, wide = torch_optimizer.OptimizerState(arrays, {}), opened(tmp_path / "wide")
    off = {}
    for policy in ("exact", "copy"):
        made = torch_optimizer.grow_state(source, wide, state, growth, policy).arrays
        each = [made[k][n] - x**p for n, x in large.items() for k, p in powers.items()]
        off[policy] = max(np.abs(x).max() for x in each)
    assert off["exact"] < 1e-6 and off["copy"] > 1e-3


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
        names, entries = [name for name, _ in small.named_parameters()], {}
        for i, entry in content["state"].items():
            entries |= {f"optimizer.state.{names[i]}.{kind}": x for kind, x in entry.items()}
        entries["optimizer.param_groups.lr"] = torch.tensor(1e-2)
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(where / "optimizer_0"), no_dist=True)
    else:
        torch.save(content, where / "optimizer.pt")
    wide = "--method hypercloning --embed 32 --heads 4 --mlp 64 --optimizer exact"
    assert main(f"grow {where} {tmp_path}/b {wide}".split()) == 0

    grown, read = opened(tmp_path / "b"), torch_optimizer.read_optimizer
    read = torch_optimizer.read_distributed if distributed else read
    state, more = read(torch_optimizer.find_optimizer(tmp_path / "b"), grown)
    assert not distributed or float(more["optimizer.param_groups.lr"]) == pytest.approx(1e-2)
    assert {int(of["step"]) for of in state.scalars.values()} == {1}
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
    groups = torch_optimizer.parameter_groups(opened(tmp_path / "deep"), 2)
    names = enumerate(n for group in groups for n in group)
    new = {n for i, n in names if i not in content["state"]}
    assert {n.split(".")[2] for n in new} == {"1", "3"} and len(new) == 2 * 9
    before, later, _ = resumed(tmp_path / "deep", tmp_path / "on")
    assert later < before + 0.01


def test_the_state_of_a_list_of_layers_follows_the_layers(run, tmp_path):
    sources = [1, 0, 1]
    command = f"grow {run} {tmp_path}/list --layers-from 1,0,1 --optimizer copy"
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


def test_what_does_not_fit_is_refused(run, tmp_path, capsys):
    assert main([*widened(run, tmp_path / "wide"), "--optimizer", "asymmetric"]) == 1
    assert "PyTorch counts steps per tensor" in capsys.readouterr().err
    assert not (tmp_path / "wide").exists()
    source = opened(run)
    state = torch_optimizer.OptimizerState({"exp_avg": {"lm_head.weight": torch.ones(3, 3)}}, {})
    with pytest.raises(CheckpointError, match=r"lm_head.weight: \(3, 3\), not \(11, 16\)"):
        torch_optimizer.grow_state(source, source, state, {}, "copy")
    odd = torch_optimizer.OptimizerState({"momentum": {}}, {})
    with pytest.raises(CheckpointError, match="'exact' supports only exp_avg"):
        torch_optimizer.grow_state(source, source, odd, {}, "exact")
    with pytest.raises(
        ValueError, match="policy must be 'copy', 'exact' or 'asymmetric', not 'exat'"
    ):
        torch_optimizer.grow_state(source, source, odd, {}, "exat")


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
