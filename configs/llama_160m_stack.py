"""G_stack (Du et al., NeurIPS 2024) on the Llama of `llama_160m_c4`: three layers first, then stacked four times. Not run here.

Its formula (`g_stack_tokens`), which is of larger models, asks for more than a quarter of the tokens here: a quarter it is. As
published, the grown model has a fresh optimizer and a schedule of its own.
"""

from dataclasses import replace

from configs.llama_160m_c4 import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    base = scratch()
    small = replace(base.model, layers=base.model.layers // 4)
    growing = Growing(small, Stage(0.25), (To((Stage(0.75),), by=("g_stack",)),))
    return replace(base, name="llama_160m_stack", method=growing)
