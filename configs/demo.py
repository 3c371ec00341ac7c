"""The demo: a byte-level GPT of 0.13 M parameters on the standard library's source, 21 tokens a parameter, by every method.

    python -m train.compare configs/demo.py:muon configs/demo.py:muon_deepen --frontier 0.504
    python -m train.compare configs/demo.py:muon configs/demo.py:muon_vcycle --frontier 0.504
    python -m train.compare configs/demo.py:scratch configs/demo.py:pld configs/demo.py:sbld configs/demo.py:uniform \\
        --seeds 0,1,2 --workdir runs/drop

And a ViT of 0.1 M parameters on scikit-learn's handwritten digits, which need no download:

    python -m train.compare configs/demo.py:vit_scratch configs/demo.py:vit_vcycle

Peak rate, warm-up and schedule are the best of a sweep of the baseline (`docs/results`); those of the other methods are
the same.
"""

from dataclasses import replace

from jaxgrow.drop import LayerDrop, Sensitivity, TokenDrop
from jaxgrow.freeze import Freeze
from jaxgrow.models import GPT2Config, ViTConfig
from train.data.images import Images
from train.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Inherit, Learned, Method, Scratch, Stage, VCycle
from train.plan.modifiers import Rewarm
from train.plan.recipes import deep_vcycle, deepened
from train.state.optim import Optim

MODEL = GPT2Config(vocab=256, context=64, layers=4, embed=48, heads=4, head_dim=12, mlp=192, remat="projections")


def scratch() -> Experiment:
    """The baseline."""
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

VCYCLE = deep_vcycle(Stage(0.4, warmup=50, floor=1.0), Stage(0.6, warmup=0, schedule="linear"))
VCYCLE_PAPER = VCycle(
    down=(Stage(0.05),),
    up=(
        Stage(0.5, lr=2.0, warmup=50, schedule="linear"),  # twice the rate is neutral for Adam at half the width
        Stage(0.5, warmup=50, schedule="linear"),
    ),
    alpha=0.5,
)


def vcycle() -> Experiment:
    """The best recipe found: a V-cycle in depth alone, corrected, under one schedule, moments carried.

    The large model trains for 5 % of the steps, its half-depth coalescence for 40 % at a constant rate, then the corrected
    large model for 60 % while the rate falls to zero. Adam's moments travel both ways, so no stage warms up again.
    """
    return _by("vcycle", VCYCLE)


def vcycle_paper() -> Experiment:
    """The paper's form: half width and depth, interpolation, a fresh optimizer and warm-up each stage."""
    return _by("vcycle_paper", VCYCLE_PAPER)


def vcycle_pld() -> Experiment:
    """The last phase with progressive layer dropping: a stage of any method takes a `LayerDrop`."""
    small, final = VCYCLE.up
    drop = LayerDrop(theta=0.7, time="constant", reverse=True, recovery=0.3)
    return _by("vcycle_pld", replace(VCYCLE, up=(small, replace(final, drop=drop))))


# --- Muon ---


def muon() -> Experiment:
    """The baseline by Muon, which is the better one."""
    return replace(scratch(), name="demo_muon", optim=replace(scratch().optim, name="muon"))


def muon_deepen() -> Experiment:
    """Progressive depth: two of the four layers for half of the steps, then each is followed by its copy. By Muon.

    It has 850 of the baseline's 1,300 steps, which cost half of its FLOPs. One schedule covers both models; moments are copied.
    """
    method = deepened(MODEL, 2, 0.5, Stage(0.5, warmup=0, schedule="linear"))
    return replace(muon(), name="demo_muon_deepen", method=method, steps=850)


def muon_vcycle() -> Experiment:
    """`vcycle` by Muon, with 750 of the baseline's 1,300 steps, which cost half of its FLOPs."""
    return replace(muon(), name="demo_muon_vcycle", method=VCYCLE, steps=750)


# --- growing ---

SOURCE = Stage(0.4, floor=1.0)  # the small model's training: at a constant rate, for only the large one decays
FINAL = Stage(0.6, warmup=50, schedule="linear")
HALF_WIDTH = replace(MODEL, embed=24, heads=2, mlp=96)


def stack() -> Experiment:
    """StackBERT (Gong et al., ICML 2019): two layers first, then the stack twice, under one schedule; moments are copied."""
    to = GrowTo((replace(FINAL, warmup=0),), by=("stack",), moments="copy")
    return _by("stack", Growing(replace(MODEL, layers=2), SOURCE, (to,)))


def fpi() -> Experiment:
    """Function-preserving initialisation (bert2BERT, Chen et al., ACL 2022): half the width first."""
    return _by("fpi", Growing(HALF_WIDTH, SOURCE, (GrowTo((FINAL,), by=("fpi",)),)))


def sparkling() -> Experiment:
    """SPARKLING (2026): copies scaled to keep activations, asymmetric moments, new entries warm up again."""
    stage = replace(FINAL, warmup=0, rewarm=Rewarm(steps=50))
    return _by("sparkling", Growing(HALF_WIDTH, SOURCE, (GrowTo((stage,), by=("sparkling",), moments="asymmetric"),)))


def mslt() -> Experiment:
    """Multi-stage layerwise training (Yang et al., 2020): new top layers train alone, all in a last stage.

    Below the layers that train, no backward pass runs.
    """
    top = Stage(0.25, warmup=0, floor=1.0, freeze=Freeze(layers=(0, 1)))
    last = Stage(0.5, warmup=0, schedule="linear")
    to = GrowTo((top, last), by=("mslt",), moments="copy")
    return _by("mslt", Growing(replace(MODEL, layers=2), Stage(0.25, floor=1.0), (to,)))


# --- LiGO (Wang et al., ICLR 2023) ---

LIGO_SMALL = replace(MODEL, layers=2, embed=36, heads=3, mlp=144)


def _ligo(name: str, *stages: Stage) -> Experiment:
    return _by(name, Growing(LIGO_SMALL, SOURCE, (GrowTo(stages, by=Learned()),)))


def ligo() -> Experiment:
    """Half the layers and three quarters of the width first.

    The maps are learned for 100 steps at the experiment's own rate, with 10 steps of warm-up: at rates a hundred times smaller,
    as the published recipe has them, they hardly move.
    """
    return _ligo("ligo", FINAL)


def ligo_pld() -> Experiment:
    """With layer dropping (appendix B.3: at most a tenth of the layers) while the grown model trains."""
    return _ligo("ligo_pld", replace(FINAL, drop=LayerDrop(theta=0.9)))


def ligo_tokens() -> Experiment:
    """With token dropping (appendix B.3: 15 % of the tokens go around the layers in the middle)."""
    return _ligo("ligo_tokens", replace(FINAL, tokens=TokenDrop(0.15)))


def ligo_staged() -> Experiment:
    """With staged training (appendix B.3: a sub-network for the first eighth of the steps, then the whole).

    The sub-network is the bottom half of the layers, in the manner of bert2BERT's sub-models. The paper trains 50 of 400
    thousand steps so.
    """
    bottom = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", dropped="freeze")
    part = Stage(0.075, warmup=50, floor=1.0, drop=bottom)
    return _ligo("ligo_staged", part, replace(FINAL, steps=0.525, warmup=0))


def inherit() -> Experiment:
    """Knowledge inheritance (Qin et al., NAACL 2022): LiGO's small model teaches the large one at first."""
    return _by("inherit", Inherit(LIGO_SMALL, SOURCE, Stage(1.0)))


# --- dropping layers ---


def pld() -> Experiment:
    """Progressive layer dropping (Zhang & He, 2020): theta 0.5, gamma 100 / T, the paper's scaling."""
    return _by("pld", Scratch(LayerDrop(theta=0.5)))


def sbld() -> Experiment:
    """Sensitivity-based layer dropping (Zeng et al., AAAI 2023; the formulas are our reconstruction).

    All layers for 5 % of the steps, one measurement, then PLD's schedule and mean keep probability, divided among the layers in
    the order of their sensitivities.
    """
    return _by("sbld", Scratch(LayerDrop(theta=0.5, sensitivity=Sensitivity())))


def uniform() -> Experiment:
    """The control of `sbld`: the same without sensitivities (beta 0), so every layer that may be dropped alike.

    Pre-analysis, block list, schedule and mean are SBLD's: what differs is who is dropped.
    """
    return _by("uniform", Scratch(LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))))


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
        data=Images(),  # no shifts: the digits fill their pixels, and lose strokes
        optim=Optim(peak_lr=3e-3, schedule="wsd", decay=0.5, warmup=100, b2=0.999, weight_decay=0.05),
        eval_every=50,
        eval_batches=5,
        log_every=20,
        checkpoint_every=500,
    )


def vit_vcycle() -> Experiment:
    """`vcycle`, for images."""
    return replace(vit_scratch(), name="demo_vit_vcycle", method=VCYCLE)
