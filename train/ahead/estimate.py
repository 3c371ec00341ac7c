"""What compiled programs take on a machine, at least: memory, time, and what would fit if they do not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from jaxgrow.models.layers import Remat
from train.ahead.machines import Machine
from train.ahead.rehearsal import Program, Rehearsal
from train.errors import UserError
from train.experiment import Experiment

REMATS = get_args(Remat)  # the later, the less a layer saves


@dataclass(frozen=True)
class Bound:
    """Seconds of a run of a program that no implementation is below: the largest of the three."""

    compute: float  # at the utilisation that is assumed
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def by(self) -> str:
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


def bound(program: Program, machine: Machine, utilisation: float = 1.0) -> Bound | None:
    """None for a machine whose figures nobody states."""
    chip = machine.chip
    if not (chip.flops and chip.bandwidth and chip.links):
        return None
    return Bound(
        program.flops / len(machine.devices) / (chip.flops * utilisation),
        program.moved / chip.bandwidth,
        sum(c.sent for c in program.collectives) / chip.links,
    )


def fits(programs: list[Program], machine: Machine) -> bool:
    return all(p.memory <= machine.memory for p in programs)


def smaller(experiment: Experiment, devices: int) -> Iterator[tuple[list[str], Experiment]]:
    """``(what is set, the experiment with it)``, the cheapest changes first, that need less memory."""
    mesh = experiment.mesh
    meshes = [([], mesh)]
    if devices > mesh.fsdp * mesh.tensor and experiment.parallel == "mesh":
        fsdp = devices // mesh.tensor
        meshes.append(([f"mesh.data=1 mesh.fsdp={fsdp}"], replace(mesh, data=1, fsdp=fsdp)))
    for sharded, mesh in meshes:
        for remat in REMATS[REMATS.index(experiment.model.remat) :]:
            accumulate = experiment.accumulate
            while experiment.batch % (accumulate * devices) == 0:
                changes = [*sharded]
                changes += [f"model.remat={remat}"] if remat != experiment.model.remat else []
                changes += [f"accumulate={accumulate}"] if accumulate != experiment.accumulate else []
                if changes:
                    model = replace(experiment.model, remat=remat)
                    yield changes, replace(experiment, mesh=mesh, model=model, accumulate=accumulate)
                accumulate *= 4


def fitting(experiment: Experiment, machine: Machine, say) -> list[str] | None:
    """The first changes with which every program fits, or None."""
    for changes, other in smaller(experiment, len(machine.devices)):
        say(f"trying {' '.join(changes)}")
        try:
            if fits(Rehearsal(other, machine).run(), machine):
                return changes
        except (UserError, ValueError):
            continue
    return None
