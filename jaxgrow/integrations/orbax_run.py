"""How is the Orbax checkpoint of another trainer grown, with its optimizer state?

Only one leaf is in memory at a time, before and after its growth. Layers that are stored separately
count as one leaf.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgrow.axes.names import LAYERS, Names, axis
from jaxgrow.checkpoints.io.files import RECORD, CheckpointError, listed
from jaxgrow.growth import maps
from jaxgrow.growth.apply import check, grow_leaf
from jaxgrow.growth.maps import Growth, Term
from jaxgrow.integrations.formats import POWERS, Format, plain
from jaxgrow.integrations.orbax_tree import (
    ItemsWriter,
    OrbaxItems,
    OrbaxTree,
    Writer,
    each_of,
    writer,
)

Policy: TypeAlias = Literal["drop", "copy", "exact"]


@dataclass(frozen=True)
class Place:
    """A leaf, and the arrays in which it is stored.

    Attributes:
      paths: the paths of its arrays: one, or one per layer.
      template: the path, with ``{}`` for the number of a layer.
      names: the axis names of the leaf, with ``layers`` first if its layers are stored separately.
      shape: the shape of the leaf, with all layers.
      power: the power of the gradient that the leaf accumulates; 0 for a parameter, None if
        unknown.
    """

    paths: tuple[str, ...]
    template: str
    names: Names
    shape: tuple[int, ...]
    power: int | None


class OrbaxRun:
    """A checkpoint of another trainer whose parameters have axis names.

    Args:
      tree: the arrays of the checkpoint.
      form: the format, which assigns axis names.

    Attributes:
      places: `Place` of every parameter, by its path below the parameters' prefix.
      states: ``(parameter, Place)`` of every leaf of the optimizer state that belongs to a
        parameter.
      others: paths of arrays that do not change, such as step counts.

    Raises:
      CheckpointError: the format does not fit the checkpoint.
    """

    def __init__(self, tree: OrbaxTree | OrbaxItems, form: Format):
        self.tree, self.format = tree, form
        prefix = form.prefix(tree.arrays)
        if prefix is None:
            raise CheckpointError(
                f"{tree.folder} does not have format {form.name}: it has no parameters "
                f"{listed(form.marks)}. Its "
                f"arrays are {listed(list(tree.arrays))}"
            )
        self.prefix = prefix
        groups = _groups(
            [p.removeprefix(prefix) for p in tree.arrays if p.startswith(prefix)], form.layers
        )
        shapes = {
            template: tree.arrays[prefix + paths[0]].shape for template, paths in groups.items()
        }
        names = form.names({plain(template): shape for template, shape in shapes.items()})
        self.places: dict[str, Place] = {}
        for template, paths in groups.items():
            self.places[plain(template)] = self._place(
                prefix, template, paths, names[plain(template)], 0
            )
        self.states = self._states(groups)
        taken = {
            path
            for place in [*self.places.values(), *(p for _, p in self.states)]
            for path in place.paths
        }
        self.others = [path for path in tree.arrays if path not in taken]

    def _place(
        self, start: str, template: str, paths: list[str], names: Names, power: int | None
    ) -> Place:
        stored = tuple(start + path for path in paths)
        shape = self.tree.arrays[stored[0]].shape
        if "{}" in template:
            names, shape = (LAYERS, *names), (len(stored), *shape)
        return Place(stored, start + template, names, shape, power)

    def _states(self, groups: Mapping[str, list[str]]) -> list[tuple[str, Place]]:
        """The arrays whose path ends with the path of a parameter, and which have its shape."""
        found = []
        for template, paths in groups.items():
            for whole in [
                p
                for p in self.tree.arrays
                if p.endswith("/" + paths[0]) and not p.startswith(self.prefix)
            ]:
                start = whole.removesuffix(paths[0])
                name = self.places[plain(template)].names[("{}" in template) :]
                power = next(
                    (POWERS[part] for part in reversed(start.split("/")) if part in POWERS), None
                )
                place = self._place(start, template, paths, name, power)
                if place.shape == self.places[plain(template)].shape:
                    found.append((plain(template), place))
        return found

    @property
    def axes(self) -> dict[str, Names]:
        """The axis names of each parameter."""
        return {path: place.names for path, place in self.places.items()}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of each parameter."""
        arrays = self.tree.arrays
        return {
            p: jax.ShapeDtypeStruct(at.shape, arrays[at.paths[0]].dtype)
            for p, at in self.places.items()
        }

    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return {
            axis(n): size
            for at in self.places.values()
            for n, size in zip(at.names, at.shape, strict=True)
        }

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(int(np.prod(at.shape)) for at in self.places.values())

    def read(self, place: Place) -> np.ndarray:
        """Read a leaf with all its layers."""
        if "{}" not in place.template:
            return self.tree.read(place.paths[0])
        return np.stack([self.tree.read(path) for path in place.paths])

    def settings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The settings of the trainer's config for a model of these sizes.

        Example: ``{"base_emb_dim": 64, ..}`` of MaxText.
        """
        heads = {"kv_heads": sizes["heads"]} if "heads" in sizes else {}
        return {
            key: (heads | dict(sizes))[name]
            for name, key in self.format.settings.items()
            if name in heads | dict(sizes)
        }


def grow_run(
    run: OrbaxRun, growth: Growth, policy: Policy, folder: Path, process: int | None = None
) -> dict[str, int]:
    """Grow a checkpoint into a new folder; in a multi-process run, every process calls it.

    Args:
      run: the checkpoint.
      growth: the growth, as for `jaxgrow.grow`, for the sizes and axis names of ``run``.
      policy: the policy for moments, as for `jaxgrow.growth.moments.grow_optimizer`. With ``drop``,
        the moments and step counts of the optimizer are zero. ``exact`` treats the fields ``mu``
        and ``trace`` as first moments and ``nu`` as second moments.
      folder: the new folder, which exists and is empty.
      process: the index of this process; None: ``jax.process_index()``.

    Returns:
      The sizes of the grown model.

    Raises:
      CheckpointError: the growth does not fit, or the policy has no rule for a moment.
    """
    jobs, sizes = _jobs(run, growth, policy), run.sizes() | maps.new_sizes(growth)
    count, me = jax.process_count(), jax.process_index() if process is None else process
    target = writer(run.tree, folder, me)
    arrays = run.tree.arrays
    bytes_ = {
        name: int(np.prod(job.place.shape)) * arrays[job.place.paths[0]].dtype.itemsize
        for name, job in jobs.items()
    }
    for name in each_of(bytes_, count, me):
        _write(run, target, jobs[name])
    if count > 1:
        multihost_utils.sync_global_devices("grow_run")
    if me == 0:
        places, shapes = _result(jobs, sizes)
        target.finish(places, shapes, count)
    return sizes


def check_run(run: OrbaxRun, growth: Growth, policy: Policy) -> None:
    """Check whether `grow_run` would succeed, without writing.

    Raises:
      CheckpointError: as `grow_run`.
    """
    _jobs(run, growth, policy)


@dataclass(frozen=True)
class _Job:
    place: Place
    change: Callable[[np.ndarray], np.ndarray]


def _jobs(run: OrbaxRun, growth: Growth, policy: Policy) -> dict[str, _Job]:
    """
    Raises:
      CheckpointError: as `grow_run`.
    """
    try:
        check(growth, run.shapes, run.axes)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    jobs = {}
    for path, place in run.places.items():
        terms = maps.terms(growth, path, place.names)
        jobs[place.template] = _Job(
            place, lambda x, t=terms, n=place.names: np.asarray(grow_leaf(t, n, x))
        )
    unknown = [place.template for _, place in run.states if place.power is None]
    if policy == "exact" and unknown:
        raise CheckpointError(
            f"policy 'exact' does not support these arrays of unknown meaning: {listed(unknown)}. "
            "Use 'copy' or "
            "'drop'"
        )
    for path, place in run.states:
        terms = maps.terms(growth, path, place.names)
        jobs[place.template] = _Job(place, _of_state(terms, place, policy))
    for path in run.others:
        if LAYERS in maps.new_sizes(growth) and fnmatchcase(path, run.format.renewed):
            continue
        place = Place((path,), path, (), run.tree.arrays[path].shape, None)
        counts = policy == "drop" and plain(path).split("/")[-1] == "count"
        jobs[path] = _Job(place, np.zeros_like if counts else lambda x: x)
    return jobs


def _of_state(terms: Any, place: Place, policy: Policy) -> Callable[[np.ndarray], np.ndarray]:
    names = place.names

    def change(x: np.ndarray) -> np.ndarray:
        if policy == "drop":
            return np.zeros_like(grow_leaf(maps.copying(terms), names, x))
        if policy == "copy":
            return np.asarray(grow_leaf(maps.copying(terms), names, x))
        back: list[Term] = [maps.dual(term) for term in terms]
        return (
            np.square(grow_leaf(back, names, np.sqrt(x)))
            if place.power == 2
            else np.asarray(grow_leaf(back, names, x))
        )

    return change


def _write(run: OrbaxRun, target: Writer | ItemsWriter, job: _Job) -> None:
    x, place = job.change(run.read(job.place)), job.place
    if "{}" not in place.template:
        return target.write(place.paths[0], x, place.paths[0])
    for i, layer in enumerate(x):
        target.write(place.template.replace("{}", str(i)), layer, place.paths[0])


def _result(
    jobs: Mapping[str, _Job], sizes: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """For each array of the new checkpoint, the source array with its format, and its shape."""
    places, shapes = {}, {}
    for job in jobs.values():
        place = job.place
        shape = tuple(sizes[axis(n)] for n in place.names) if place.names else place.shape
        stored = [place.template]
        if "{}" in place.template:
            stored, shape = (
                [place.template.replace("{}", str(i)) for i in range(shape[0])],
                shape[1:],
            )
        for path in stored:
            places[path], shapes[path] = place.paths[0], shape
    return places, shapes


def record(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the record of how a checkpoint was made into its folder."""
    (folder / RECORD).write_text(json.dumps(about, indent=2) + "\n")


def _groups(paths: list[str], layers: str) -> dict[str, list[str]]:
    """The paths of each leaf; layers whose paths differ only in their number are one leaf."""
    found: dict[str, dict[int, str]] = {}
    head, _, tail = layers.partition("{}")
    for path in paths:
        rest = path.removeprefix(head) if layers and path.startswith(head) else ""
        number = rest.split("/")[0].removesuffix(tail)
        if number.isdecimal():
            found.setdefault(f"{head}{{}}{rest[len(number) :]}", {})[int(number)] = path
        else:
            found[path] = {0: path}
    return {template: [of[i] for i in sorted(of)] for template, of in found.items()}
