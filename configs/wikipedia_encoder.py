"""Do the recipes save FLOPs on an encoder? A ModernBERT on English Wikipedia.

    python -m train.compare configs/wikipedia_encoder.py:scratch configs/wikipedia_encoder.py:vcycle \\
        configs/wikipedia_encoder.py:small configs/wikipedia_encoder.py:ligo \\
        configs/wikipedia_encoder.py:sbld --seeds 0,1 --frontier 0.55 --workdir runs/encoder
    python -m train.compare configs/wikipedia_encoder.py:muon configs/wikipedia_encoder.py:muon_deepen \\
        configs/wikipedia_encoder.py:muon_halves --seeds 0,1 --frontier 0.55,0.75 \\
        --workdir runs/encoder_muon
    python -m train.compare configs/wikipedia_encoder.py:long configs/wikipedia_encoder.py:long_deepen \\
        configs/wikipedia_encoder.py:long_vcycle --frontier 0.75 --workdir runs/encoder_long

Expected result (`docs/results/encoders.md`): `vcycle` saves 20.9 and 20.7 % of the FLOPs under
AdamW (two seeds). Against Muon, `muon_deepen` saves more than 19.7 % and `muon_halves` more than
31.4 %. Of the larger model, `long`, `long_deepen` saves 22.4 % and `long_vcycle` 16.3 % (one seed);
`long_halves` has not been trained.

The context has 128 word pieces, which is long enough for questions with their passages.
`tokenizer-2048.json` is a byte-level BPE of the corpus with the special tokens of RoBERTa;
`docs/results/finetuned.md` shows how to train it. The encoder uses windowed attention and rotary
embeddings. It learns within 500 steps what a BERT of the same size with learned position embeddings
did not learn within 1200.
"""

from dataclasses import replace

from configs import wikipedia
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train.config.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.recipes import deepened, halves
from train.state.optim import Optim


def scratch() -> Experiment:
    """Train the encoder from scratch."""
    return Experiment(
        name="encoder_scratch",
        model=ModernBERTConfig(
            vocab=2048,
            context=128,
            layers=6,
            embed=48,
            heads=3,
            kv_heads=3,
            head_dim=16,
            mlp=128,
            window=17,
            rope_theta=1e4,
            masked=0.25,
            remat="projections",
        ),
        steps=1500,
        batch=16,
        data=replace(wikipedia.DATA, tokenizer="tokenizer-2048.json"),
        optim=Optim(
            peak_lr=3e-3, schedule="wsd", decay=0.5, warmup=100, b2=0.98, weight_decay=0.01
        ),
        eval_every=100,
        eval_batches=32,
        log_every=20,
        checkpoint_every=200,
    )


def vcycle() -> Experiment:
    """The V-cycle of the demo, with a last phase of half of the steps."""
    return replace(scratch(), name="encoder_vcycle", method=wikipedia.VCYCLE)


def small() -> Experiment:
    """The small model that `ligo` grows.

    It has half of the layers and two thirds of the width. It trains for half of the steps, until
    its learning rate has decayed.
    """
    base = scratch()
    return replace(
        base,
        name="encoder_small",
        model=replace(base.model, layers=3, embed=32, heads=2, kv_heads=2, mlp=80),
        steps=750,
    )


def ligo() -> Experiment:
    """LiGO, with maps that are learned in 100 steps."""
    method = Growing(
        small().model,
        "encoder_small-seed{seed}",
        (GrowTo((TrainStage(0.6),), by=Learned(steps=100)),),
    )
    return replace(scratch(), name="encoder_ligo", method=method)


def _dropping(name: str, drop: LayerDrop) -> Experiment:
    return replace(scratch(), name=f"encoder_{name}", method=Scratch((DropLayers(drop),)))


def sbld() -> Experiment:
    """SBLD (Zeng et al., 2023; our reconstruction), with theta 0.5."""
    return _dropping("sbld", LayerDrop(theta=0.5, sensitivity=Sensitivity()))


def uniform() -> Experiment:
    """The control of `sbld`: the same without sensitivities."""
    return _dropping("uniform", LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0)))


# --- under Muon ---


def muon() -> Experiment:
    """Train the encoder from scratch with Muon."""
    return replace(
        scratch(), name="encoder_muon", optim=replace(scratch().optim, name="muon", peak_lr=1e-2)
    )


def muon_deepen() -> Experiment:
    """`muon` with half of the layers first."""
    return replace(
        muon(), name="encoder_muon_deepen", method=deepened(muon().model, 3, 0.5, wikipedia.FINAL)
    )


def muon_halves() -> Experiment:
    """`muon` with half of the layers and of each MLP for the first 60 % of the steps."""
    return replace(muon(), name="encoder_muon_halves", method=halves(muon().model))


# --- 1.1 million parameters, 20 tokens per parameter ---


def long() -> Experiment:
    """Train an encoder of 12 layers and 1.1 million parameters from scratch with Muon."""
    short = muon()
    return replace(
        short,
        name="encoder_long",
        model=replace(short.model, layers=12, embed=80, heads=2, kv_heads=2, head_dim=40, mlp=208),
        steps=10560,
        optim=replace(short.optim, peak_lr=2.5e-3, warmup=528),
        eval_every=660,
        log_every=100,
        checkpoint_every=330,
    )


def long_deepen() -> Experiment:
    """`long` with 6 layers first."""
    return replace(
        long(), name="encoder_long_deepen", method=deepened(long().model, 6, 0.5, wikipedia.FINAL)
    )


def long_halves() -> Experiment:
    """`long` with 6 layers and half of each MLP for the first 60 % of the steps."""
    return replace(long(), name="encoder_long_halves", method=halves(long().model))


def long_vcycle() -> Experiment:
    """`long` with a V-cycle whose small model has 6 layers."""
    return wikipedia.cycled(long())
