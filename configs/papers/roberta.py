"""Does LiGO's saving on RoBERTa hold? LiGO's pair (Wang et al., ICLR 2023). Not run here.

    python -m train.pretrain configs/papers/roberta.py:small --set data.path=~/tensorflow_datasets \\
        --workdir runs/roberta_small-seed0
    python -m train.compare configs/papers/roberta.py:base configs/papers/roberta.py:base_ligo \\
        --set data.path=~/tensorflow_datasets

Result of the paper: LiGO saves 47.2 % of the FLOPs, without the cost of the small model.

English Wikipedia comes from tensorflow-datasets. The `vocab.json` and `merges.txt` of RoBERTa must
be in `tokenizer-roberta`. `base_ligo` reads the run `roberta_small-seed0`, or the run of another
seed, from the same workdir.
"""

from dataclasses import replace

from configs.papers import bert
from train.config.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Learned, TrainStage


def base() -> Experiment:
    """Base, L12-768-12, from scratch.

    It is like BERT-Base, but with a batch of 1024 and a learning rate of 8e-4 (section 4.1).
    """
    base = bert.base()
    return replace(
        base,
        name="roberta_base",
        model=replace(base.model, vocab=50265, context=130, first_position=2, types=1, eps=1e-5),
        batch=1024,
        data=replace(base.data, tokenizer="tokenizer-roberta"),
        optim=replace(base.optim, peak_lr=8e-4),
    )


def small() -> Experiment:
    """Small, L6-512-8: the small model of LiGO's pair (Table 4)."""
    large = base()
    model = replace(large.model, layers=6, embed=512, heads=8, mlp=2048)
    return replace(large, name="roberta_small", model=model, steps=220_000)


def base_ligo() -> Experiment:
    """LiGO from small to base: 47.2 % fewer FLOPs (Fig. 3), without the cost of the small model.

    The grown model warms up for 10,000 steps again, as in the published code.
    """
    # Deviation(LiGO): method.to.0.by.warmup: the published warm-up of 10,000 steps would leave the
    # learning rate of the 100 steps near 0, so it has 10 steps.
    to = GrowTo((TrainStage(1.0),), by=Learned(lr=0.25))  # a learning rate of 2e-4, as for BERT
    return replace(
        base(),
        name="roberta_base_ligo",
        method=Growing(small().model, "roberta_small-seed{seed}", (to,)),
    )
