"""Does the saving depend on the size of the model? Byte-level GPTs of seven sizes.

    c=configs/wikipedia_sizes.py
    python -m train.compare $c:k24 $c:k24_deepen $c:k24_halves --seeds 0,1,2 --workdir runs/k24 \\
        --frontier 0.55:optim.peak_lr=8e-2,0.75:optim.peak_lr=8e-2
    python -m train.compare $c:k47 $c:k47_deepen $c:k47_halves --seeds 0,1,2 --workdir runs/k47 \\
        --frontier 0.55,0.75
    python -m train.compare $c:k163 $c:k163_halves --seeds 0,1 --workdir runs/k163 --frontier 0.75
    python -m train.compare $c:k355 $c:k355_deepen $c:k355_halves --seeds 0,1 --workdir runs/k355 \\
        --frontier 0.55,0.75
    python -m train.compare $c:m1:name=m1_low $c:m1_deepen:name=m1_low_deepen \\
        $c:m1_halves:name=m1_low_halves --seeds 0,1 --workdir runs/m1_low --frontier 0.55,0.75
    python -m train.compare $c:m1:name=m1_low $c:m1_vcycle:name=m1_low_vcycle --seeds 0,1,2 \\
        --workdir runs/m1_low --frontier 0.75
    python -m train.compare $c:m1_adamw $c:m1_adamw_deepen $c:m1_adamw_vcycle \\
        --workdir runs/m1_adamw --frontier 0.3:optim.warmup=446
    python -m train.compare $c:m1_adamw $c:m1_adamw_pld $c:m1_adamw_sbld $c:m1_adamw_uniform \\
        --workdir runs/m1_adamw --frontier 0.55,0.75
    python -m train.compare $c:m1_64 $c:m1_64_deepen $c:m1_64_vcycle --workdir runs/m1_64 --frontier 0.75
    python -m train.compare $c:m3 $c:m3_deepen $c:m3_halves $c:m3_vcycle --workdir runs/m3 \\
        --frontier 0.3:optim.warmup=248:eval_every=745,0.75

Expected result (`docs/results/muon-sizes.md` and `docs/results/muon-million.md`): half of the
layers and of each MLP first saves 22.2 % of the FLOPs at 25 thousand parameters, 25.2 % at 45,
16.0 % at 163, 17.3 % at 355 thousand and 15.2 %
at 1.4 million. Half of the layers first saves more than 16.2 % at 25 thousand parameters, 15.8 % at
45, 16.2 % at 355 thousand and 15.5 % at 1.4 million. `m1_vcycle` saves 18.4 % (three seeds). (From
163 thousand parameters on, the other rows have two seeds.) At 3 million parameters, with one seed
and larger batches, the V-cycle saves 8.5 %, half of the layers first 6.3 %, and halves about 0.4 %.
With these batches, `m1_64_deepen` saves 6.6 % at 1.4 million parameters, and `m1_64_vcycle`
2.1 % (one seed).
Under AdamW, `m1_adamw_deepen` saves more than 24.6 %, and `m1_adamw_vcycle` at most 14.8 % (one
seed). With 6 tokens per parameter and a warm-up of 446 steps, they save 20.2 % and 20.5 %; PLD,
SBLD and its control end above the run with 0.75 of the steps (`docs/results/dropping.md`; one
seed).

`configs/wikipedia12.py:muon` (94 thousand parameters) is the size between `k47` and `k163`. All
models train on English Wikipedia with 20 tokens per parameter, and the warm-up is the same fraction
of the steps at each size. The learning rates are the best of a sweep of each row and of each point
of the frontiers, with these exceptions: halves use the learning rate of half of the layers first,
the learning rates of `m1`, `m1_adamw` and `m3` were swept for training from scratch only, mostly
with 6 tokens per parameter; all other rows with the same model and optimizer use the same rates.

The heads of the two largest models have 32 and 48 dimensions instead of 8. On a CPU, this makes
their training faster by more than a third.
"""

from dataclasses import replace

from configs import wikipedia, wikipedia12
from jaxgrow.layerdrop import LayerDrop
from train.config.experiment import Experiment
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.plan.recipes import deepened, halves


def _sized(
    name: str, layers: int, embed: int, steps: int, rate: float, head_dim: int = 8
) -> Experiment:
    base = wikipedia12.muon()
    heads = embed // head_dim
    model = replace(
        base.model, layers=layers, embed=embed, heads=heads, head_dim=head_dim, mlp=4 * embed
    )
    optim = replace(base.optim, peak_lr=rate, warmup=steps * base.optim.warmup // base.steps)
    return replace(
        base, name=f"wiki_{name}", model=model, steps=steps, optim=optim, eval_every=steps // 12
    )


def _deepened(experiment: Experiment) -> Experiment:
    method = deepened(experiment.model, experiment.model.layers // 2, 0.5, wikipedia.FINAL)
    return replace(experiment, name=f"{experiment.name}_deepen", method=method)


def _halves(experiment: Experiment) -> Experiment:
    return replace(experiment, name=f"{experiment.name}_halves", method=halves(experiment.model))


def _by_adamw(experiment: Experiment) -> Experiment:
    name = experiment.name.replace("m1", "m1_adamw")
    return replace(
        experiment, name=name, optim=replace(experiment.optim, name="adamw", peak_lr=5e-3)
    )


def _dropping(name: str, drop: LayerDrop) -> Experiment:
    base = m1_adamw()
    return replace(base, name=f"{base.name}_{name}", method=Scratch((DropLayers(drop),)))


def k24() -> Experiment:
    """6 layers of width 16: 25 thousand parameters."""
    return _sized("k24", 6, 16, 480, 4e-2)


def k24_deepen() -> Experiment:
    """`k24` with 3 layers first, at twice the learning rate."""
    base = k24()
    return _deepened(replace(base, optim=replace(base.optim, peak_lr=8e-2)))


def k24_halves() -> Experiment:
    """`k24` with 3 layers and half of each MLP first, at twice the learning rate."""
    base = k24()
    return _halves(replace(base, optim=replace(base.optim, peak_lr=8e-2)))


def k47() -> Experiment:
    """12 layers of width 16: 45 thousand parameters."""
    return _sized("k47", 12, 16, 860, 4e-2)


def k47_deepen() -> Experiment:
    """`k47` with 6 layers first."""
    return _deepened(k47())


def k47_halves() -> Experiment:
    """`k47` with 6 layers and half of each MLP first."""
    return _halves(k47())


def k163() -> Experiment:
    """12 layers of width 32: 163 thousand parameters."""
    return _sized("k163", 12, 32, 3200, 1e-2)


def k163_halves() -> Experiment:
    """`k163` with 6 layers and half of each MLP first."""
    return _halves(k163())


def k355() -> Experiment:
    """12 layers of width 48: 355 thousand parameters."""
    return _sized("k355", 12, 48, 6900, 1e-2)


def k355_deepen() -> Experiment:
    """`k355` with 6 layers first."""
    return _deepened(k355())


def k355_halves() -> Experiment:
    """`k355` with 6 layers and half of each MLP first."""
    return _halves(k355())


def m1() -> Experiment:
    """12 layers of width 96 with 3 heads: 1.4 million parameters."""
    return _sized("m1", 12, 96, 26800, 2.5e-3, head_dim=32)


def m1_deepen() -> Experiment:
    """`m1` with 6 layers first."""
    return _deepened(m1())


def m1_halves() -> Experiment:
    """`m1` with 6 layers and half of each MLP first."""
    return _halves(m1())


def m1_vcycle() -> Experiment:
    """`m1` with the V-cycle of `wikipedia.cycled`."""
    return wikipedia.cycled(m1())


def m1_adamw() -> Experiment:
    """`m1` with AdamW."""
    return _by_adamw(m1())


def m1_adamw_deepen() -> Experiment:
    """`m1_deepen` with AdamW."""
    return _by_adamw(m1_deepen())


def m1_adamw_vcycle() -> Experiment:
    """`m1_vcycle` with AdamW."""
    return _by_adamw(m1_vcycle())


def m1_adamw_pld() -> Experiment:
    """`m1_adamw` with the PLD of `wikipedia12.pld`."""
    return _dropping("pld", wikipedia12.PLD)


def m1_adamw_sbld() -> Experiment:
    """`m1_adamw` with the SBLD of `wikipedia12.sbld50`."""
    return _dropping("sbld", wikipedia12.SBLD)


def m1_adamw_uniform() -> Experiment:
    """The control of `m1_adamw_sbld`, as in `wikipedia12.uniform50`."""
    return _dropping("uniform", wikipedia12.UNIFORM)


def m1_64() -> Experiment:
    """`m1` with batches of 64 and the same tokens, to separate the batch of `m3` from its size."""
    base = _sized("m1_64", 12, 96, 6700, 2.5e-3, head_dim=32)
    return replace(base, batch=64, eval_batches=16, log_every=100)


def m1_64_deepen() -> Experiment:
    """`m1_64` with 6 layers first."""
    return _deepened(m1_64())


def m1_64_vcycle() -> Experiment:
    """`m1_64` with the V-cycle of `wikipedia.cycled`."""
    return wikipedia.cycled(m1_64())


def m3() -> Experiment:
    """12 layers of width 144 with 3 heads: 3.0 million parameters, with batches of 64."""
    base = _sized("m3", 12, 144, 14900, 2.5e-3, head_dim=48)
    return replace(base, batch=64, eval_batches=16, log_every=100)


def m3_deepen() -> Experiment:
    """`m3` with 6 layers first."""
    return _deepened(m3())


def m3_halves() -> Experiment:
    """`m3` with 6 layers and half of each MLP first."""
    return _halves(m3())


def m3_vcycle() -> Experiment:
    """`m3` with the V-cycle of `wikipedia.cycled`."""
    return wikipedia.cycled(m3())
