"""BERT base by the paper's V-cycle: L12-768 with L6-384, alpha 0.5, the small model half of the steps (Zou et al., ICLR 2024).

    python -m train.compare configs/bert_base.py configs/bert_base_vcycle.py --set steps=300_000 --set data.path=...

The paper trains 300,000 steps at length 128 and reports 19.0 % fewer FLOPs and 10.8 % less wall-clock time at equal loss; not
run here. What it leaves open for BERT, the first stage, learning rates and warm-ups, is as in the published example for GPT-2,
with the small model's rate of 4e-4. Tables grow by the published rules.
"""

from dataclasses import replace

from configs.bert_base import config as scratch
from train.config import Experiment
from train.methods import Stage, VCycle
from train.transforms import Grouping


def config() -> Experiment:
    method = VCycle(
        down=(Stage(0.05),),
        up=(Stage(0.5, lr=2.0, warmup=0), Stage(0.5, warmup=0)),
        groupings=(Grouping(heads="far", layers="adjacent", tied="paper"),),
        alpha=0.5,
    )
    return replace(scratch(), name="bert_base_vcycle", method=method)
