"""Lower bounds of the memory and time of compiled programs, and settings that fit a machine."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxgrow.models.stack import Remat
from train.common.errors import UserError
from train.config.experiment import AUTOMATIC, Experiment
from train.extras.aot.compilation import AotRun, Program
from train.extras.aot.hlo import Collective
from train.extras.aot.machines import Chip, Machine, common_machine, present_machine

REMATS = get_args(Remat)  # in descending order of the memory that a layer uses


@dataclass(frozen=True)
class Bound:
    """A lower bound of the seconds of one run of a compiled program, for any implementation of it.

    Attributes:
      parts: seconds of the kernels of each part of the step (`train.extras.aot.roofline`), the
        longest first.
      products: seconds that the matrix products of the model take at the peak of all devices.
      links: seconds that the links within a host and between hosts are busy.
    """

    parts: dict[str, float]
    products: float
    links: float

    @property
    def seconds(self) -> float:
        """The lower bound: kernels run in sequence, and exchanges overlap with all of them."""
        return max(sum(self.parts.values()), self.products, self.links)

    @property
    def by(self) -> str:
        """The part that takes longest, or "links" if they are busy longer than all kernels."""
        if self.links >= max(sum(self.parts.values()), self.products) or not self.parts:
            return "links"
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def utilisation(self) -> float:
        """The model FLOPs utilisation (MFU) that no run of this program exceeds."""
        return self.products / self.seconds if self.seconds else 0.0


def time_bound(program: Program, machine: Machine) -> Bound | None:
    """Return the lower bound of the time of one run of a program.

    It is None if the manufacturer does not publish the figures of the machine.
    """
    chip = machine.chip
    if not (chip.flops and chip.bandwidth and chip.links):
        return None
    products = program.flops / len(machine.devices) / chip.flops
    return Bound(
        program.roofline.parts, products, sum(_seconds(c, chip) for c in program.collectives)
    )


def _seconds(c: Collective, chip: Chip) -> float:
    """The least number of seconds that an exchange takes.

    Between hosts, every device of a group sends its share through its own network adapter. A host
    with several devices of the group therefore has several adapters for their traffic.
    """
    inside = c.sent / (chip.links or math.inf)
    if not c.local or chip.network is None:
        return inside
    return max(inside, c.sent / (c.local * chip.network))


# Advice for each part of the step, for the case that it takes longest.
HELP = {
    "copies of scans": "model.scan_layers=False avoids the stacked copies of saved activations",
    "optimizer": "a larger batch, also by accumulate, has more tokens per update",
    "links": "fewer micro-batches (accumulate) need fewer exchanges; mesh.data does not gather parameters, but mesh.fsdp does",
    "head": "use a smaller vocabulary, or more layers for the same head: the logits are read and written in float32",
    "attention": "model.attention=auto uses a fused kernel where the shapes allow it",
    "other": "model.remat decides whether the values between the matrix products are saved or recomputed",
}


# The settings that ``model.remat=auto`` tries, the fastest first: ``(remat, scan_layers)``.
CHOICES: tuple[tuple[Remat, bool], ...] = (
    ("none", False),
    ("products", False),
    ("products", True),
    ("projections", True),
    ("full", True),
)
# Unrolled programs of deeper models take many minutes to compile (48 layers: 18 minutes).
UNROLLED_LAYERS = 24


def resolve_auto(
    experiment: Experiment,
    machine: Machine,
    say: Callable[[str], None],
) -> tuple[Experiment, list[Program]]:
    """Replace ``model.remat=auto`` and ``mesh.gradients=auto`` by settings that fit the machine.

    ``remat`` becomes the first of `auto_choices` with which every program fits the memory of the
    machine, or the last one if none fits. ``gradients`` becomes the setting with the lower time
    bound, among the settings that fit. If the platform does not report the size of its memory
    (CPU), the settings are "products" with scanned layers, and "layer".

    Args:
      experiment: experiment to run.
      machine: machine to compile for.
      say: function that prints a line about each attempt.

    Returns:
      The experiment without "auto", and its programs if they were compiled.
    """
    if machine.limit is None and machine.chip.memory is None:
        chosen = _without_auto(experiment)
        _warn_of_narrow_sums(chosen, "the memory of the devices is not known", say)
        return chosen, []
    tried = [
        list(same)
        for _, same in itertools.groupby(auto_choices(experiment), lambda choice: choice[1].model)
    ]
    if len(tried) == len(tried[0]) == 1:
        chosen = tried[0][0][1]
        _warn_of_narrow_sums(chosen, _why_layer(experiment, 1), say)
        return chosen, []
    found: list[tuple[str, Experiment, list[Program]]] = []
    fitting = found
    for same in tried:
        found = [(text, chosen, AotRun(chosen, machine, say).run()) for text, chosen in same]
        for text, _, programs in found:
            say(
                f"{text}: needs {max(p.memory for p in programs) / 1e9:.3g} of {machine.memory / 1e9:.3g} GB"
            )
        fitting = [each for each in found if memory_fits(each[2], machine)]
        if fitting or same is tried[-1]:
            break
    text, chosen, programs = min(
        fitting or found[-1:], key=lambda each: plan_days(each[2], machine) or 0.0
    )
    say(f"chosen: {text}")
    _warn_of_narrow_sums(chosen, _why_layer(experiment, len(fitting)), say)
    return chosen, programs


def _why_layer(experiment: Experiment, fitting: int) -> str:
    """The reason for ``mesh.gradients=layer``.

    Args:
      experiment: experiment as the user wrote it.
      fitting: number of values of ``mesh.gradients`` that fit the memory.
    """
    if experiment.mesh.gradients == "layer":
        return "the settings contain mesh.gradients=layer"
    if not _can_add_once(experiment):
        return "mesh.gradients=step supports only the axes replica, data and fsdp"
    return f"mesh.gradients=step {'has a higher time bound' if fitting > 1 else 'does not fit the memory'}"


def _warn_of_narrow_sums(chosen: Experiment, why: str, say: Callable[[str], None]) -> None:
    """Print a line if the devices of ``fsdp`` add gradients in a dtype narrower than float32."""
    dtype = chosen.model.dtype
    if chosen.mesh.fsdp > 1 and not chosen.mesh.once and dtype != "float32":
        say(
            f"the devices of fsdp add gradients in {dtype}, for each layer and micro-batch, and each device sums the "
            f"micro-batches in float32, because {why}"
        )


def auto_choices(experiment: Experiment) -> Iterator[tuple[str, Experiment]]:
    """Yield ``(settings, experiment with them)`` for the "auto" settings, the fastest first."""
    model = experiment.model
    mesh = experiment.mesh
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


def _without_auto(experiment: Experiment) -> Experiment:
    remat = "products" if experiment.model.remat == "auto" else experiment.model.remat
    gradients = "layer" if experiment.mesh.gradients == "auto" else experiment.mesh.gradients
    mesh = replace(experiment.mesh, gradients=gradients)
    return replace(experiment, model=replace(experiment.model, remat=remat), mesh=mesh)


def memory_fits(programs: list[Program], machine: Machine) -> bool:
    return all(p.memory <= machine.memory for p in programs)


def smaller_settings(
    experiment: Experiment, devices: int
) -> Iterator[tuple[list[str], Experiment]]:
    """Yield ``(settings, experiment with them)`` with less memory, the cheapest changes first."""
    mesh = experiment.mesh
    meshes = [([], mesh)]
    inner = mesh.tensor * mesh.expert * mesh.context * mesh.replica
    smallest = experiment.batch // 2 ** len(experiment.ramp)
    if devices > mesh.fsdp * inner and experiment.parallel == "mesh":
        fsdp = devices // inner
        meshes.append(([f"mesh.data=1 mesh.fsdp={fsdp}"], replace(mesh, data=1, fsdp=fsdp)))
    for sharded, mesh in meshes:
        for remat in REMATS[REMATS.index(experiment.model.remat) :]:
            accumulate = experiment.accumulate
            # The devices of tensor and context share samples.
            while smallest % (accumulate * devices // (mesh.tensor * mesh.context)) == 0:
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


def larger_settings(experiment: Experiment) -> Iterator[tuple[list[str], Experiment]]:
    """Yield ``(settings, experiment with them)`` that use more memory to save time.

    The largest changes come first.
    """
    now = experiment.accumulate
    for accumulate in (now // 4, now // 2, now):
        for remat in REMATS[: REMATS.index(experiment.model.remat) + 1]:
            changes = [f"model.remat={remat}"] if remat != experiment.model.remat else []
            changes += [f"accumulate={accumulate}"] if accumulate != now else []
            if changes and accumulate and experiment.batch % accumulate == 0:
                model = replace(experiment.model, remat=remat)
                yield changes, replace(experiment, model=model, accumulate=accumulate)


def find_faster(
    experiment: Experiment, programs: list[Program], machine: Machine, say: Callable[[str], None]
) -> str | None:
    """Find a setting that uses free memory and lowers the time bound of the plan.

    It tries at most three settings, and only if at least half of the memory is free, because each
    one compiles the plan again.

    Returns:
      A line with the setting and both times, or None if no setting helps.
    """
    before = plan_days(programs, machine)
    if before is None or max(p.memory for p in programs) > machine.memory / 2:
        return None
    for changes, other in itertools.islice(larger_settings(experiment), 3):
        say(f"{machine.name} has free memory: trying {' '.join(changes)}")
        found = AotRun(other, machine).run()
        after = plan_days(found, machine)
        if memory_fits(found, machine) and after is not None and after < before:
            return f"{' '.join(changes)} uses the free memory and lowers the time bound from {before:.3g} to {after:.3g} days"
    return None


def plan_days(programs: list[Program], machine: Machine, utilisation: float = 1.0) -> float | None:
    """Return the lower bound of the time of all programs, in days.

    Args:
      programs: programs of the plan.
      machine: machine that runs them.
      utilisation: fraction of the peak that matrix products reach; below 1 it raises the bound.

    Returns:
      Days, or None if the manufacturer does not publish the figures of the machine.
    """
    total = 0.0
    for program in programs:
        found = time_bound(program, machine)
        if found is None:
            return None
        total += program.steps * max(found.seconds, found.products / utilisation)
    return total / 86400


def find_fitting(
    experiment: Experiment, machine: Machine, say: Callable[[str], None]
) -> list[str] | None:
    """Return the first settings of `smaller_settings` with which every program fits, or None."""
    for changes, other in smaller_settings(experiment, len(machine.devices)):
        say(f"trying {' '.join(changes)}")
        try:
            if memory_fits(AotRun(other, machine).run(), machine):
                return changes
        except (UserError, ValueError):
            continue
    return None


def published_speed() -> float | None:
    machine = present_machine()
    return machine.chip.flops and machine.chip.flops * len(machine.devices)


AUTOMATIC.add("memory", lambda experiment, say: resolve_auto(experiment, common_machine(), say)[0])
