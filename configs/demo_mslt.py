"""Multi-stage layerwise training (Yang et al., 2020) on the demo's model: new top layers train alone, all in a last stage.

python -m train.compare configs/demo_scratch.py configs/demo_stack.py configs/demo_mslt.py

Below the layers that train, no backward pass runs.
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from jaxgrow.freeze import Freeze
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    base = scratch()
    top = Stage(0.25, warmup=0, floor=1.0, freeze=Freeze(layers=(0, 1)))
    last = Stage(0.5, warmup=0, schedule="linear")
    to = To((top, last), by=("mslt",), moments="copy")
    small = replace(base.model, layers=2)
    return replace(base, name="demo_mslt", method=Growing(small, Stage(0.25, floor=1.0), (to,)))
