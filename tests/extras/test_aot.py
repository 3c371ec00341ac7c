"""AOT compilation: programs of real sizes for H100s and TPUs that are not attached.

The compiled programs are inspected. Run with ``pip install -e '.[test,aot]'``, then ``XLA_FLAGS=
pytest -n 0 -m aot``. They are optimized as for a real run.
"""

import re
from dataclasses import replace
from functools import cache
from typing import get_args

import jax
import pytest

from jaxgrow import grow
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models.stack import Remat
from jaxgrow.operators import hypercloning, stack
from jaxgrow.sharding import partition_spec
from train.config.experiment import load_experiment
from train.extras.aot.compilation import AotRun, Program
from train.extras.aot.estimate import memory_fits, time_bound
from train.extras.aot.machines import describe_machine
from train.extras.aot.roofline import program_kernels
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.state.mesh import Mesh

# Plugins warn about missing devices.
pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
GB = 1e9
GPT2, LLAMA = "configs/papers/gpt.py:base_c4", "configs/papers/llama.py"
DROPS = {
    "dense": (),
    "cond": (DropLayers(LayerDrop(theta=0.5)),),
    "gather": (DropLayers(LayerDrop(theta=0.5, execution="gather")),),
}


@cache
def program(config: str, machine: str, what: str = "step") -> Program:
    """Compile a config for a machine and return one of its programs."""
    programs = AotRun(load_experiment(config), describe_machine(machine)).run()
    (found,) = [p for p in programs if p.what == what]
    return found


@cache
def step(machine: str, drop: str) -> Program:
    """Compile the step of GPT-2 124M, which drops layers if it can, with 16 sequences per device."""
    at = describe_machine(machine)
    e = load_experiment(f"{GPT2}:batch={16 * len(at.devices)}")
    programs = AotRun(replace(e, method=Scratch(DROPS[drop])), at).run()
    return min((p for p in programs if p.what.startswith("step")), key=lambda p: p.flops)


@pytest.mark.parametrize("machine", ["h100:1", "h100:8"])
@pytest.mark.parametrize("drop", DROPS)
def test_gpt2_on_h100s(machine, drop):
    found = step(machine, drop)
    assert 1.4 * GB < found.parameters + found.moments < 1.6 * GB
    assert found.temporary < 4.7 * GB  # the float32 logits of all positions would take 3.3 more
    assert found.conditionals == (2 if drop == "cond" else 0)
    if machine == "h100:1":
        assert not found.collectives
        return
    # Every gradient is added once, in float32, at the end of the step.
    assert {(c.kind, c.times) for c in found.collectives} == {("all-reduce", 1)}
    assert sum(c.size for c in found.collectives) == pytest.approx(found.parameters, rel=0.01)


def test_logits_of_all_positions_at_once_would_take_3_gb_more():
    """The control of the bound on temporary memory above."""
    found = program(f"{GPT2}:batch=16:model.head_positions={16 * 1024}", "h100:1")
    assert found.temporary > step("h100:1", "dense").temporary + 2.5 * GB


def test_a_7b_llama_divided_over_eight_h100s():
    machine = describe_machine("h100:8")
    e = load_experiment(f"{LLAMA}:llama_7b_c4")
    programs = AotRun(e, machine).run()
    assert memory_fits(programs, machine)
    found = next(p for p in programs if p.what == "step")
    assert found.parameters == pytest.approx(6.738e9 * 4 / 8, rel=0.01)
    assert {"all-gather", "reduce-scatter"} <= {c.kind for c in found.collectives}
    # The control is replicated on every device.
    assert not memory_fits(AotRun(replace(e, mesh=Mesh()), machine).run(), machine)


LLAMA_7B = f"{LLAMA}:llama_7b_c4:model.layers=6:batch=32:accumulate=2:model.remat=projections"


def test_exchanges_of_each_layer_overlap_with_matrix_products():
    """The first gather of a layer and the reduction of attention's gradient also overlap."""
    found = program(f"{LLAMA_7B}:mesh.gradients=layer", "h100:8")
    layers = [c for c in found.collectives if c.times > 2 and c.size > 1e6]
    assert {c.kind for c in layers} == {"all-gather", "reduce-scatter"}
    assert all(c.asynchronous and c.products for c in layers)
    fused = 3 * 4096 * 4096 * 2  # queries, keys and values in bfloat16
    for kind in ("all-gather", "reduce-scatter"):
        assert any(c.kind == kind and fused <= c.size < 1.1 * fused for c in layers)


def test_gradients_are_reduced_once_per_step_in_float32():
    found = program(f"{LLAMA_7B}:mesh.gradients=step", "h100:8")
    reduced = [c for c in found.collectives if c.kind == "reduce-scatter"]
    assert all(c.times == 1 for c in reduced)
    # The size of all gradients in float32.
    assert sum(c.size for c in reduced) == pytest.approx(8 * found.parameters, rel=0.01)


class Texts(AotRun):
    """Also keep XLA's text of the last program."""

    def _compiled_once(self, lowered):
        found = super()._compiled_once(lowered)
        self.text = found[1]
        return found

    def validate(self, step, model): ...


def test_an_unrolled_step_has_fused_products_and_few_arguments():
    config = "batch=4:model.layers=2:model.vocab=1024:model.remat=none:model.scan_layers=False"
    run = Texts(load_experiment(f"{GPT2}:{config}"), describe_machine("h100:1"))
    run.run()
    found = program_kernels(run.text)
    fused = 2.0 * 4 * 1024 * 768 * 3 * 768
    attention = [k for k in found if "/attention/" in k.path and "/out" not in k.path]
    # One product of queries, keys and values in the forward pass, and two in the backward pass.
    products = [k for k in attention if k.flops and "dot_product_attention" not in k.path]
    assert [k.flops for k in products] == [fused] * 6
    assert not any(k.path.endswith("/add") for k in attention)  # biases are within other kernels
    entry = run.text[run.text.index("\nENTRY") :]
    assert not re.search(r"= f32\[2,[\d,]+\]\S* broadcast\(", entry)  # stacks of zeros
    assert len(re.findall(r"= [suf]32\[\]\S* parameter\(", entry)) <= 3  # of `StepInputs`


MIXTURE = f"{LLAMA}:llama_8x160m_c4:batch=64"


def test_a_mixture_over_four_h100s_sends_kernels_and_no_tokens():
    """Without explicit sharding, XLA sent and stored ten times as many bytes."""
    config = f"{MIXTURE}:model.layers=2:mesh.fsdp=4:model.remat=projections"
    found = program(config, "h100:4")
    # the number of tokens per expert
    assert sum(c.size for c in found.collectives if c.kind == "all-reduce") < 1e4
    assert sum(c.sent for c in found.collectives) < 0.7 * GB and found.temporary < 3 * GB


def test_experts_on_eight_h100s_exchange_tokens_only():
    config = f"{MIXTURE}:model.layers=1:mesh.fsdp=1:mesh.expert=8:model.capacity=1.25"
    found = program(config, "h100:8")
    exchanges = [c for c in found.collectives if c.kind == "all-to-all"]
    # dispatch and combine, in the forward and the backward pass
    assert len(exchanges) >= 4 and all(c.asynchronous for c in exchanges)
    gathered = [c.size for c in found.collectives if c.kind in ("all-gather", "reduce-scatter")]
    # only the router; the kernel of one expert has 3.1e6 bytes
    assert max(gathered, default=0) < 1e5
    assert found.temporary < 3 * GB


def test_it_grows_to_13b_where_it_lies():
    """A device holds its shards of the source, of the model between two operators and of the result,
    and one shard of a single leaf.
    """
    found = program(f"{LLAMA}:llama_13b_grown", "h100:8", "grow")
    result, deeper = 13.016e9 * 4 / 8, 6.738e9 * 40 / 32 * 4 / 8
    largest = 40 * 5120 * 13824 * 4 / 8
    assert found.parameters == pytest.approx(6.738e9 * 4 / 8, rel=0.01)
    assert found.temporary < result + deeper + largest


SMALL = {"layers": 40, "embed": 4096, "mlp": 14336}


@pytest.mark.parametrize("names", [("layers", "embed.in", "mlp"), ("layers", "mlp.in", "embed")])
@pytest.mark.parametrize("fsdp", [8, 2])
def test_leaves_of_a_70b_model_grow_within_their_shards(names, fsdp):
    mesh = Mesh(1, fsdp, 8 // fsdp).over(list(describe_machine("h100:8").devices))
    growth = stack(SMALL, {"layers": 80}) | hypercloning(SMALL, {"embed": 8192, "mlp": 28672})
    shape = tuple(SMALL[name.removesuffix(".in")] for name in names)
    where = jax.sharding.NamedSharding(mesh, partition_spec(names, shape, mesh))
    leaf = {"kernel": jax.ShapeDtypeStruct(shape, "float32", sharding=where)}
    with jax.set_mesh(mesh):
        grown = jax.jit(lambda x: grow(growth, x, {"kernel": names})).lower(leaf)
        memory = grown.compile().memory_analysis()
    assert memory.argument_size_in_bytes == 40 * 4096 * 14336 * 4 / 8
    assert memory.output_size_in_bytes == 8 * memory.argument_size_in_bytes
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes


@cache
def divided(optimizer: str, machine: str) -> Program:
    """Compile the step of GPT-2 124M over eight devices."""
    e, at = load_experiment(f"{GPT2}:batch=64:mesh.fsdp=8"), describe_machine(machine)
    programs = AotRun(replace(e, optim=replace(e.optim, name=optimizer)), at).run()
    assert memory_fits(programs, at)
    return next(p for p in programs if p.what == "step")


def largest(program: Program) -> float:
    """Return the size of the largest all-gather in bytes."""
    return max(c.size for c in program.collectives if c.kind == "all-gather")


def test_muon_over_eight_h100s():
    """Muon orthogonalizes each matrix on one device, and none gathers a stack of matrices."""
    adam, muon = divided("adamw", "h100:8"), divided("muon", "h100:8")
    assert largest(muon) == largest(adam)  # from the forward and the backward pass
    assert muon.moments < 0.7 * adam.moments and muon.temporary < 1.1 * adam.temporary
    assert sum(c.sent for c in muon.collectives) < 1.6 * sum(c.sent for c in adam.collectives)


def test_muon_over_eight_tpus():
    # smaller than a stack of matrices
    assert largest(divided("muon", "v5e:2x4")) < 12 * 768 * 3072 * 4


def choosing(choice: str) -> Program:
    return program(f"{GPT2}:batch=16{choice}", "h100:1")


def test_the_less_a_layer_saves_the_less_memory_a_step_takes():
    taken = [choosing(f":model.remat={remat}").temporary for remat in get_args(Remat)]
    assert taken == sorted(taken, reverse=True) and taken[-1] < taken[0] / 2


def test_unrolled_layers_take_no_more_memory_than_scanned_ones():
    assert choosing(":model.scan_layers=False").temporary < 1.1 * choosing("").temporary


def has_kernel(found: Program) -> bool:
    return any("fmha" in name or "cudnn" in name for name in found.kernels)


def test_attention_by_a_kernel_and_by_xla():
    kernel, xla = choosing(""), choosing(":model.attention=xla")
    assert has_kernel(kernel) and not has_kernel(xla) and xla.temporary > kernel.temporary


@pytest.mark.parametrize("mesh", [":mesh.fsdp=2", ":mesh.fsdp=2:mesh.tensor=2"])
def test_attention_kernel_with_two_sharded_axes(mesh):
    """JAX's partitioning rule of the cuDNN kernel fails if two mesh axes shard the batch."""
    assert has_kernel(program(f"{GPT2}:batch=16:model.layers=2:model.vocab=1024{mesh}", "h100:4"))


@pytest.mark.parametrize("mesh", ["", ":mesh.fsdp=2:mesh.tensor=2"], ids=["whole", "divided"])
def test_gpt2_of_two_layers_on_a_tpu(mesh):
    e = load_experiment(f"{GPT2}:batch=16:model.layers=2:model.vocab=1024{mesh}")
    e = replace(e, method=Scratch(DROPS["cond"]))
    programs = AotRun(e, describe_machine("v5e:2x2")).run()
    found = min((p for p in programs if p.what.startswith("step")), key=lambda p: p.flops)
    assert found.conditionals == 2 and "tpu_custom_call" in found.kernels
    if not mesh:
        assert {c.kind for c in found.collectives} == {"all-reduce"}


def test_a_tiny_plan_is_compiled_and_priced():
    """All programs of a plan with a transformation compile; `.ci/run` also runs this case."""
    sizes = "model.layers=2:model.embed=32:model.mlp=64:model.context=64:batch=8"
    at = describe_machine("v5e:2x2")
    found = AotRun(load_experiment(f"configs/demo.py:vcycle:{sizes}"), at).run()
    assert memory_fits(found, at) and {p.what for p in found if not p.flops} <= {"initialisation"}
    assert {"step", "coalesce", "evaluation"} <= {p.what for p in found}
    free = []
    for program in found:
        least = time_bound(program, at)
        assert least is not None and (not program.flops or 0 < least.utilisation <= 1)
        if least.seconds == 0:
            free.append((program.phase, program.what))
    # A phase that continues a model starts in the memory of that model, so nothing is moved.
    assert free == [("train coarse1", "initialisation"), ("train large", "initialisation")]
    first = next(program for program in found if program.what == "initialisation")
    assert time_bound(first, at).seconds > 0  # but the first model is computed
