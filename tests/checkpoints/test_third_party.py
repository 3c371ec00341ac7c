"""Runs of real trainers grow in the middle of training and continue.

Install the trainers into a separate environment with ``pip install -e '.[maxtext-test]'``. Each
test trains with the unmodified package and grows the checkpoint with the command ``jaxgrow grow``.
The package then restores its larger model and optimizer state and trains three more steps. The
control is a growth with one ``.in`` removed.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from tunix_models import llama_of_nnx

from jaxgrow.cli.program import main

SMALL = {
    "vocab": 13,
    "context": 7,
    "embed": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "mlp": 32,
    "layers": 2,
}
WIDE = (
    "--method",
    "hypercloning",
    "--embed",
    "32",
    "--heads",
    "8",
    "--kv-heads",
    "4",
    "--mlp",
    "64",
)
DEEP = ("--method", "llama_pro", "--layers", "4")


def grown(source: Path, target: Path, *arguments: str, names: Path | None = None) -> dict:
    """Grow a checkpoint with the command and return its record."""
    assert (
        main(
            [
                "grow",
                str(source),
                str(target),
                *arguments,
                *(["--names", str(names)] if names else []),
            ]
        )
        == 0
    )
    return json.loads((target / "jaxgrow.json").read_text())


def forgotten(
    source: Path, leaf: str, file: Path, capsys: pytest.CaptureFixture, **more: str
) -> Path:
    """Write the names of a checkpoint with one ``.in`` removed, as a control."""
    capsys.readouterr()
    assert main(["inspect", str(source), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    names = {
        at["path"]: [n for n in at["axes"] if at["arrays"] == 1 or n != "layers"]
        for at in about["leaves"]
    }
    assert ".in" in " ".join(names[leaf])
    names[leaf] = [n.replace(".in", "") for n in names[leaf]]
    file.write_text(json.dumps({"names": names, **more}))
    return file


# --- MaxText ---

MAXTEXT = {
    "dataset_type": "synthetic",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "checkpoint_period": 3,
    "async_checkpointing": False,
    "per_device_batch_size": 2,
    "max_target_length": 16,
    "vocab_size": 64,
    "head_dim": 8,
    "attention": "dot_product",
    "dtype": "float32",
    "learning_rate": 1e-2,
    "warmup_steps_fraction": 0.0,
    "learning_rate_schedule_steps": 1000,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
}
LOSS = re.compile(r"completed step: (\d+),.*? loss: ([\d.]+)")


def maxtext(folder: Path, name: str, steps: int, settings: dict, layout: dict) -> dict[int, float]:
    """Return the loss of each step of a MaxText run, which restores its folder's checkpoint."""
    package = Path(next(iter(find_spec("maxtext").submodule_search_locations)))
    given = {
        **MAXTEXT,
        **settings,
        **layout,
        "run_name": name,
        "base_output_directory": folder,
        "steps": steps,
    }
    command = [
        sys.executable,
        "-m",
        "maxtext.trainers.pre_train.train",
        str(package / "configs" / "base.yml"),
    ]
    command += [f"{key}={value}" for key, value in given.items()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    losses = {int(step): float(loss) for step, loss in LOSS.findall(done.stdout + done.stderr)}
    assert done.returncode == 0 and losses, (done.stdout + done.stderr)[-4000:]
    return losses


@pytest.mark.third_party
@pytest.mark.skipif(find_spec("maxtext") is None, reason="pip install 'jaxgrow[maxtext-test]'")
@pytest.mark.parametrize(
    "layout",
    [{"param_scan_axis": 1}, {"param_scan_axis": 0}, {"scan_layers": False}],
    ids=["axis 1", "axis 0", "unscanned"],
)
def test_a_run_of_maxtext_continues_after_growth(tmp_path, layout, capsys):
    """Six steps alone; three steps, growth in width and depth, three steps of the larger model."""
    small = {
        "base_emb_dim": 16,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "base_mlp_dim": 32,
        "base_num_decoder_layers": 2,
    }
    alone = maxtext(tmp_path, "small", 7, small, layout)
    steps = tmp_path / "small" / "checkpoints"
    wide = grown(steps / "3", tmp_path / "wide3" / "checkpoints" / "3", *WIDE)
    deep = grown(
        tmp_path / "wide3" / "checkpoints" / "3", tmp_path / "deep" / "checkpoints" / "3", *DEEP
    )
    assert (
        wide["settings"]["base_emb_dim"] == 32 and deep["settings"]["base_num_decoder_layers"] == 4
    )
    losses = maxtext(tmp_path, "deep", 7, deep["settings"], layout)
    first = min(losses)
    assert first == 4  # the step after the restored one
    assert losses[first] == pytest.approx(alone[first], abs=2e-3)  # the function is preserved
    assert losses[max(losses)] < losses[first]

    scanned = "decoder/layers/" if layout.get("scan_layers", True) else "decoder/layers_{}/"
    more = {"layers": "decoder/layers_{}", "params": "decoder/decoder_norm/scale"}
    names = forgotten(
        steps / "3", f"{scanned}mlp/wo/kernel", tmp_path / "names.json", capsys, **more
    )
    grown(steps / "3", tmp_path / "wrong" / "checkpoints" / "3", *WIDE, names=names)
    wrong = maxtext(tmp_path, "wrong", 5, wide["settings"], layout)
    print(f"alone {alone}\ngrown {losses}\ncontrol {wrong}")
    assert abs(wrong[first] - alone[first]) > 2e-2


# --- Tunix ---

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab"], (2, SMALL["context"]))
MASK = np.tril(np.ones((2, SMALL["context"], SMALL["context"]), bool))


def tunix(folder: Path, sizes: dict, steps: int, begin: int = 0) -> list[float]:
    """Return the loss of each step of a Llama 3 of Tunix.

    Its checkpoint manager restores step 3, or saves it.
    """
    manager = pytest.importorskip(
        "tunix.sft.checkpoint_manager", reason="pip install 'jaxgrow[third-party-test]'"
    )
    import optax
    from flax import nnx

    model = llama_of_nnx(sizes)()
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    checkpoints = manager.CheckpointManager(str(folder))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(
                TOKENS, np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape), None, MASK
            )[0]
            return optax.softmax_cross_entropy_with_integer_labels(
                logits[:, :-1], TOKENS[:, 1:]
            ).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    if begin:
        assert checkpoints.maybe_restore(model, optimizer)[0] == begin
    losses = []
    for i in range(begin, begin + steps):
        losses.append(float(step(model, optimizer)))
        if i == 2:
            checkpoints.save(3, model, optimizer, force=True)
    checkpoints.close()
    return losses


@pytest.fixture
def their_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("their_ranks")
@pytest.mark.third_party
def test_a_run_of_tunix_continues_after_growth(tmp_path, capsys):
    """Parameters and optimizer state are separate items, and layers are stored one by one."""
    large = {**SMALL, "embed": 32, "heads": 8, "kv_heads": 4, "mlp": 64, "layers": 4}
    alone = tunix(tmp_path / "small", SMALL, 6)
    grown(tmp_path / "small", tmp_path / "wide", *WIDE)
    grown(tmp_path / "wide", tmp_path / "large", *DEEP)
    losses = tunix(tmp_path / "large", large, 3, begin=3)
    assert losses[0] == pytest.approx(alone[3], abs=1e-4)  # the function is preserved
    assert losses[-1] < losses[0]
    more = {"layers": "layers/{}", "params": "final_norm/w"}
    names = forgotten(tmp_path / "small", "final_norm/w", tmp_path / "names.json", capsys, **more)
    grown(tmp_path / "small", tmp_path / "wrong", *WIDE, names=names)
    wrong = tunix(tmp_path / "wrong", {**large, "layers": SMALL["layers"]}, 1, begin=3)
    print(f"alone {alone}\ngrown {losses}\ncontrol {wrong}")
    assert abs(wrong[0] - alone[3]) > 1e-2  # the scale before the tied head was not divided
