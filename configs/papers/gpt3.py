"""Does SBLD's saving on GPT-3 hold? Medium, 1.7B and 3.6B, with PLD and SBLD. Not run here.

    c=configs/papers/gpt3.py
    python -m train.compare $c:medium $c:medium_pld $c:medium_pld70 $c:medium_pld90 \\
        $c:medium_sbld $c:medium_sbld70 $c:medium_sbld90
    python -m train.preflight $c:gpt3_1_7b $c:gpt3_1_7b_pld $c:gpt3_1_7b_sbld --on a100:4x8
    python -m train.preflight $c:gpt3_3_6b $c:gpt3_3_6b_pld $c:gpt3_3_6b_sbld --on a100:8x8

Result of the paper (Zeng et al., AAAI 2023): SBLD takes 19.67 % less time and is 1.65 % more
accurate on LAMBADA, for Medium. The preflight estimates 38 GB of the 85 GB of a device for 1.7B,
and 31 GB for 3.6B. At theta 0.5, a step that drops layers takes 0.78 and 0.77 of the time of a full
step.

These settings come from the paper: the sizes, BookCorpus, 10,000 steps, 32 and 64 A100s of 80 GB
for the two larger models, both baselines, and theta 0.5, 0.7 and 0.9 for Medium. Theta of the
larger models and gamma of PLD, here 100 / T, are not stated. The batch and the vocabulary are the
usual ones of Megatron. The learning rates, the warm-up and the other settings come from GPT-3
(Brown et al., 2020) at these sizes. SBLD itself is a reconstruction
(`jaxgrow.layerdrop.layer_sensitivity`). `configs/papers/settings.toml` has what the papers state, and
`python -m train.show` compares an experiment with it.

`bookcorpus` is a folder in which Hugging Face `datasets` saved it, or any folder with its text. The
`vocab.json` and `merges.txt` of GPT-2 must be in `tokenizer-gpt2`.
"""

from dataclasses import replace

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import GPT2Config
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.state.mesh import Mesh
from train.state.optim import Optim


def medium() -> Experiment:
    """Medium, L24-1024-16, 356 M parameters, without layer dropping."""
    model = GPT2Config(
        vocab=51_200,  # 50257 of GPT-2, padded as Megatron does for eight devices
        context=2048,
        layers=24,
        embed=1024,
        heads=16,
        head_dim=64,
        mlp=4096,
        dtype="bfloat16",
        remat="auto",
    )
    return Experiment(
        name="gpt3_medium",
        model=model,
        steps=10_000,
        batch=512,
        accumulate=4,
        data=Data(source="text", path="bookcorpus", tokenizer="tokenizer-gpt2"),
        # The warm-up has 375 M tokens.
        optim=Optim(peak_lr=3e-4, schedule="cosine", warmup=360, floor=0.1),
        eval_every=500,
        eval_batches=4,
        log_every=50,
        checkpoint_every=500,
    )


def medium_pld() -> Experiment:
    """`medium` with PLD, theta 0.5."""
    return _dropping(medium(), "pld", LayerDrop(theta=0.5))


def medium_sbld() -> Experiment:
    """`medium` with SBLD, theta 0.5."""
    return _dropping(medium(), "sbld", LayerDrop(theta=0.5, sensitivity=Sensitivity()))


def medium_pld70() -> Experiment:
    """`medium` with PLD, theta 0.7."""
    return _dropping(medium(), "pld70", LayerDrop(theta=0.7))


def medium_pld90() -> Experiment:
    """`medium` with PLD, theta 0.9."""
    return _dropping(medium(), "pld90", LayerDrop(theta=0.9))


def medium_sbld70() -> Experiment:
    """`medium` with SBLD, theta 0.7."""
    return _dropping(medium(), "sbld70", LayerDrop(theta=0.7, sensitivity=Sensitivity()))


def medium_sbld90() -> Experiment:
    """`medium` with SBLD, theta 0.9."""
    return _dropping(medium(), "sbld90", LayerDrop(theta=0.9, sensitivity=Sensitivity()))


def gpt3_1_7b() -> Experiment:
    """1.7B, L24-2304-24, sharded over 32 devices."""
    model = replace(medium().model, embed=2304, heads=24, head_dim=96, mlp=9216)
    optim = replace(medium().optim, peak_lr=2e-4)
    return replace(
        medium(), name="gpt3_1_7b", model=model, optim=optim, accumulate=1, mesh=Mesh(fsdp=32)
    )


def gpt3_1_7b_pld() -> Experiment:
    """`gpt3_1_7b` with PLD, theta 0.5."""
    return _dropping(gpt3_1_7b(), "pld", LayerDrop(theta=0.5))


def gpt3_1_7b_sbld() -> Experiment:
    """`gpt3_1_7b` with SBLD, theta 0.5."""
    return _dropping(gpt3_1_7b(), "sbld", LayerDrop(theta=0.5, sensitivity=Sensitivity()))


def gpt3_1_7b_pld70() -> Experiment:
    """`gpt3_1_7b` with PLD, theta 0.7."""
    return _dropping(gpt3_1_7b(), "pld70", LayerDrop(theta=0.7))


def gpt3_1_7b_pld90() -> Experiment:
    """`gpt3_1_7b` with PLD, theta 0.9."""
    return _dropping(gpt3_1_7b(), "pld90", LayerDrop(theta=0.9))


def gpt3_1_7b_sbld70() -> Experiment:
    """`gpt3_1_7b` with SBLD, theta 0.7."""
    return _dropping(gpt3_1_7b(), "sbld70", LayerDrop(theta=0.7, sensitivity=Sensitivity()))


def gpt3_1_7b_sbld90() -> Experiment:
    """`gpt3_1_7b` with SBLD, theta 0.9."""
    return _dropping(gpt3_1_7b(), "sbld90", LayerDrop(theta=0.9, sensitivity=Sensitivity()))


def gpt3_3_6b() -> Experiment:
    """3.6B, L30-3072-32, sharded over 64 devices."""
    model = replace(medium().model, layers=30, embed=3072, heads=32, head_dim=96, mlp=12288)
    optim = replace(medium().optim, peak_lr=1.6e-4)
    return replace(
        medium(), name="gpt3_3_6b", model=model, optim=optim, accumulate=1, mesh=Mesh(fsdp=64)
    )


def gpt3_3_6b_pld() -> Experiment:
    """`gpt3_3_6b` with PLD, theta 0.5."""
    return _dropping(gpt3_3_6b(), "pld", LayerDrop(theta=0.5))


def gpt3_3_6b_sbld() -> Experiment:
    """`gpt3_3_6b` with SBLD, theta 0.5."""
    return _dropping(gpt3_3_6b(), "sbld", LayerDrop(theta=0.5, sensitivity=Sensitivity()))


def gpt3_3_6b_pld70() -> Experiment:
    """`gpt3_3_6b` with PLD, theta 0.7."""
    return _dropping(gpt3_3_6b(), "pld70", LayerDrop(theta=0.7))


def gpt3_3_6b_pld90() -> Experiment:
    """`gpt3_3_6b` with PLD, theta 0.9."""
    return _dropping(gpt3_3_6b(), "pld90", LayerDrop(theta=0.9))


def gpt3_3_6b_sbld70() -> Experiment:
    """`gpt3_3_6b` with SBLD, theta 0.7."""
    return _dropping(gpt3_3_6b(), "sbld70", LayerDrop(theta=0.7, sensitivity=Sensitivity()))


def gpt3_3_6b_sbld90() -> Experiment:
    """`gpt3_3_6b` with SBLD, theta 0.9."""
    return _dropping(gpt3_3_6b(), "sbld90", LayerDrop(theta=0.9, sensitivity=Sensitivity()))


def _dropping(dense: Experiment, how: str, drop: LayerDrop) -> Experiment:
    return replace(dense, name=f"{dense.name}_{how}", method=Scratch((DropLayers(drop),)))
