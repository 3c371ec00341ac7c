"""The V-cycle of `configs/wiki_vcycle.py` for a BERT.

    python -m train.compare configs/wiki_bert_scratch.py configs/wiki_bert_vcycle.py --seeds 0,1 --frontier 0.7 \\
        --workdir runs/wiki_bert
"""

from dataclasses import replace

from configs.wiki_bert_scratch import config as scratch
from configs.wiki_vcycle import config as wiki
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="wiki_bert_vcycle", method=wiki().method)
