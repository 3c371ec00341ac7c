"""GPT-2 medium to XL by LiGO: about 39 % fewer FLOPs to a log-perplexity of 3.3 (Wang et al., ICLR 2023, appendix C.5).

The paper's number is preliminary and leaves the small model's cost out. Not run here; reads the run `gpt_medium_c4-seed0`, or
of another seed, beside its own.
"""

from dataclasses import replace

from configs.gpt_medium_c4 import config as medium
from configs.gpt_xl_c4 import config as scratch
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0, warmup=0),), by=Learned(lr=0.5))
    return replace(scratch(), name="gpt_xl_ligo", method=Growing(medium().model, "gpt_medium_c4-seed{seed}", (to,)))
