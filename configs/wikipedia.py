"""Does growing save FLOPs on English Wikipedia? A byte-level GPT and a byte-level BERT.

    python -m train.compare configs/wikipedia.py:scratch configs/wikipedia.py:vcycle \\
        configs/wikipedia.py:vcycle_paper --seeds 0,1 --frontier 0.4,0.6,0.8 --workdir runs/wiki
    python -m train.compare configs/wikipedia.py:bert_scratch configs/wikipedia.py:bert_vcycle \\
        --seeds 0,1 --frontier 0.7 --workdir runs/wiki_bert

Expected result: `scratch` ends at losses of 1.8295 and 1.8184, and `vcycle` at 1.8353 and 1.8580
with 0.762 of the FLOPs (two seeds, `docs/results/finetuned.md`). We claim no saving for these
models, because their learning rates were not swept at their size (`docs/results/demo.md`).

The GPT has 0.2 million parameters and 20 tokens per parameter. The BERT has 2.2 million parameters
and 2.3 tokens per parameter.

`wikipedia/train.txt.xz` and `valid.txt.xz` hold plain text of articles. Any other text works as
well: add `--set data.path=FILE --set data.valid_path=FILE` to any of the commands here and in
`docs/results`.
"""

from dataclasses import replace

from configs.demo import VCYCLE_PAPER
from jaxgrow.models import BERTConfig, GPT2Config
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import TrainStage
from train.plan.recipes import deep_vcycle, deepened
from train.state.optim import Optim

DATA = Data(source="text", path="wikipedia/train.txt.xz", valid_path="wikipedia/valid.txt.xz")
FINAL = TrainStage(0.5, warmup=0, schedule="linear")
VCYCLE = deep_vcycle(TrainStage(0.4, warmup=50, floor=1.0), FINAL)


def scratch() -> Experiment:
    """Train the GPT from scratch."""
    return Experiment(
        name="wiki_scratch",
        model=GPT2Config(
            vocab=256,
            context=128,
            layers=4,
            embed=64,
            heads=4,
            head_dim=16,
            mlp=256,
            remat="projections",
        ),
        steps=2200,
        batch=16,
        data=DATA,
        optim=Optim(peak_lr=1e-2, schedule="wsd", decay=0.5, warmup=100),
        eval_every=100,
        eval_batches=64,
        log_every=20,
        checkpoint_every=1000,
    )


def muon() -> Experiment:
    """Train the GPT from scratch with Muon."""
    return replace(scratch(), name="wiki_muon", optim=replace(scratch().optim, name="muon"))


def muon_deepen() -> Experiment:
    """`muon` with half of the layers for half of the steps."""
    return replace(muon(), name="wiki_muon_deepen", method=deepened(muon().model, 2, 0.5, FINAL))


def vcycle() -> Experiment:
    """The V-cycle of the demo, with a last phase of half of the steps."""
    return replace(scratch(), name="wiki_vcycle", method=VCYCLE)


def cycled(experiment: Experiment) -> Experiment:
    """Train ``experiment`` by a V-cycle in depth.

    The warm-up of the small model takes 50 of 1800 steps, as in `configs/wikipedia12.py`.
    """
    small = TrainStage(0.4, warmup=experiment.steps * 50 // 1800, floor=1.0)
    return replace(experiment, name=f"{experiment.name}_vcycle", method=deep_vcycle(small, FINAL))


def vcycle_paper() -> Experiment:
    """The V-cycle of the paper.

    It halves width and depth, interpolates, and starts each stage with a fresh optimizer.
    """
    return replace(scratch(), name="wiki_vcycle_paper", method=VCYCLE_PAPER)


def bert_scratch() -> Experiment:
    """Train the BERT (4 layers, width 208) from scratch.

    At first, a BERT learns only byte frequencies, and its loss stays on a plateau. A run as short
    as this one has to leave the plateau early. A pre-LN model with windows of 32 bytes, a quarter
    of them masked, left it within 400 steps. A post-LN model with windows of 64 bytes and 15 %
    masked did not leave it within 700 steps.
    """
    return Experiment(
        name="wiki_bert_scratch",
        model=BERTConfig(
            vocab=256,
            context=32,
            types=1,
            layers=4,
            embed=208,
            heads=13,
            head_dim=16,
            mlp=832,
            norm="pre",
            masked=0.25,
            remat="projections",
        ),
        steps=2500,
        batch=64,
        data=DATA,
        optim=Optim(
            peak_lr=1e-3, schedule="wsd", decay=0.5, warmup=150, b2=0.98, weight_decay=0.01
        ),
        eval_every=125,
        eval_batches=32,
        log_every=25,
        checkpoint_every=250,
    )


def bert_vcycle() -> Experiment:
    """`vcycle` for the BERT."""
    return replace(bert_scratch(), name="wiki_bert_vcycle", method=VCYCLE)
