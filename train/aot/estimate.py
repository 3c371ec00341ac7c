"""What compiled programs take on a machine, at least: memory, time, and what would fit if they do not."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxgrow.models.layers import Remat
from train.aot.compilation import Program, Rehearsal
from train.aot.hlo import Collective
from train.aot.machines import Chip, Machine
from train.common.errors import UserError
from train.config.experiment import Experiment

REMATS = get_args(Remat)  # the later, the less a layer saves


@dataclass(frozen=True)
class Bound:
    """Seconds of a run of a program that no implementation of this program is below.

    Attributes:
      parts: seconds of the kernels of each part of the step (`train.aot.roofline`), the longest
        first.
      products: seconds that the products of the model take at the peak of all devices.
      links: seconds that the links within a host and between hosts are busy.
    """

    parts: dict[str, float]
    products: float
    links: float

    @property
    def seconds(self) -> float:
        """Kernels run one after the other; what is exchanged may overlap with all of them."""
        return max(sum(self.parts.values()), self.products, self.links)

    @property
    def by(self) -> str:
        """The part that takes longest, or "links" where they are busy for longer than all kernels together."""
        if self.links >= max(sum(self.parts.values()), self.products) or not self.parts:
            return "links"
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (MFU) that no run of this program exceeds."""
        return self.products / self.seconds if self.seconds else 0.0


def bound(program: Program, machine: Machine) -> Bound | None:
    """The least time of a run of a program; None for a machine whose figures its manufacturer does not state."""
    chip = machine.chip
    if not (chip.flops and chip.bandwidth and chip.links):
        return None
    products = program.flops / len(machine.devices) / chip.flops
    return Bound(
        program.roofline.parts, products, sum(_seconds(c, chip) for c in program.collectives)
    )


def _seconds(c: Collective, chip: Chip) -> float:
    """Seconds that an exchange takes at least.

    Between hosts, every device of a group sends its share through the adapter of its own: the more
    of the group are on one host, the more adapters its host has for what all of them send.
    """
    inside = c.sent / (chip.links or math.inf)
    if not c.local or chip.network is None:
        return inside
    return max(inside, c.sent / (c.local * chip.network))


# What helps where a part of the step takes longest.
HELP = {
    "copies of scans": "model.scan_layers=False keeps no stacked copies of what layers save",
    "optimizer": "a larger batch, or accumulate, spreads an update over more tokens",
    "links": "fewer micro-batches (accumulate) gather and add less often; mesh.data gathers no parameters, mesh.fsdp does",
    "head": "a smaller vocabulary, or more layers for the same head: the logits are read and written in float32",
    "attention": "model.attention=auto uses a fused kernel where the shapes allow it",
    "other": "model.remat saves or recomputes what lies between the products",
}


# What ``model.remat=auto`` tries, the fastest first: ``(remat, whether layers are scanned)``.
CHOICES: tuple[tuple[Remat, bool], ...] = (
    ("none", False),
    ("products", False),
    ("products", True),
    ("projections", True),
    ("full", True),
)
# Unrolled programs of deeper models take many minutes to compile (48 layers: 18 minutes).
UNROLLED_LAYERS = 24


def settled(
    experiment: Experiment,
    machine: Machine,
    say: Callable[[str], None],
    compiled: Callable[[Experiment], list[Program]] | None = None,
) -> tuple[Experiment, list[Program]]:
    """The experiment without ``model.remat=auto`` and ``mesh.gradients=auto``, and its programs where they were compiled.

    ``remat`` becomes the first of `choices` with which every program fits the memory of the
    machine, or the last one; and ``gradients``, of the two ways that fit, the one of the lower
    bound. Where the platform states no limit of its memory, as a CPU, they are "products" with
    scanned layers, and "layer".

    Args:
      experiment: what is to run.
      machine: what it is compiled for.
      say: what to do with a line about each attempt.
      compiled: makes the programs of an experiment; by default all of its plan.
    """
    compiled = compiled or (lambda e: Rehearsal(e, machine, say).run())
    if machine.limit is None and machine.chip.memory is None:
        return _plain(experiment), []
    tried = [
        list(same)
        for _, same in itertools.groupby(choices(experiment), lambda choice: choice[1].model)
    ]
    if len(tried) == len(tried[0]) == 1:
        return tried[0][0][1], []
    found: list[tuple[str, Experiment, list[Program]]] = []
    fitting = found
    for same in tried:
        found = [(text, chosen, compiled(chosen)) for text, chosen in same]
        for text, _, programs in found:
            say(
                f"{text}: {max(p.memory for p in programs) / 1e9:.3g} of {machine.memory / 1e9:.3g} GB"
            )
        fitting = [each for each in found if fits(each[2], machine)]
        if fitting or same is tried[-1]:
            break
    text, chosen, programs = min(
        fitting or found[-1:], key=lambda each: days(each[2], machine) or 0.0
    )
    say(f"takes {text}")
    if (
        _can_add_once(experiment)
        and chosen.mesh.gradients == "layer"
        and experiment.mesh.gradients == "auto"
    ):
        why = "would take longer at least" if len(fitting) > 1 else "does not fit"
        say(
            f"gradients are added for each layer and micro-batch, in the dtype of activations: once a step {why}"
        )
    return chosen, programs


def choices(experiment: Experiment) -> Iterator[tuple[str, Experiment]]:
    """``(what is set, the experiment with it)`` for what its "auto" may become, the fastest first."""
    model, mesh = experiment.model, experiment.mesh
    automatic = model.remat == "auto"
    deep = model.depth > UNROLLED_LAYERS
    tried = [choice for choice in CHOICES if choice[1] or not deep]
    for remat, scan in tried if automatic else ((model.remat, model.scan_layers),):
        for gradients in _gradients(experiment):
            texts = [f"model.remat={remat}", f"model.scan_layers={scan}"] if automatic else []
            texts += [f"mesh.gradients={gradients}"] if mesh.gradients == "auto" else []
            run = replace(model, remat=remat, scan_layers=scan)
            yield (
                " ".join(texts),
                replace(experiment, model=run, mesh=replace(mesh, gradients=gradients)),
            )


def _gradients(experiment: Experiment) -> tuple[Literal["layer", "step"], ...]:
    if experiment.mesh.gradients != "auto":
        return (experiment.mesh.gradients,)
    return ("step", "layer") if _can_add_once(experiment) else ("layer",)


def _can_add_once(experiment: Experiment) -> bool:
    mesh = experiment.mesh
    return (
        mesh.fsdp > 1
        and mesh.tensor * mesh.context * mesh.expert == 1
        and experiment.parallel == "mesh"
    )


def _plain(experiment: Experiment) -> Experiment:
    remat = "products" if experiment.model.remat == "auto" else experiment.model.remat
    gradients = "layer" if experiment.mesh.gradients == "auto" else experiment.mesh.gradients
    mesh = replace(experiment.mesh, gradients=gradients)
    return replace(experiment, model=replace(experiment.model, remat=remat), mesh=mesh)


def fits(programs: list[Program], machine: Machine) -> bool:
    return all(p.memory <= machine.memory for p in programs)


def smaller(experiment: Experiment, devices: int) -> Iterator[tuple[list[str], Experiment]]:
    """``(what is set, the experiment with it)``, the cheapest changes first, that need less memory."""
    mesh = experiment.mesh
    meshes = [([], mesh)]
    inner = mesh.tensor * mesh.expert * mesh.context * mesh.replica
    if devices > mesh.fsdp * inner and experiment.parallel == "mesh":
        fsdp = devices // inner
        meshes.append(([f"mesh.data=1 mesh.fsdp={fsdp}"], replace(mesh, data=1, fsdp=fsdp)))
    for sharded, mesh in meshes:
        for remat in REMATS[REMATS.index(experiment.model.remat) :]:
            accumulate = experiment.accumulate
            while experiment.batch % (accumulate * devices) == 0:
                changes = [*sharded]
                changes += [f"model.remat={remat}"] if remat != experiment.model.remat else []
                changes += (
                    [f"accumulate={accumulate}"] if accumulate != experiment.accumulate else []
                )
                if changes:
                    model = replace(experiment.model, remat=remat)
                    yield (
                        changes,
                        replace(experiment, mesh=mesh, model=model, accumulate=accumulate),
                    )
                accumulate *= 4


def larger(experiment: Experiment) -> Iterator[tuple[list[str], Experiment]]:
    """``(what is set, the experiment with it)`` that takes more memory and less time, the largest changes first."""
    remats = REMATS[: REMATS.index(experiment.model.remat) + 1]
    for accumulate in (
        experiment.accumulate // 4,
        experiment.accumulate // 2,
        experiment.accumulate,
    ):
        for remat in remats:
            changes = [f"model.remat={remat}"] if remat != experiment.model.remat else []
            changes += [f"accumulate={accumulate}"] if accumulate != experiment.accumulate else []
            if changes and accumulate and experiment.batch % accumulate == 0:
                yield (
                    changes,
                    replace(
                        experiment,
                        model=replace(experiment.model, remat=remat),
                        accumulate=accumulate,
                    ),
                )


def using(
    experiment: Experiment, programs: list[Program], machine: Machine, say: Callable[[str], None]
) -> str | None:
    """A setting that uses the memory that is left and lowers the bound of the plan, with both times; None, if none does.

    Only where at least half of the memory is left, and at most three settings are tried: each
    compiles the plan again.
    """
    before = days(programs, machine)
    if before is None or max(p.memory for p in programs) > machine.memory / 2:
        return None
    for changes, other in itertools.islice(larger(experiment), 3):
        say(f"{machine.name} has memory left: trying {' '.join(changes)}")
        found = Rehearsal(other, machine).run()
        after = days(found, machine)
        if fits(found, machine) and after is not None and after < before:
            return f"{' '.join(changes)} uses the memory that is left: {after:.3g} in place of {before:.3g} days at least"
    return None


def days(programs: list[Program], machine: Machine, utilisation: float = 1.0) -> float | None:
    """Days that all programs take at least, or longer, where products reach no more than a part of the peak."""
    total = 0.0
    for program in programs:
        found = bound(program, machine)
        if found is None:
            return None
        total += program.steps * max(found.seconds, found.products / utilisation)
    return total / 86400


def fitting(
    experiment: Experiment, machine: Machine, say: Callable[[str], None]
) -> list[str] | None:
    """The first changes with which every program fits, or None."""
    for changes, other in smaller(experiment, len(machine.devices)):
        say(f"trying {' '.join(changes)}")
        try:
            if fits(Rehearsal(other, machine).run(), machine):
                return changes
        except (UserError, ValueError):
            continue
    return None
