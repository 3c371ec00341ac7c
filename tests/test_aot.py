"""The programs of real sizes, compiled for H100s and TPUs that are not there, and read.

``pip install -e '.[test,aot]'``, then ``XLA_FLAGS= pytest -n 0 -m aot``: optimized, as for a real run.
"""

from dataclasses import replace
from functools import cache

import pytest

from jaxgrow.drop import LayerDrop
from jaxgrow.models import GPT2Config, LlamaConfig
from train.ahead.estimate import fits
from train.ahead.machines import described
from train.ahead.rehearsal import Program, Rehearsal
from train.data.text import Data
from train.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Scratch, Stage
from train.state.mesh import Mesh
from train.state.optim import Optim

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]  # plugins that miss their devices warn
GB = 1e9
GPT2 = GPT2Config(vocab=50304, dtype="bfloat16")
LLAMA = LlamaConfig(layers=32, embed=4096, heads=32, kv_heads=32, head_dim=128, mlp=11008, dtype="bfloat16", remat=True)
THIRTEEN = replace(LLAMA, layers=40, embed=5120, heads=40, kv_heads=40, mlp=13824)
DROPS = {
    "dense": None,
    "cond": LayerDrop(theta=0.5),
    "gather": LayerDrop(theta=0.5, execution="gather"),
}


def experiment(model, batch, **changes):
    values = {"name": "ahead", "model": model, "steps": 1000, "batch": batch, "data": Data(source="text", path="text")}
    return Experiment(**values | {"optim": Optim(warmup=10)} | changes)


@cache
def step(machine: str, drop: str) -> Program:
    """That of GPT-2 124M, T = 1024, 16 sequences a device; with layer dropping, the one that drops."""
    at = described(machine)
    e = experiment(GPT2, 16 * len(at.devices), method=Scratch(DROPS[drop]))
    programs = [p for p in Rehearsal(e, at).run() if p.what.startswith("step")]
    return min(programs, key=lambda p: p.flops)


@pytest.mark.parametrize("machine", ["h100:1", "h100:8"])
@pytest.mark.parametrize("drop", DROPS)
def test_gpt2_on_h100s(machine, drop):
    found = step(machine, drop)
    assert 1.4 * GB < found.parameters + found.moments < 1.6 * GB
    assert found.temporary < 4.5 * GB  # 9.75 with all logits at once
    assert found.conditionals == (2 if drop == "cond" else 0)
    if machine == "h100:1":
        assert not found.collectives
        return
    # Every gradient is added once, in float32, at the end of the step.
    assert {c.kind for c in found.collectives} == {"all-reduce"} and all(c.times == 1 for c in found.collectives)
    assert sum(c.size for c in found.collectives) == pytest.approx(found.parameters, rel=0.01)


def test_a_7b_llama_divided_over_eight_h100s():
    machine = described("h100:8")
    e = experiment(LLAMA, 128, accumulate=8, mesh=Mesh(fsdp=8))
    programs = Rehearsal(e, machine).run()
    assert fits(programs, machine)
    found = next(p for p in programs if p.what == "step")
    assert found.parameters == pytest.approx(6.738e9 * 4 / 8, rel=0.01)
    assert {"all-gather", "reduce-scatter"} <= {c.kind for c in found.collectives}
    alone = experiment(LLAMA, 128, accumulate=8)
    assert not fits(Rehearsal(alone, machine).run(), machine)  # the control: whole on every device


def test_it_grows_to_13b_where_it_lies():
    """No device ever has all of it: beside its part of the source and of the result, a few leaves' parts."""
    machine = described("h100:8")
    method = Growing(LLAMA, "small-seed0", (GrowTo((Stage(1.0),), by=("aki", "stack")),))
    e = experiment(THIRTEEN, 128, accumulate=8, mesh=Mesh(fsdp=8), method=method)
    found = next(p for p in Rehearsal(e, machine).run() if p.what == "grow")
    result = 13.016e9 * 4 / 8
    largest = 40 * 5120 * 13824 * 4 / 8
    assert found.parameters == pytest.approx(6.738e9 * 4 / 8, rel=0.01)
    assert found.temporary < result + 8 * largest


def test_gpt2_of_two_layers_on_a_tpu():
    machine = described("v5e:2x2")
    e = experiment(replace(GPT2, layers=2, vocab=1024), 16, method=Scratch(DROPS["cond"]))
    found = min((p for p in Rehearsal(e, machine).run() if p.what.startswith("step")), key=lambda p: p.flops)
    assert found.conditionals == 2 and {c.kind for c in found.collectives} == {"all-reduce"}
