"""Does growing save FLOPs and seconds at 10 and 20 million parameters? Byte-level GPTs on one GPU.

    python -m benchmarks.one_gpu --minutes 9    # trains the next of these experiments that has no result

Expected result (`docs/results/gpu.md`), with a learning rate of 5e-3, which is the best one of the sweep,
and seed 0 on an H200: `m10` ends at 0.9963, `m10_deepen` at 1.0057, which saves 12.7 % of the FLOPs, and
`m10_vcycle` at 1.0170, which saves nothing (-3.9 %). The other rows are not measured yet.

The corpus is English Wikipedia of 2013, long articles: 168 MB of text for training, and 1.2 MB for
validation. 20 bytes per parameter are 1.2 epochs at 10 million parameters, and 2.6 at 20 million.
The environment variable WIKIPEDIA_2013 names the folder of ``train.txt.xz`` and ``valid.txt.xz``.
Any other text works as well, but gives other losses.

All models use Muon, bfloat16, a context of 512 bytes and batches of 64 sequences. The warm-up is
the same fraction of the steps as in `configs/wikipedia_sizes.py`. The learning rate is a guess from
the smaller sizes; `benchmarks.one_gpu` sweeps it first, and trains the other runs with the best
one.
"""

import os
from dataclasses import replace

from configs import wikipedia, wikipedia12
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import GPT2Config
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.recipes import deepened

# The only setting of the corpus. The folder is private, and not part of the repository.
FOLDER = os.environ.get("WIKIPEDIA_2013", "../shared/data/wikipedia-2013")
DATA = Data(source="text", path=f"{FOLDER}/train.txt.xz", valid_path=f"{FOLDER}/valid.txt.xz")


def m10() -> Experiment:
    """12 layers of width 256 with 4 heads: 9.7 million parameters."""
    return _sized("m10", 256, 5920)


def m10_deepen() -> Experiment:
    """`m10` with 6 layers for half of the steps."""
    return _deepened(m10())


def m10_vcycle() -> Experiment:
    """`m10` with the V-cycle of `wikipedia.cycled`."""
    return wikipedia.cycled(m10())


def m10_pld() -> Experiment:
    """`m10` with the PLD of `wikipedia12.pld`. The skipped layers are left out of the scan."""
    return _dropping("pld", wikipedia12.PLD)


def m10_sbld() -> Experiment:
    """`m10` with the SBLD of `wikipedia12.sbld50`. The skipped layers are left out of the scan."""
    return _dropping("sbld", wikipedia12.SBLD)


def m10_uniform() -> Experiment:
    """The control of `m10_sbld`, as in `wikipedia12.uniform50`."""
    return _dropping("uniform", wikipedia12.UNIFORM)


def m10_ligo() -> Experiment:
    """LiGO with maps that are learned in 100 steps, from 6 layers of width 128.

    The small model trains for half of the steps, until its learning rate has decayed.
    """
    base = m10()
    small = replace(base.model, layers=6, embed=128, heads=2, mlp=512)
    method = Growing(small, TrainStage(0.5), (GrowTo((TrainStage(0.6),), by=Learned(steps=100)),))
    return replace(base, name=f"{base.name}_ligo", method=method)


def m20() -> Experiment:
    """12 layers of width 384 with 6 heads: 21.6 million parameters."""
    return _sized("m20", 384, 13180)


def m20_deepen() -> Experiment:
    """`m20` with 6 layers for half of the steps."""
    return _deepened(m20())


def m20_vcycle() -> Experiment:
    """`m20` with the V-cycle of `wikipedia.cycled`."""
    return wikipedia.cycled(m20())


def _sized(name: str, embed: int, steps: int) -> Experiment:
    like = wikipedia12.muon()
    model = GPT2Config(
        vocab=256,
        context=512,
        layers=12,
        embed=embed,
        heads=embed // 64,
        head_dim=64,
        mlp=4 * embed,
        dtype="bfloat16",
        remat="none",
    )
    warmup = steps * like.optim.warmup // like.steps
    return replace(
        like,
        name=f"gpu_{name}",
        model=model,
        steps=steps,
        batch=64,
        data=DATA,
        optim=replace(like.optim, peak_lr=2.5e-3, warmup=warmup),
        eval_every=steps // 12,
        # All complete windows of the validation text, except the last few.
        eval_batches=36,
        log_every=50,
        # Only the last step, and the steps at which shorter runs branch off, are saved.
        checkpoint_every=steps,
    )


def _deepened(experiment: Experiment) -> Experiment:
    method = deepened(experiment.model, experiment.model.layers // 2, 0.5, wikipedia.FINAL)
    return replace(experiment, name=f"{experiment.name}_deepen", method=method)


def _dropping(name: str, drop: LayerDrop) -> Experiment:
    base = m10()
    method = Scratch((DropLayers(replace(drop, execution="gather")),))
    return replace(base, name=f"{base.name}_{name}", method=method)
