"""Runs of real trainers grow in the middle of training and continue.

Each trainer needs a separate environment, such as ``pip install -e '.[maxtext-test]'``. Each
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
import pytest
import trainers
from trainers import SMALL

from jaxgrow.cli.program import main

WIDE = "--method hypercloning --embed 32 --heads 8 --kv-heads 4 --mlp 64".split()  # noqa: SIM905
DEEP = ("--method", "llama_pro", "--layers", "4")


def grown(source: Path, target: Path, *arguments: str, names: Path | None = None) -> dict:
    """Grow a checkpoint with the command and return its record."""
    more = ["--names", str(names)] if names else []
    assert main(["grow", str(source), str(target), *arguments, *more]) == 0
    return json.loads((target / "jaxgrow.json").read_text())


def forgotten(source: Path, leaf: str, file: Path, capsys, options=(), **more: str) -> Path:
    """Write the names of a checkpoint with one ``.in`` removed, as a control."""
    capsys.readouterr()
    assert main(["inspect", str(source), "--json", *options]) == 0
    about = json.loads(capsys.readouterr().out)
    names = {
        at["path"]: [n for n in at["axes"] if at["arrays"] == 1 or n != "layers"]
        for at in about["leaves"]
    }
    assert ".in" in " ".join(names[leaf])
    names[leaf] = [n.replace(".in", "") for n in names[leaf]]
    layouts = {at["path"]: at["layout"] for at in about["leaves"] if at["layout"]}
    names |= {path: {"names": names[path], **layout} for path, layout in layouts.items()}
    file.write_text(json.dumps({"names": names, **more}))
    return file


# --- MaxText ---

MAXTEXT = dict(
    dataset_type="synthetic", hardware="cpu", skip_jax_distributed_system=True, checkpoint_period=3,
    async_checkpointing=False, per_device_batch_size=2, max_target_length=16, vocab_size=64, head_dim=8,
    attention="dot_product", dtype="float32", learning_rate=1e-2, warmup_steps_fraction=0.0,
    learning_rate_schedule_steps=1000, enable_goodput_recording=False, monitor_goodput=False,
)  # fmt: skip
LOSS = re.compile(r"completed step: (\d+),.*? loss: ([\d.]+)")


def base_config() -> Path:
    """The file with the default settings of the installed MaxText."""
    found = find_spec("maxtext")
    if found is None:
        pytest.skip("pip install -e '.[maxtext-test]'")
    return Path(next(iter(found.submodule_search_locations))) / "configs" / "base.yml"


def maxtext(folder: Path, name: str, steps: int, settings: dict, layout: dict) -> dict[int, float]:
    """Return the loss of each step of a MaxText run, which restores its folder's checkpoint."""
    given = MAXTEXT | settings | layout | {"run_name": name, "steps": steps}
    given["base_output_directory"] = folder
    command = [sys.executable, "-m", "maxtext.trainers.pre_train.train", str(base_config())]
    command += [f"{key}={value}" for key, value in given.items()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    losses = {int(step): float(loss) for step, loss in LOSS.findall(done.stdout + done.stderr)}
    assert done.returncode == 0 and losses, (done.stdout + done.stderr)[-4000:]
    return losses


def settings_of(module: str) -> dict:
    """The settings that choose the Linen or the NNX model of MaxText.

    MaxText 0.2.4 has both; later versions have only the NNX model, without these settings.
    """
    keys = ("enable_nnx", "pure_nnx_decoder", "pure_nnx")
    if all(f"\n{key}:" in base_config().read_text() for key in keys):
        return dict.fromkeys(keys, module == "nnx")
    if module == "linen":
        pytest.skip("pip install 'maxtext==0.2.4'")
    return {}


@pytest.mark.third_party
@pytest.mark.parametrize("module", ["nnx", "linen"])
@pytest.mark.parametrize("layout", [
    {"param_scan_axis": 1}, {"param_scan_axis": 0}, {"scan_layers": False},
], ids=["axis 1", "axis 0", "unscanned"])  # fmt: skip
def test_a_run_of_maxtext_continues_after_growth(tmp_path, layout, module, capsys):
    """Six steps alone; three steps, growth in width and depth, three steps of the larger model."""
    small = {"base_emb_dim": 16, "base_num_query_heads": 4, "base_num_kv_heads": 2}
    small |= {"base_mlp_dim": 32, "base_num_decoder_layers": 2}
    layout = {**layout, **settings_of(module)}
    alone = maxtext(tmp_path, "small", 7, small, layout)
    step = "checkpoints/3"
    wide = grown(tmp_path / "small" / step, tmp_path / "wide3" / step, *WIDE)
    deep = grown(tmp_path / "wide3" / step, tmp_path / "deep" / step, *DEEP)
    assert wide["settings"]["base_emb_dim"] == 32
    assert deep["settings"]["base_num_decoder_layers"] == 4
    losses = maxtext(tmp_path, "deep", 7, deep["settings"], layout)
    first = min(losses)
    assert first == 4  # the step after the restored one
    assert losses[first] == pytest.approx(alone[first], abs=2e-3)  # the function is preserved
    assert losses[max(losses)] < losses[first]

    scanned = "decoder/layers/" if layout.get("scan_layers", True) else "decoder/layers_{}/"
    more = {"layers": "decoder/layers_{}", "params": "decoder/decoder_norm/scale"}
    leaf = f"{scanned}mlp/wo/kernel"
    names = forgotten(tmp_path / "small" / step, leaf, tmp_path / "names.json", capsys, **more)
    grown(tmp_path / "small" / step, tmp_path / "wrong" / step, *WIDE, names=names)
    wrong = maxtext(tmp_path, "wrong", 5, wide["settings"], layout)
    print(f"alone {alone}\ngrown {losses}\ncontrol {wrong}")
    assert abs(wrong[first] - alone[first]) > 2e-2


# --- trainers and libraries whose train steps are short: `trainers` ---

# The trainer, a kernel or norm whose ``.in`` the control removes, the path of its layers, and the
# path of one parameter.
RUNS = {
    "tunix": ("final_norm/w", "layers/{}", "final_norm/w"),
    "levanter": ("transformer/layers/stacked/mlp/down_proj/weight", "", "transformer/norm/weight"),
    "gemma": ("final_norm/scale", "layer_{}", "final_norm/scale"),
    "nanodo": ("blocks_{}/Mlp_0/Dense_1/kernel", "blocks_{}", "out_ln/scale"),
    "bonsai": ("layers/{}/mlp/down_proj/kernel", "layers/{}", "final_norm/scale"),
    "penzai": ("lm_head.weights", "block_{}", "final_norm/scale.weights"),
    "easydel": ("lm_head/kernel", "model/layers/{}", "model/norm/kernel"),
}
# Without GQA.
FULL = {"nanodo"}
# Whose checkpoints store heads and `head_dim` as one axis, and have a fixed number of layers.
FLAT = {"easydel"}


@pytest.fixture
def their_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("their_ranks")
@pytest.mark.third_party
@pytest.mark.parametrize("name", RUNS)
def test_a_run_continues_after_growth(name, tmp_path, capsys):
    """Six steps alone; three steps, growth in width and depth, three steps of the larger model."""
    train, (leaf, layers, one) = getattr(trainers, name), RUNS[name]
    keys = 4 if name in FULL else 2
    small = {**SMALL, "kv_heads": keys}
    wide = {**small, "embed": 32, "heads": 8, "kv_heads": 2 * keys, "mlp": 64}
    options = ["--head-dim", str(small["head_dim"])] if name in FLAT else []
    given = [*WIDE, *options]
    if name in FULL:
        at = given.index("--kv-heads")
        del given[at : at + 2]
    alone = train(tmp_path / "small", small, 6)

    def steps(run: str) -> Path:
        return tmp_path / run / trainers.STEPS.get(name, "")

    grown(steps("small"), steps("wide"), *given)
    run, large = "wide", wide
    if name not in FLAT:
        grown(steps("wide"), steps("large"), *DEEP)
        run, large = "large", {**wide, "layers": 4}
    losses = train(tmp_path / run, large, 3, begin=3)
    assert losses[0] == pytest.approx(alone[3], abs=1e-4)  # the function is preserved
    assert losses[-1] < losses[0]

    more = {"layers": layers, "params": one}
    names = forgotten(steps("small"), leaf, tmp_path / "names.json", capsys, options, **more)
    grown(steps("small"), steps("wrong"), *given, names=names)
    wrong = train(tmp_path / "wrong", wide, 1, begin=3)
    print(f"{name}: alone {alone}\ngrown {losses}\ncontrol {wrong}")
    assert abs(wrong[0] - alone[3]) > 5e-3
