"""A sharded model is initialised, trained, grown, saved and loaded like a model on one device."""

from dataclasses import replace

import counting
import jax
import pytest
import runs
import tiny
from jax.sharding import AbstractMesh

from jaxgrow import flops, sharding
from jaxgrow.axes import axis_of, leaves
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import LlamaConfig
from train import pretrain
from train.common.errors import UserError
from train.extras.aot import memory
from train.plan.methods import Growing, GrowTo, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.training import PhaseStart
from train.state.mesh import Mesh, token_devices
from train.state.model import shardings
from train.state.optim import Optim
from train.step import programs
from train.store.checkpoint import Checkpoints

MESHES = {
    "data": Mesh(4),
    "fsdp": Mesh(fsdp=4),
    "tensor": Mesh(tensor=2),
    "fsdp and tensor": Mesh(1, 2, 2),
}
SBLD = LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2))
METHODS = {
    "from scratch": Scratch(),
    "SBLD": Scratch((DropLayers(SBLD),)),
    "V-cycle, corrected": VCycle((TrainStage(0.25),),
        (TrainStage(0.5, modifiers=(DropLayers(LayerDrop(execution="gather")),)), TrainStage(0.5)), correction=True,
        moments_up="exact"),
    "grown": Growing(runs.SMALL, TrainStage(0.25), (GrowTo((TrainStage(0.5),), runs.DOUBLED, moments="exact"),)),
}  # fmt: skip


# Related tests: `test_hosts` (layer dropping), `test_sharding` (growth) and `test_muon` (a run that
# grows).
FAST = ("from scratch", "fsdp and tensor")  # the next test trains on this mesh as well
ODD = replace(runs.MODEL, heads=1, head_dim=8)  # axes that are not divisible are replicated


@pytest.fixture(scope="module")
def one_device(request, tmp_path_factory):
    """Return an experiment and the folder of its run on one device."""
    folder = tmp_path_factory.mktemp("one")
    changes = {"batch": 16, "accumulate": 2, "checkpoint_every": 2, "eval_every": 8}
    changes["optim"] = Optim(eps=1e-3)
    model = {"grown": runs.LARGE, "from scratch": ODD}.get(request.param, runs.MODEL)
    e = runs.experiment(folder, model=model, method=METHODS[request.param], **changes)
    with runs.only(1):
        pretrain.run_experiment(e, folder / "run")
    return e, folder / "run"


methods = pytest.mark.parametrize(
    "one_device",
    [pytest.param(m, marks=[pytest.mark.slow] * (m != "from scratch")) for m in METHODS],
    indirect=True,
    scope="module",
)


MESHES_OF = [("from scratch", mesh) for mesh in MESHES]
MESHES_OF += [(method, FAST[1]) for method in METHODS if method != FAST[0]]


@pytest.mark.parametrize(
    ("one_device", "mesh"),
    [
        pytest.param(*of, marks=pytest.mark.extra if of == FAST else pytest.mark.slow)
        for of in MESHES_OF
    ],
    indirect=["one_device"],
    scope="module",
)
def test_one_batch_gives_equal_losses_on_every_mesh(one_device, tmp_path, monkeypatch, mesh):
    e, whole = one_device
    divided, save = set(), Checkpoints.save

    def looking(self, step, models, *rest):
        for model in models.values():
            where = shardings(model, MESHES[mesh].over(jax.devices()))
            for x, expected in zip(jax.tree.leaves(model), jax.tree.leaves(where), strict=True):
                assert x.sharding.is_equivalent_to(expected, x.ndim)
                divided.update(axis for axis in expected.spec if axis is not None)
        save(self, step, models, *rest)

    monkeypatch.setattr(Checkpoints, "save", looking)
    pretrain.run_experiment(replace(e, mesh=MESHES[mesh]), tmp_path / "run")
    runs.assert_close(tmp_path / "run", whole)
    assert divided == {name for name in ("fsdp", "tensor") if getattr(MESHES[mesh], name) > 1}


@methods
def test_a_run_stopped_on_four_devices_resumes_on_two(tmp_path, one_device):
    e, whole = one_device
    runs.killed(replace(e, mesh=Mesh(1, 2, 2)), tmp_path / "run", 4)
    with runs.only(2):
        pretrain.run_experiment(replace(e, mesh=Mesh(1, 2)), tmp_path / "run")
    runs.assert_close(tmp_path / "run", whole)


@methods
@pytest.mark.slow
def test_pmap_and_the_mesh_give_the_same_numbers(tmp_path, one_device):
    e, whole = one_device
    pretrain.run_experiment(replace(e, parallel="pmap"), tmp_path / "run")
    runs.assert_close(tmp_path / "run", whole)


def test_every_leaf_is_divided_by_the_names_of_its_axes():
    config = tiny.config(layers=2, dtype="float32")
    params, names = tiny.params(config, dtype="float32"), config.axes()
    found = sharding.partition_specs(params, names, AbstractMesh((2, 2), ("fsdp", "tensor")))
    for (path, x, of), spec in zip(leaves(params, names), jax.tree.leaves(found), strict=True):
        for name, size, over in zip(of, x.shape, spec, strict=True):
            rule = sharding.RULES.get(axis_of(name))
            assert over == (rule if size % 2 == 0 else None), (path, spec)


def killed_at_start(monkeypatch, experiment, folder):
    """Run, and kill the run before anything is compiled."""

    def start(*_):
        raise runs.Killed

    with monkeypatch.context() as patch, pytest.raises(runs.Killed):
        patch.setattr(programs, "made", start)
        pretrain.run_experiment(experiment, folder)


@pytest.mark.parametrize(("heads", "changes"), [
    (3, {"model": replace(runs.MODEL, heads=3, head_dim=4)}),
    (1, {"model": runs.LARGE, "method": METHODS["grown"]}),
])  # fmt: skip
def test_what_does_not_divide_is_said(tmp_path, capsys, monkeypatch, heads, changes):
    """The warning appears before anything is compiled; ``ODD`` above trains such an axis."""
    odd = runs.experiment(tmp_path, mesh=Mesh(tensor=2), **changes)
    killed_at_start(monkeypatch, odd, tmp_path / "run")
    says = f"axis 'heads' of size {heads} is not divisible by the 2 devices of mesh axis tensor, so it is replicated"
    assert says in capsys.readouterr().err


def test_the_capacity_of_experts_binds_the_number_of_devices(tmp_path, monkeypatch):
    """With mesh.data=0, the settings of both runs are equal."""
    model = LlamaConfig(
        **dict(vocab=256, context=8, layers=1, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=8),
        **dict(experts=4, active=2, capacity=1.25),
    )
    e = runs.experiment(tmp_path, model=model)
    killed_at_start(monkeypatch, e, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")  # the run has begun
    says = "has divided its batches among 4 devices, but now among 2, and .*: divide them among 4 again"
    with runs.only(2):
        with pytest.raises(UserError, match=says):
            pretrain.run_experiment(e, tmp_path / "run")
        killed_at_start(monkeypatch, e, tmp_path / "other")
    killed_at_start(monkeypatch, e, tmp_path / "run")


@pytest.mark.parametrize(("mesh", "says"), [
    (Mesh(3), "a mesh of data=3 x fsdp=1 x tensor=1 does not fit 4 devices: set mesh.data"),
    (Mesh(fsdp=8), "a mesh of data=any x fsdp=8 x tensor=1 does not fit 4 devices"),
])  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused(tmp_path, mesh, says):
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(runs.experiment(tmp_path, mesh=mesh), tmp_path / "run")


def test_a_too_large_model_is_reported_before_allocation(tmp_path, monkeypatch):
    """Parameters, gradients and both moments in float32 need 16 bytes per parameter.

    Adam's counters are added.
    """
    e = runs.experiment(tmp_path)
    parameters = sum(x.size for x in jax.tree.leaves(runs.fresh(runs.MODEL)))
    meshes = (mesh.over(jax.devices()) for mesh in (Mesh(), Mesh(fsdp=4)))
    whole, divided = (memory.held_bytes(e.plan, e.tx, mesh) for mesh in meshes)
    assert 16 * parameters < whole < 16 * parameters + 200
    assert whole / 4 < divided < whole / 2
    monkeypatch.setattr(programs, "made", None)
    says = rf"needs {whole / 1e9:.3g} GB .* on each device, which has {divided / 1e9:.3g} GB, and "
    says += "activations are not yet counted: with --set mesh.data=1 --set mesh.fsdp=4 it needs"
    for limit, said in ((divided, says), (divided - 1, "use more devices or a smaller model")):
        monkeypatch.setattr(memory, "memory_limit", lambda limit=limit: limit)
        with pytest.raises(UserError, match=said):
            pretrain.run_experiment(e, tmp_path / "run")
    monkeypatch.setattr(memory, "memory_limit", lambda: divided)
    says = "with --set parallel=mesh --set mesh.data=1 --set mesh.fsdp=4 it needs"
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(replace(e, parallel="pmap"), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_cost_of_experts_is_that_of_the_tokens_on_each_device():
    """How many rows of experts are empty depends on the number of tokens that a device has."""
    model = LlamaConfig(
        **dict(vocab=11, context=36, layers=2, embed=4, heads=1, kv_heads=1, head_dim=4, mlp=3),
        **dict(experts=5, active=2),
    )
    mesh = Mesh(2, context=2).over(jax.devices())
    (*_, trained), arguments = counting.programs(model)
    with jax.set_mesh(mesh):
        counted = counting.products(jax.make_jaxpr(trained)(*arguments).jaxpr)
    setting = PhaseStart({}, 0, 2, 1, 0, token_devices(mesh))
    assert flops.train_flops(model, 72, at_once=setting.at_once(72)) == pytest.approx(counted)
    assert flops.train_flops(model, 72, at_once=72) != pytest.approx(counted)
