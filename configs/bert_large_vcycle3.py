"""BERT large by a V-cycle of three levels: L24-1024, L12-512, L6-256, alpha 0.5 (Zou et al., ICLR 2024, Table 4).

The paper reports 51.6 % fewer FLOPs and 41.9 % less wall-clock time. Each coarse model trains half of the steps. Not run here;
see `bert_large.py` for the command, and `bert_base_vcycle.py` for what the paper leaves open.
"""

from dataclasses import replace

from configs.bert_large import config as scratch
from train.config import Experiment
from train.methods import Stage, VCycle
from train.transforms import Grouping


def config() -> Experiment:
    method = VCycle(
        down=(Stage(0.05), Stage(0.05)),
        up=(Stage(0.5, lr=2.0, warmup=0), Stage(0.5, lr=2.0, warmup=0), Stage(0.5, warmup=0)),
        groupings=(Grouping(heads="far", layers="adjacent", tied="paper"),),
        alpha=0.5,
    )
    return replace(scratch(), name="bert_large_vcycle3", method=method)
