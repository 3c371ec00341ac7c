"""Does growing still save FLOPs against stronger baselines, and what do loops, heads and experts add?

Each experiment of the first part changes one setting of `wikipedia12.muon`: an average of the
weights, a ramp of the batch (with its best learning rate and more steps, for equal tokens), and
cautious weight decay. The sweeps:

    c=configs/wikipedia_baselines.py
    python -m train.sweep $c:ema --set optim.ema=0.9,0.97,0.99 --seeds 0-2 --workdir runs/baselines
    python -m train.sweep $c:ramp --set optim.peak_lr=1e-2,1.4e-2,2e-2,2.8e-2 --seeds 0-2 \\
        --workdir runs/baselines
    python -m train.sweep $c:cautious --set optim.peak_lr=1.4e-2,2e-2,2.8e-2 \\
        --set optim.weight_decay=0.1,0.2 --seeds 0-2 --workdir runs/baselines
    python -m train.sweep $c:ramp:optim.cautious_decay=true:name=muon_best \\
        --set optim.peak_lr=1e-2,1.4e-2,2e-2 --seeds 0-2 --workdir runs/baselines

The growths against the best baseline, a ramp and cautious weight decay:

    w=configs/wikipedia12.py
    d=$w:muon_deepen:method.source.steps=0.6:method.to.0.stages.0.steps=0.4:name=muon_deepen60
    python -m train.compare $w:muon $w:muon_deepen $d $w:muon_halves $w:muon_vcycle \\
        --set ramp='(0.1,0.3)' --set steps=2182 --set optim.cautious_decay=true \\
        --set optim.peak_lr=1.4e-2 --seeds 0-2 --frontier 0.55,0.75 --workdir runs/baselines_best

Expected result (`docs/results/baselines.md`): `muon_halves` saves 12.3 % ± 7.6 of the FLOPs,
`muon_deepen` 7.5 % ± 9.6, `muon_deepen60` 10.3 % ± 11.5, and `muon_vcycle` 6.4 % ± 20.1.

The second part changes the form of the model during training: `loop` and `interleave` after 0.35
or 0.5 of the steps, the head after two thirds, and the number of experts after half of the steps.
Expected result (`docs/results/forms.md`): copies after 0.35 of the steps save 12.4 % ± 6.8 of the
FLOPs, a loop needs 19.9 % ± 6.7 more than training from scratch, and `untie` ends 0.006 ± 0.005
below a tied head.

    python -m train.compare configs/wikipedia12.py:muon $c:interleave35 $c:loop35 $c:unloop35 \\
        $c:interleave50 $c:loop50 $c:unloop50 --seeds 0-2 --frontier 0.55,0.75 --workdir runs/loops
    python -m train.compare configs/wikipedia12.py:muon $c:untied $c:untie --seeds 0-2 \\
        --workdir runs/heads
    python -m train.compare $c:experts_four $c:experts_even $c:experts_utility $c:experts_eight \\
        --seeds 0-2 --workdir runs/copies

1800 steps are 20 tokens per parameter. ``--set steps=720`` and ``--set steps=4500`` are 8 and 49
tokens per parameter; give each another ``--workdir``. With `interleave` and `loop` at the same
fraction, each step runs the same number of layers.
"""

from dataclasses import replace

from configs import wikipedia12, wikipedia_experts
from configs.wikipedia import FINAL
from jaxgrow.models import Loop
from train.config.experiment import Experiment
from train.plan.methods import Growing, GrowTo, TrainStage
from train.plan.recipes import deepened

MODEL = wikipedia12.scratch().model
TIED = replace(MODEL, tied=True)
UNTIED = replace(MODEL, tied=False)
HALF = replace(MODEL, layers=6)
LOOPED = replace(HALF, loop=Loop(0, 6))  # the passes of six layers, each of which runs twice


# --- stronger baselines ---


def ema() -> Experiment:
    """`wikipedia12.muon`, with an average of the weights that reaches back about 33 steps."""
    base = wikipedia12.muon()
    return replace(base, name="muon_ema", optim=replace(base.optim, ema=0.97))


def ramp() -> Experiment:
    """Batches of 4, then 8, then 16 samples.

    The run has more steps, so that it reads the same number of tokens as `wikipedia12.muon`. It
    costs 1.3 % more FLOPs, because the matrix products of Muon do not depend on the batch.
    """
    base = replace(wikipedia12.muon(), name="muon_ramp", ramp=(0.1, 0.3))
    base = replace(base, optim=replace(base.optim, peak_lr=1.4e-2))
    return replace(base, steps=round(base.steps * base.batch / base.mean_batch))


def cautious() -> Experiment:
    """`wikipedia12.muon`, with cautious weight decay (Chen et al., 2025)."""
    base = wikipedia12.muon()
    return replace(base, name="muon_cautious", optim=replace(base.optim, cautious_decay=True))


# --- loops: 6 layers, then 12 passes or 12 layers ---


def _constant(begin: float) -> tuple[TrainStage, ...]:
    """The stage from ``begin`` until half of the steps, with a constant learning rate."""
    return (TrainStage(0.5 - begin, warmup=0, floor=1.0),) if begin < 0.5 else ()


def _interleaved(begin: float) -> Experiment:
    method = deepened(MODEL, 6, begin, *_constant(begin), FINAL)
    return replace(wikipedia12.muon(), name=f"muon_interleave{100 * begin:g}", method=method)


def _looped(begin: float) -> Experiment:
    to = GrowTo((*_constant(begin), FINAL), by=("loop",), moments="copy")
    method = Growing(HALF, TrainStage(begin, floor=1.0), (to,))
    return replace(
        wikipedia12.muon(), name=f"muon_loop{100 * begin:g}", model=LOOPED, method=method
    )


def _unlooped(begin: float) -> Experiment:
    """Loop from ``begin`` until three quarters of the steps, then give each pass its own layer.

    The learning rate falls along the same line in both stages.
    """
    falling = TrainStage(0.25, warmup=0, floor=0.5, schedule="linear")
    last = TrainStage(0.25, lr=0.5, warmup=0, schedule="linear")
    to = (
        GrowTo((*_constant(begin), falling), by=("loop",), moments="copy", config=LOOPED),
        GrowTo((last,), by=("unloop",), moments="copy"),
    )
    method = Growing(HALF, TrainStage(begin, floor=1.0), to)
    return replace(wikipedia12.muon(), name=f"muon_unloop{100 * begin:g}", method=method)


def interleave35() -> Experiment:
    """Six layers for 0.35 of the steps; then each layer is followed by its copy."""
    return _interleaved(0.35)


def interleave50() -> Experiment:
    """Six layers for half of the steps; then each layer is followed by its copy."""
    return _interleaved(0.5)


def loop35() -> Experiment:
    """Six layers, which run twice after 0.35 of the steps."""
    return _looped(0.35)


def loop50() -> Experiment:
    """Six layers, which run twice after half of the steps."""
    return _looped(0.5)


def unloop35() -> Experiment:
    """`loop35`, with own weights for each pass after three quarters of the steps."""
    return _unlooped(0.35)


def unloop50() -> Experiment:
    """`loop50`, with own weights for each pass after three quarters of the steps."""
    return _unlooped(0.5)


# --- heads ---


def untied() -> Experiment:
    """`wikipedia12.muon` with a separate head from the first step on."""
    return replace(wikipedia12.muon(), name="muon_untied", model=UNTIED)


def untie() -> Experiment:
    """A tied head for two thirds of the steps; then the head is a copy of the embedding.

    The learning rate is the same as in the baseline: it is constant for half of the steps, and then
    falls along one line.
    """
    falling = TrainStage(1 / 6, warmup=0, floor=2 / 3, schedule="linear")
    last = TrainStage(1 / 3, lr=2 / 3, warmup=0, schedule="linear")
    to = (
        GrowTo((falling,), by=(), moments="copy", config=TIED),
        GrowTo((last,), by=("untie",), moments="copy"),
    )
    method = Growing(TIED, TrainStage(0.5, floor=1.0), to)
    return replace(wikipedia12.muon(), name="muon_untie", model=UNTIED, method=method)


# --- experts ---


def experts_four() -> Experiment:
    """Four experts, of which each token uses two, with the best of four learning rates."""
    base = wikipedia_experts.dense()
    best = replace(base.optim, peak_lr=5e-3)
    return replace(base, name="experts_four", model=wikipedia_experts.FOUR, optim=best)


def experts_eight() -> Experiment:
    """The control: eight experts from the first step."""
    model = replace(wikipedia_experts.FOUR, experts=8)
    return replace(experts_four(), name="experts_eight", model=model)


def _copied(name: str, utility: int) -> Experiment:
    to = GrowTo((FINAL,), by=("expert_copies",), moments="copy", utility=utility)
    method = Growing(wikipedia_experts.FOUR, TrainStage(0.5, floor=1.0), (to,))
    return replace(experts_eight(), name=f"experts_{name}", method=method)


def experts_even() -> Experiment:
    """Four experts for half of the steps; then each of them is copied once."""
    return _copied("even", 0)


def experts_utility() -> Experiment:
    """`experts_even`, but the experts with the highest utility get the copies."""
    return _copied("utility", 8)
