"""How is the Orbax checkpoint of another trainer grown, with its optimizer state?

Only one leaf is in memory at a time, before and after its growth. Layers that are stored separately
count as one leaf.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxgrow.axes.names import LAYERS, POST, Names, axis_of, has_mark, state_owners
from jaxgrow.checkpoints.io.files import CheckpointError, listed
from jaxgrow.extras.integrations.formats import (
    POWERS,
    Format,
    FormatRow,
    gradient_power,
    grouped_sizes,
    plain_path,
    solve_sizes,
)
from jaxgrow.extras.integrations.orbax_tree import each_of
from jaxgrow.extras.integrations.trees import AnyTree, AnyWriter, writer_like
from jaxgrow.growth import maps
from jaxgrow.growth.apply import check, grow_leaf
from jaxgrow.growth.maps import Growth, Term
from jaxgrow.typed import check_choice

Policy: TypeAlias = Literal["drop", "copy", "exact"]
# The step counts of optimizers: those of optax, and of its `optax.MultiSteps`.
_COUNTS = {"count", "mini_step", "gradient_step"}
_WITHOUT = "Save a checkpoint without the optimizer state, and grow that one"


@dataclass(frozen=True)
class Place:
    """A leaf, and the arrays in which it is stored.

    Attributes:
      paths: the paths of its arrays: one, or one per layer.
      template: the path, with ``{}`` for the number of a layer.
      names: the axis names of the leaf, with ``layers`` first if its layers are stored separately.
      shape: the shape of the leaf, with all layers.
      row: how each of its arrays stores it.
      power: the power of the gradient that the leaf accumulates; 0 for a parameter or a copy of it,
        None if unknown.
    """

    paths: tuple[str, ...]
    template: str
    names: Names
    shape: tuple[int, ...]
    row: FormatRow
    power: int | None


class OrbaxRun:
    """A checkpoint of another trainer whose parameters have axis names.

    Args:
      tree: the arrays of the checkpoint.
      form: the format, which assigns axis names.
      given: sizes of axes that the shapes do not determine.

    Attributes:
      places: `Place` of every parameter, by its path below the parameters' prefix.
      states: ``(parameter, Place)`` of every leaf of the optimizer state that belongs to a
        parameter.
      counts: `Place` of scalars that exist once per layer, such as step counts of PyTorch.
      array_sizes: the sizes of all axes of the arrays, including axes that only arrays have.
      others: paths of arrays that do not change, such as step counts.
      partial: paths of arrays of the optimizer state that only some of the layers have, because a
        mask of the optimizer excludes the others.

    Raises:
      CheckpointError: the format does not fit the checkpoint.
    """

    def __init__(self, tree: AnyTree, form: Format, given: Mapping[str, int] | None = None):
        self.tree = tree
        self.format = form
        prefix = form.prefix(tree.arrays)
        if prefix is None:
            raise CheckpointError(
                f"{tree.folder} does not have format {form.name}: it has no parameters "
                f"{listed(form.marks)}. Its arrays are {listed(list(tree.arrays))}"
            )
        self.prefix = prefix
        groups = _leaf_groups(
            [p.removeprefix(prefix) for p in tree.arrays if p.startswith(prefix)], form.layers
        )
        shapes = {
            template: tree.arrays[prefix + paths[0]].shape for template, paths in groups.items()
        }
        shapes = {plain_path(template): shape for template, shape in shapes.items()}
        layouts = form.layouts(shapes, given or {})
        self.array_sizes = solve_sizes(layouts, shapes, given or {})
        self.places: dict[str, Place] = {}
        for template, paths in groups.items():
            path = plain_path(template)
            self.places[path] = self._place(prefix, template, paths, layouts[path], 0)
        self._check_shapes()
        self.partial: list[str] = []
        self.states = self._states(groups)
        self.counts = self._counts()
        places = [*self.places.values(), *(place for _, place in self.states), *self.counts]
        taken = {path for place in places for path in place.paths}
        self.others = [path for path in tree.arrays if path not in taken]

    def _place(
        self, start: str, template: str, paths: list[str], row: FormatRow, power: int | None
    ) -> Place:
        stored = tuple(start + path for path in paths)
        names = row.names
        shape = tuple(self.array_sizes[axis_of(n)] for n in names)
        if "{}" in template:
            names = (LAYERS, *names)
            shape = (len(stored), *shape)
        return Place(stored, start + template, names, shape, row, power)

    def _states(self, groups: Mapping[str, list[str]]) -> list[tuple[str, Place]]:
        """The arrays whose path ends with the path of a parameter, and which have its shape."""
        arrays = self.tree.arrays
        outside = {plain_path(path): path for path in arrays if not path.startswith(self.prefix)}
        # A module in a layer may have the name of a module outside of the layers.
        parameters = itertools.chain.from_iterable(groups.values())
        of = state_owners(dict.fromkeys(outside, 0), map(plain_path, parameters))
        templates = {plain_path(paths[0]): template for template, paths in groups.items()}
        found = []
        for name, whole in outside.items():
            first = of.get(name)
            if first is None or first not in templates or name == first:
                continue
            template = templates[first]
            paths = groups[template]
            start = name.removesuffix(first)
            end = whole.removeprefix(name)
            stored = [plain_path(path) + end for path in paths]
            if not all(start + path in arrays for path in stored):
                self.partial.append(whole)
            elif arrays[whole].shape == arrays[self.prefix + paths[0]].shape:
                row = self.places[plain_path(template)].row
                place = self._place(
                    start, plain_path(template) + end, stored, row, gradient_power(start)
                )
                found.append((plain_path(template), place))
        return found + self._own_states()

    def _own_states(self) -> list[tuple[str, Place]]:
        """The arrays that only the optimizer state has, as the format names them in ``states``."""
        rows = self.format.states
        named = [
            path
            for path, array in self.tree.arrays.items()
            if array.shape and any(fnmatchcase(path, pattern) for pattern in rows)
        ]
        found = []
        for start, template, paths in self._layered(named):
            row = next(rows[pattern] for pattern in rows if fnmatchcase(template, pattern))
            shapes = {template: self.tree.arrays[start + paths[0]].shape}
            self.array_sizes |= solve_sizes({template: row}, shapes, self.array_sizes)
            found.append(
                (template, self._place(start, template, paths, row, gradient_power(start)))
            )
        return found

    def _counts(self) -> list[Place]:
        """The scalars that exist once per layer."""
        scalars = [path for path, array in self.tree.arrays.items() if array.shape == ()]
        found = []
        for start, template, rests in self._layered(scalars):
            paths = tuple(start + rest for rest in rests)
            found.append(
                Place(paths, start + template, (LAYERS,), (len(paths),), FormatRow(()), None)
            )
        return found

    def _layered(self, paths: list[str]) -> list[tuple[str, str, list[str]]]:
        """``(start, template, rest of the paths)`` of leaves whose layers are stored separately."""
        head = self.format.layers.partition("{}")[0]
        below: dict[str, list[str]] = {}
        for path in paths:
            start, found, rest = path.partition(f"/{head}")
            if head and found:
                below.setdefault(f"{start}/", []).append(head + rest)
        return [
            (start, template, group)
            for start, rests in below.items()
            for template, group in _leaf_groups(rests, self.format.layers).items()
            if "{}" in template
        ]

    def _check_shapes(self) -> None:
        """Check that each axis has the same size in all arrays.

        Raises:
          CheckpointError: an axis has different sizes in different arrays.
        """
        wrong: list[str] = []
        for place in self.places.values():
            expected = place.row.shape(self.array_sizes)
            for path in place.paths:
                shape = self.tree.arrays[path].shape
                if shape != expected:
                    wrong.append(f"{path} {shape}, expected {expected}")
        if wrong:
            raise CheckpointError(
                f"these arrays of {self.tree.folder} do not fit the sizes of the other ones: "
                f"{listed(wrong)}. Give other names with --names FILE"
            )

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
        each = (zip(at.names, at.shape, strict=True) for at in self.places.values())
        return {axis_of(name): size for leaf in each for name, size in leaf}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(int(np.prod(at.shape)) for at in self.places.values())

    def read(self, place: Place) -> np.ndarray:
        """Read a leaf with all its layers."""
        power = 1 if place.power is None else place.power
        leaves = (
            place.row.leaf(self.tree.read(path), self.array_sizes, power) for path in place.paths
        )
        return np.stack(list(leaves)) if "{}" in place.template else next(leaves)

    def settings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The settings of the trainer's config for a model of these sizes.

        Example: ``{"base_emb_dim": 64, ..}`` of MaxText.
        """
        known = grouped_sizes(sizes)
        if "heads" in known:
            known.setdefault("kv_heads", known["heads"])
        settings = self.format.settings
        return {key: known[name] for name, key in settings.items() if name in known}

    @property
    def traits(self) -> dict[str, object]:
        """Properties of the model, as in `jaxgrow.models.Config.traits`."""
        post = any(has_mark(names, POST) for names in self.axes.values())
        return {**self.format.traits, "post_norm": post}


def grow_run(
    run: OrbaxRun, growth: Growth, policy: Policy, folder: Path, process: int | None = None
) -> dict[str, int]:
    """Grow a checkpoint into a new folder; in a multi-process run, every process calls it.

    Args:
      run: the checkpoint.
      growth: the growth, as for `jaxgrow.grow`, for the sizes and axis names of ``run``.
      policy: the policy for moments, as for `jaxgrow.growth.moments.grow_optimizer`. With ``drop``,
        the moments and step counts of the optimizer are zero. ``exact`` treats the fields ``mu``
        and ``trace`` as first moments and ``nu`` as second moments. A copy of the parameters, such
        as ``z`` of `optax.contrib.schedule_free`, grows like them under every policy.
      folder: the new folder, which exists and is empty.
      process: the index of this process; None: ``jax.process_index()``.

    Returns:
      The sizes of the grown model.

    Raises:
      CheckpointError: the growth does not fit, or the policy has no rule for a moment.
    """
    jobs = growth_jobs(run, growth, policy)
    sizes = run.sizes() | maps.new_sizes(growth)
    count = jax.process_count()
    me = jax.process_index() if process is None else process
    target = writer_like(run.tree, folder, me)
    arrays = run.tree.arrays
    bytes_ = {
        name: int(np.prod(job.place.shape)) * arrays[job.place.paths[0]].dtype.itemsize
        for name, job in jobs.items()
    }
    every = run.array_sizes | sizes
    for name in each_of(bytes_, count, me):
        _write_leaf(run, target, jobs[name], every)
    if count > 1:
        multihost_utils.sync_global_devices("grow_run")
    if me == 0:
        places, shapes = _written_arrays(jobs, every)
        target.finish(places, shapes, count)
    return sizes


@dataclass(frozen=True)
class GrowthJob:
    """A leaf, and the function that grows it."""

    place: Place
    change: Callable[[np.ndarray], np.ndarray]


def growth_jobs(run: OrbaxRun, growth: Growth, policy: Policy) -> dict[str, GrowthJob]:
    """Plan how each leaf of the checkpoint grows, by path.

    Raises:
      CheckpointError: as `grow_run`.
    """
    check_choice("policy", policy, Policy)
    try:
        check(growth, run.shapes, run.axes)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if held := sorted(maps.new_sizes(growth).keys() & set(run.format.fixed)):
        raise CheckpointError(
            f"format {run.format.name} cannot grow {', '.join(held)}, because its checkpoints "
            "contain the structure of the model. Grow other axes, or save the model in the "
            "format of Hugging Face and grow that"
        )
    _check_state_arrays(run)
    unknown = [place.template for _, place in run.states if place.power is None]
    if policy == "exact" and unknown:
        raise CheckpointError(
            f"policy 'exact' does not support these arrays of unknown meaning: {listed(unknown)}. "
            "Use 'copy' or 'drop'"
        )
    jobs = {}
    for path, place in (*run.places.items(), *run.states):
        terms = maps.terms(growth, path, place.names)
        jobs[place.template] = GrowthJob(place, _of_leaf(terms, place, policy))
    for path in run.others:
        if LAYERS in maps.new_sizes(growth) and fnmatchcase(path, run.format.renewed):
            continue
        place = Place((path,), path, (), run.tree.arrays[path].shape, FormatRow(()), None)
        jobs[path] = GrowthJob(place, _of_count(path, policy))
    layers = (run.sizes() | maps.new_sizes(growth)).get(LAYERS, 0)
    for place in run.counts:
        of_one = _of_count(place.template, policy)
        jobs[place.template] = GrowthJob(
            place, lambda x, of_one=of_one: np.repeat(of_one(x[:1]), layers, axis=0)
        )
    return jobs


def _check_state_arrays(run: OrbaxRun) -> None:
    """Check that the axes of every moment are known, and that it has real numbers.

    Raises:
      CheckpointError: a moment belongs to no parameter, has another shape than its parameter,
        exists for some of the layers only, or has complex numbers or integers.
    """
    unreal: list[str] = []
    for path, exponent in [(p, place.power) for _, place in run.states for p in place.paths]:
        dtype = run.tree.arrays[path].dtype
        floating = jnp.issubdtype(dtype, jnp.floating)
        if jnp.issubdtype(dtype, jnp.complexfloating) or (exponent and not floating):
            unreal.append(f"{path} {dtype}")
    if unreal:
        raise CheckpointError(
            f"the optimizer state does not consist of real numbers: {listed(unreal)}. {_WITHOUT}"
        )
    wrong = [
        f"{path} {run.tree.arrays[path].shape}"
        for path in run.others
        if path in run.partial
        or (run.tree.arrays[path].shape and not POWERS.keys().isdisjoint(path.split("/")))
    ]
    if wrong:
        raise CheckpointError(
            f"the optimizer state has arrays whose axes are unknown: {listed(wrong)}. Supported are "
            f"arrays with the shape of their parameter, for all layers or for none. {_WITHOUT}"
        )


def _of_count(path: str, policy: Policy) -> Callable[[np.ndarray], np.ndarray]:
    """Step counts of the optimizer are zero with ``drop``; other arrays do not change."""
    restarts = policy == "drop" and not _COUNTS.isdisjoint(plain_path(path).split("/"))
    return np.zeros_like if restarts else lambda x: x


def _of_leaf(
    terms: Sequence[Term], place: Place, policy: Policy
) -> Callable[[np.ndarray], np.ndarray]:
    """Parameters and their copies grow by the growth, and moments by the policy."""
    names = place.names

    def change(x: np.ndarray) -> np.ndarray:
        if place.power == 0:
            return np.asarray(grow_leaf(terms, names, x))
        if policy == "drop":
            return np.zeros_like(grow_leaf(maps.copying(terms), names, x))
        negative = policy == "exact" and place.power == 2 and (x < 0).any()
        if negative or not np.isfinite(x).all():
            raise CheckpointError(
                f"{place.template} has NaN or infinite values, or negative second moments. Use "
                "--optimizer drop, or an earlier checkpoint"
            )
        if policy == "copy":
            copies = maps.copying(terms, squares=place.power == 2)
            return np.asarray(grow_leaf(copies, names, x))
        back: list[Term] = [maps.dual(term) for term in terms]
        if place.power == 2:
            return np.square(grow_leaf(back, names, np.sqrt(x)))
        return np.asarray(grow_leaf(back, names, x))

    return change


def _write_leaf(run: OrbaxRun, target: AnyWriter, job: GrowthJob, sizes: Mapping[str, int]) -> None:
    x = job.change(run.read(job.place))
    place = job.place
    power = 1 if place.power is None else place.power
    for i, layer in enumerate(x if "{}" in place.template else [x]):
        array = place.row.array(layer, sizes, power)
        target.write(place.template.replace("{}", str(i)), array, place.paths[0])


def _written_arrays(
    jobs: Mapping[str, GrowthJob], sizes: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """For each new array: the source array whose format it gets, and its shape."""
    places = {}
    shapes = {}
    for job in jobs.values():
        place = job.place
        shape = place.row.shape(sizes) if place.names else place.shape
        for i in range(sizes[LAYERS] if "{}" in place.template else 1):
            path = place.template.replace("{}", str(i))
            places[path] = place.paths[0]
            shapes[path] = shape
    return places, shapes


def _leaf_groups(paths: list[str], layers: str) -> dict[str, list[str]]:
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
