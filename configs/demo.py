"""Does growing save FLOPs in a few minutes on a CPU? The demo: a small GPT with every method.

    python -m train.compare configs/demo.py:muon configs/demo.py:muon_deepen --frontier 0.5
    python -m train.compare configs/demo.py:muon configs/demo.py:muon_vcycle --frontier 0.5
    python -m train.compare configs/demo.py:scratch configs/demo.py:pld configs/demo.py:sbld \\
        configs/demo.py:uniform --seeds 0,1,2 --workdir runs/drop

Expected result of the first command (`docs/start.md`): `demo_muon` ends at a loss of 1.6531.
`demo_muon_deepen` ends at 1.7859 with half of the FLOPs, and saves 16.2 % of them with seed 0. Over
five seeds, it saves 14.9 to 22.0 %. The results of the other methods are in
`docs/results/demo.md`; they show no savings, because their learning rates were not swept.

The GPT of the first two commands is byte-level, has 61 thousand parameters, and trains on the source
code of the standard library with 20 tokens per parameter. The other methods train one of 0.13
million parameters.

A ViT of 0.1 million parameters trains on the handwritten digits of scikit-learn, which need no
download:

    python -m train.compare configs/demo.py:vit_scratch configs/demo.py:vit_vcycle

The peak learning rate, warm-up and schedule are the best ones of a sweep of each baseline. The other
methods use the same values.
"""

from dataclasses import replace

from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import GPT2Config, ViTConfig
from train.config.experiment import Experiment
from train.extras.images.images import Images
from train.extras.inherit import Inherit
from train.extras.modifiers import DropTokens, FreezeParts, Rewarm
from train.plan.methods import Growing, GrowTo, Learned, Method, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.recipes import deep_vcycle, deepened
from train.state.optim import Optim

MODEL = GPT2Config(
    vocab=256, context=64, layers=4, embed=48, heads=4, head_dim=12, mlp=192, remat="projections"
)


def scratch() -> Experiment:
    """The baseline: AdamW, from scratch."""
    return Experiment(
        name="demo_scratch",
        model=MODEL,
        steps=1300,
        batch=32,
        optim=Optim(peak_lr=1e-2, schedule="wsd", decay=0.5, warmup=100),
        eval_every=100,
        eval_batches=32,
        log_every=20,
        checkpoint_every=500,
    )


def _by(name: str, method: Method) -> Experiment:
    return replace(scratch(), name=f"demo_{name}", method=method)


# --- V-cycles ---

VCYCLE = deep_vcycle(
    TrainStage(0.4, warmup=50, floor=1.0), TrainStage(0.6, warmup=0, schedule="linear")
)
VCYCLE_PAPER = VCycle(
    down=(TrainStage(0.05),),
    up=(
        # Adam's best learning rate scales with 1 / width.
        TrainStage(0.5, lr=2.0, warmup=50, schedule="linear"),
        TrainStage(0.5, warmup=50, schedule="linear"),
    ),
    alpha=0.5,
)


def vcycle() -> Experiment:
    """The best V-cycle that we found: depth only, with correction and one schedule.

    The large model trains for 5 % of the steps. Its half-depth coalescence then trains for 40 % at
    a constant learning rate, after a warm-up of 50 steps. The corrected large model trains for the
    last 60 %, while the learning rate falls to zero. Adam's moments are carried in both directions.
    """
    return _by("vcycle", VCYCLE)


def vcycle_paper() -> Experiment:
    """The V-cycle of the paper.

    It halves width and depth, interpolates, and starts each stage with a fresh optimizer and a
    warm-up.
    """
    return _by("vcycle_paper", VCYCLE_PAPER)


def vcycle_pld() -> Experiment:
    """The V-cycle with progressive layer dropping in its last phase.

    A stage of any method accepts a `LayerDrop`.
    """
    small, final = VCYCLE.up
    drop = LayerDrop(theta=0.7, time="constant", recovery=0.3)
    return _by(
        "vcycle_pld", replace(VCYCLE, up=(small, replace(final, modifiers=(DropLayers(drop),))))
    )


# --- Muon: the first command ---

SMALL = GPT2Config(
    vocab=256, context=64, layers=4, embed=32, heads=2, head_dim=16, mlp=128, remat="projections"
)


def muon() -> Experiment:
    """The baseline of the first command: a smaller GPT with Muon, from scratch.

    It has 61 thousand parameters and trains with 20 tokens per parameter, so that three runs take a
    minute on two cores. With a peak learning rate of 5e-3, 1e-2, 2e-2 and 4e-2, it ends at 1.7075,
    1.6658, 1.6531 and 1.7102, and 2e-2 is also the best for the other two runs of the first command.
    """
    return replace(
        scratch(),
        name="demo_muon",
        model=SMALL,
        steps=1200,
        batch=16,
        optim=replace(scratch().optim, name="muon", peak_lr=2e-2),
    )


def muon_deepen() -> Experiment:
    """Progressive depth under Muon: two layers for half of the steps, then four.

    Each layer is followed by its copy when the model grows. The run has 772 of the 1,200 steps of
    the baseline, which cost half of its FLOPs. One schedule covers both models, and the moments are
    copied.
    """
    method = deepened(SMALL, 2, 0.5, TrainStage(0.5, warmup=0, schedule="linear"))
    return replace(muon(), name="demo_muon_deepen", method=method, steps=772)


def muon_vcycle() -> Experiment:
    """`vcycle` with Muon.

    The run has 690 of the 1,200 steps of the baseline, which cost half of its FLOPs.
    """
    return replace(muon(), name="demo_muon_vcycle", method=VCYCLE, steps=690)


# --- growing ---

# The small model trains at a constant learning rate, because only the large model has a decay.
SOURCE = TrainStage(0.4, floor=1.0)
FINAL = TrainStage(0.6, warmup=50, schedule="linear")
HALF_WIDTH = replace(MODEL, embed=24, heads=2, mlp=96)


def stack() -> Experiment:
    """StackBERT (Gong et al., ICML 2019): two layers first, then the stack twice.

    One schedule covers both models, and the moments are copied.
    """
    to = GrowTo((replace(FINAL, warmup=0),), by=("stack",), moments="copy")
    return _by("stack", Growing(replace(MODEL, layers=2), SOURCE, (to,)))


def fpi() -> Experiment:
    """Function-preserving initialisation (bert2BERT, Chen et al., ACL 2022): half the width first."""
    return _by("fpi", Growing(HALF_WIDTH, SOURCE, (GrowTo((FINAL,), by=("fpi",)),)))


def sparkling() -> Experiment:
    """SPARKLING (2026): half of the width first.

    Copies are scaled so that activations keep their size, and moments are asymmetric. The learning
    rate of the new entries warms up again.
    """
    stage = replace(FINAL, warmup=0, modifiers=(Rewarm(steps=50),))
    return _by(
        "sparkling",
        Growing(HALF_WIDTH, SOURCE, (GrowTo((stage,), by=("sparkling",), moments="asymmetric"),)),
    )


def mslt() -> Experiment:
    """Multi-stage layerwise training (Yang et al., 2020).

    The new top layers train alone. All layers train in a last stage. The backward pass does not run
    below the trained layers.
    """
    top = TrainStage(0.25, warmup=0, floor=1.0, modifiers=(FreezeParts(Freeze(layers=(0, 1))),))
    last = TrainStage(0.5, warmup=0, schedule="linear")
    to = GrowTo((top, last), by=("mslt",), moments="copy")
    return _by("mslt", Growing(replace(MODEL, layers=2), TrainStage(0.25, floor=1.0), (to,)))


# --- LiGO (Wang et al., ICLR 2023) ---

LIGO_SMALL = replace(MODEL, layers=2, embed=36, heads=3, mlp=144)


def _ligo(name: str, *stages: TrainStage) -> Experiment:
    return _by(name, Growing(LIGO_SMALL, SOURCE, (GrowTo(stages, by=Learned()),)))


def ligo() -> Experiment:
    """LiGO: half of the layers and three quarters of the width first.

    The maps are learned for 100 steps at the learning rate of the experiment, with 10 steps of
    warm-up. The published recipe has learning rates that are a hundred times smaller; with them the
    maps hardly change.
    """
    return _ligo("ligo", FINAL)


def ligo_pld() -> Experiment:
    """LiGO, with layer dropping while the grown model trains.

    At most a tenth of the layers is dropped (appendix B.3).
    """
    return _ligo("ligo_pld", replace(FINAL, modifiers=(DropLayers(LayerDrop(theta=0.9)),)))


def ligo_tokens() -> Experiment:
    """LiGO, with token dropping.

    15 % of the tokens bypass the middle layers (appendix B.3).
    """
    return _ligo("ligo_tokens", replace(FINAL, modifiers=(DropTokens(TokenDrop(0.15)),)))


def ligo_staged() -> Experiment:
    """LiGO, with staged training: a sub-network first, then the complete model (appendix B.3).

    The sub-network trains for an eighth of the steps of the grown model. The paper uses 50 of 400
    thousand steps. Here the sub-network is the bottom half of the layers, like the sub-models of
    bert2BERT.
    """
    bottom = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", dropped="freeze")
    part = TrainStage(0.075, warmup=50, floor=1.0, modifiers=(DropLayers(bottom),))
    return _ligo("ligo_staged", part, replace(FINAL, steps=0.525, warmup=0))


def inherit() -> Experiment:
    """Knowledge inheritance (Qin et al., NAACL 2022).

    The small model of LiGO teaches the large model at the beginning.
    """
    return _by("inherit", Inherit(LIGO_SMALL, SOURCE, TrainStage(1.0)))


# --- dropping layers ---


def pld() -> Experiment:
    """Progressive layer dropping (Zhang & He, 2020).

    Theta is 0.5, gamma is 100 / T, and the scaling is the paper's.
    """
    return _by("pld", Scratch((DropLayers(LayerDrop(theta=0.5)),)))


def sbld() -> Experiment:
    """Sensitivity-based layer dropping (Zeng et al., AAAI 2023).

    The formulas are our reconstruction. All layers run for 5 % of the steps. Sensitivities are
    measured once. The schedule and the mean keep probability are then the same as for PLD, but the
    probabilities are distributed over the layers in the order of their sensitivities.
    """
    return _by("sbld", Scratch((DropLayers(LayerDrop(theta=0.5, sensitivity=Sensitivity())),)))


def uniform() -> Experiment:
    """The control of `sbld`: the same without sensitivities (beta 0).

    All layers that may be dropped have the same keep probability. The pre-analysis, block list,
    schedule and mean are the same as for SBLD, so that only the choice of the dropped layers
    differs.
    """
    return _by(
        "uniform", Scratch((DropLayers(LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))),))
    )


# --- images ---


def vit_scratch() -> Experiment:
    """The baseline for images."""
    return Experiment(
        name="demo_vit_scratch",
        model=ViTConfig(
            image=8,
            patch=2,
            channels=1,
            classes=10,
            layers=4,
            embed=48,
            heads=4,
            head_dim=12,
            mlp=192,
            eps=1e-6,
            remat="projections",
        ),
        steps=1500,
        batch=32,
        data=Images(),  # not shifted: the digits fill the images and would lose strokes
        optim=Optim(
            peak_lr=3e-3, schedule="wsd", decay=0.5, warmup=100, b2=0.999, weight_decay=0.05
        ),
        eval_every=50,
        eval_batches=5,
        log_every=20,
        checkpoint_every=500,
    )


def vit_vcycle() -> Experiment:
    """`vcycle` for images."""
    return replace(vit_scratch(), name="demo_vit_vcycle", method=VCYCLE)
