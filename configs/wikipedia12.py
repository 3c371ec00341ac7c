"""Do growing and layer dropping save FLOPs if every learning rate is swept? A GPT of 12 layers.

    python -m train.compare configs/wikipedia12.py:scratch configs/wikipedia12.py:small \\
        configs/wikipedia12.py:ligo0 configs/wikipedia12.py:ligo configs/wikipedia12.py:stack \\
        configs/wikipedia12.py:aki configs/wikipedia12.py:vcycle configs/wikipedia12.py:pld \\
        configs/wikipedia12.py:sbld50 configs/wikipedia12.py:uniform50 \\
        --seeds 0,1,2 --frontier 0.55,0.75 --workdir runs/wiki12

Expected result (`docs/results/wikipedia.md`): under AdamW, `ligo0` saves more than 20.2 % of the
FLOPs, `ligo` 9.5 % ± 16.2 and `vcycle` 7.9 % ± 21.2. `stack`, `aki` and layer dropping save
nothing.

The same under Muon, which is the better baseline:

    python -m train.compare configs/wikipedia12.py:muon configs/wikipedia12.py:muon_deepen \\
        configs/wikipedia12.py:muon_halves configs/wikipedia12.py:muon_vcycle --seeds 0,1,2 \\
        --frontier 0.4,0.55,0.75,0.85 --workdir runs/wiki12

Expected result (`docs/results/muon.md`): `muon_halves` saves 17.7 % ± 3.5 of the FLOPs,
`muon_deepen` 14.7 % ± 4.5, and `muon_vcycle` 13.9 % ± 9.4.

The model is a byte-level GPT on English Wikipedia with 20 tokens per parameter. It has 94 thousand
parameters. This is small enough to sweep the learning rate of each row and of each point of the
frontier, and to run three seeds.
"""

from dataclasses import replace

from configs import wikipedia
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import GPT2Config
from train.config.experiment import Experiment
from train.extras.modifiers import Ramp, ShortContext
from train.extras.pruning import Pruning
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.recipes import deepened, halves

SMALL = GPT2Config(
    vocab=256, context=64, layers=6, embed=16, heads=2, head_dim=8, mlp=64, remat="projections"
)
PLD = LayerDrop(theta=0.5)
SBLD = LayerDrop(theta=0.5, sensitivity=Sensitivity())
UNIFORM = LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))


def scratch() -> Experiment:
    """The baseline: AdamW, from scratch."""
    base = wikipedia.scratch()
    return replace(
        base,
        name="wiki12_scratch",
        model=GPT2Config(
            vocab=256,
            context=64,
            layers=12,
            embed=24,
            heads=3,
            head_dim=8,
            mlp=96,
            remat="projections",
        ),
        steps=1800,
        batch=16,
        optim=replace(base.optim, peak_lr=2e-2, warmup=100),
        eval_every=150,
        eval_batches=64,
    )


# --- growing ---


def small() -> Experiment:
    """The small model that the other experiments grow.

    It has 6 layers of width 16. It trains for half of the steps of the large model, until its
    learning rate has decayed. It is trained once for each seed. The other experiments read it, with
    its total cost, from its run in the same workdir.
    """
    return replace(scratch(), name="grow_small", model=SMALL, steps=900)


def _grown(name: str, by: tuple[str, ...] | Learned) -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (GrowTo((TrainStage(0.6),), by=by),))
    return replace(scratch(), name=f"grow_{name}", method=method)


def stack() -> Experiment:
    """LEMON's exact map in width, and stacking in depth (StackBERT; Gong et al., ICML 2019)."""
    return _grown("stack", ("lemon", "stack"))


def lemon() -> Experiment:
    """LEMON (Wang et al., ICLR 2024).

    It preserves the function in width and depth, so training begins at the loss of the small model.
    """
    return _grown("lemon", ("lemon", "llama_pro"))


def aki() -> Experiment:
    """Advanced knowledge initialisation (bert2BERT; Chen et al., ACL 2022).

    It has its own stacking in depth.
    """
    return _grown("aki", ("aki",))


def ligo() -> Experiment:
    """LiGO (Wang et al., ICLR 2023), with maps that are learned in 100 steps."""
    return _grown("ligo", Learned(steps=100))


def ligo0() -> Experiment:
    """The control of `ligo`: its maps at initialisation, learned for 0 steps."""
    return _grown("ligo0", Learned(steps=0))


def vcycle() -> Experiment:
    """The V-cycle that was best on Wikipedia, for the same large model.

    It does not need a small model that was trained before.
    """
    base = scratch()
    return replace(
        base, name="grow_vcycle", method=wikipedia.VCYCLE, optim=replace(base.optim, peak_lr=4e-2)
    )


def deepen() -> Experiment:
    """Half of the layers for half of the steps.

    Then each layer is followed by its copy. One schedule covers both models, and the moments are
    copied.
    """
    return replace(
        scratch(), name="grow_deepen", method=deepened(scratch().model, 6, 0.5, wikipedia.FINAL)
    )


# --- under Muon ---


def muon() -> Experiment:
    """The baseline with Muon.

    It uses the learning rate of `scratch`, which is also the best one for Muon.
    """
    return _by_muon("wiki12_muon", scratch())


def _by_muon(name: str, experiment: Experiment) -> Experiment:
    return replace(experiment, name=name, optim=replace(scratch().optim, name="muon"))


def muon_deepen() -> Experiment:
    """`deepen` with Muon."""
    return _by_muon("muon_deepen", deepen())


def muon_halves() -> Experiment:
    """Half of the layers, and half of the units in each MLP, for 60 % of the steps.

    The learning rate decays during the last 40 % of the steps.
    """
    return replace(muon(), name="muon_halves", method=halves(scratch().model))


def muon_short() -> Experiment:
    """`muon` with short contexts first (SkyLadder; Zhu et al., 2025).

    For half of the steps, each sample is split into four.
    """
    return replace(muon(), name="muon_short", method=_short(12))


def muon_short_deepen() -> Experiment:
    """`muon_deepen`, with the short contexts of `muon_short` while it has half of the layers."""
    return replace(muon(), name="muon_short_deepen", method=_short(6))


def _short(layers: int) -> Growing:
    method = deepened(scratch().model, layers, 0.5, wikipedia.FINAL)
    return replace(method, source=TrainStage(0.5, floor=1.0, modifiers=(ShortContext(4),)))


def muon_one() -> Experiment:
    """One layer for 30 % of the steps, then twelve (Bu, ICML 2026).

    With twelve layers, the learning rate is first constant for 20 % of the steps, and then decays.
    """
    stages = (TrainStage(0.2, warmup=0, floor=1.0), wikipedia.FINAL)
    return replace(muon(), name="muon_one", method=deepened(scratch().model, 1, 0.3, *stages))


def muon_none() -> Experiment:
    """No layer for 30 % of the steps, then twelve (Bu, ICML 2026).

    The twelve layers are freshly initialised. With them, the learning rate is first constant for
    20 % of the steps, and then decays.
    """
    one = muon_one()
    nothing = LayerDrop(0.0, "constant", "prefix", scale="none", dropped="freeze")
    method = replace(
        one.method,
        small=one.model,
        source=TrainStage(0.3, floor=1.0, modifiers=(DropLayers(nothing),)),
    )
    return replace(one, name="muon_none", method=method)


def muon_quarter() -> Experiment:
    """Three layers for 40 % of the steps, then twelve layers for 50 %."""
    return replace(
        muon(), name="muon_quarter", method=deepened(scratch().model, 3, 0.4, wikipedia.FINAL)
    )


def muon_twice() -> Experiment:
    """Three layers for 20 % of the steps, six layers for 30 %, then twelve layers."""
    model = scratch().model
    half = TrainStage(0.3, warmup=0, floor=1.0)
    last = GrowTo((wikipedia.FINAL,), by=("interleave",), moments="copy")
    first = replace(last, stages=(half,), config=replace(model, layers=6))
    method = Growing(replace(model, layers=3), TrainStage(0.2, floor=1.0), (first, last))
    return replace(muon(), name="muon_twice", method=method)


def muon_dropped() -> Experiment:
    """Run six of twelve layers in each step while the learning rate is constant.

    The six layers are sampled again for each step. All layers run while the learning rate decays.
    The model does not grow.
    """
    drop = LayerDrop(theta=0.5, time="constant", depth="uniform", scale="none")
    method = replace(
        deepened(muon().model, 12, 0.5, wikipedia.FINAL),
        source=TrainStage(0.5, floor=1.0, modifiers=(DropLayers(drop),)),
    )
    return replace(muon(), name="muon_dropped", method=method)


def muon_vcycle() -> Experiment:
    """`vcycle` with Muon."""
    return _by_muon("muon_vcycle", vcycle())


def muon_vcycle_once() -> Experiment:
    """`muon_vcycle` with a single warm-up, in the first stage of the large model.

    In `muon_vcycle`, the first stage ends before its warm-up, and the small model warms up again.
    """
    down = replace(wikipedia.VCYCLE.down[0], warmup=90)
    small, last = wikipedia.VCYCLE.up
    method = replace(wikipedia.VCYCLE, down=(down,), up=(replace(small, warmup=0), last))
    return replace(muon_vcycle(), name="muon_vcycle_once", method=method)


def muon_vcycle_pruned() -> Experiment:
    """`muon_vcycle`, but the small model keeps selected layers instead of means of pairs.

    The small model has the six layers that change the direction of the residual stream most. The
    other layers are not changed until the model grows again.
    """
    method = replace(wikipedia.VCYCLE, groupings=(Pruning(6),), moments_up="asymmetric")
    return _by_muon("muon_vcycle_pruned", replace(vcycle(), method=method))


def muon_small() -> Experiment:
    """`small` with Muon."""
    return _by_muon("muon_small", small())


def muon_ligo0() -> Experiment:
    """`ligo0` with Muon. It grows `muon_small`."""
    method = Growing(
        SMALL, "muon_small-seed{seed}", (GrowTo((TrainStage(0.6),), by=Learned(steps=0)),)
    )
    return _by_muon("muon_ligo0", replace(scratch(), method=method))


def muon_prores() -> Experiment:
    """`muon` with ProRes (2026).

    The residual branches of layer l are ramped up over ``10 (l + 1)`` steps.
    """
    return replace(
        muon(), name="muon_prores", method=Scratch(modifiers=(Ramp(tuple(range(10, 121, 10))),))
    )


def muon_halves_prores() -> Experiment:
    """`muon_halves` with ProRes.

    The first layers are ramped up as in `muon_prores`. Layers that are added later are fully active
    at once.
    """
    first = TrainStage(0.6, floor=1.0, modifiers=(Ramp(tuple(range(10, 61, 10))),))
    method = replace(halves(scratch().model), source=first)
    return replace(muon(), name="muon_halves_prores", method=method)


# --- dropping layers ---


def _dropping(name: str, drop: LayerDrop) -> Experiment:
    base = scratch()
    return replace(
        base,
        name=f"wiki12_{name}",
        optim=replace(base.optim, peak_lr=1e-2),
        method=Scratch((DropLayers(drop),)),
    )


def pld() -> Experiment:
    """PLD (Zhang & He, 2020).

    Theta is 0.5, gamma is 100 / T, and the scaling is the paper's.
    """
    return _dropping("pld", PLD)


def sbld50() -> Experiment:
    """SBLD (Zeng et al., 2023; our reconstruction), with theta 0.5."""
    return _dropping("sbld50", SBLD)


def uniform50() -> Experiment:
    """The control of `sbld50`: the same without sensitivities (beta 0).

    All layers that may be dropped have the same keep probability. The pre-analysis, block list,
    schedule and mean are the same as for SBLD, so that only the choice of the dropped layers
    differs.
    """
    return _dropping("uniform50", UNIFORM)
