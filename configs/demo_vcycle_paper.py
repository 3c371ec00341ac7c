from dataclasses import replace
from configs.demo_scratch import config as scratch
from train.plan import VCycle, Stage


def config():
    return replace(scratch(), name="demo_vcycle_paper", method=VCycle(alpha=0.5))
