"""How is the importance of layers and units measured once, and stored for prunings to other sizes?"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Params, is_layers
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import listed
from jaxgrow.checkpoints.io.folders import atomic_file
from jaxgrow.checkpoints.source import Checkpoint, tree_from_paths
from jaxgrow.extras import importance
from jaxgrow.extras.commands.model_inputs import Inputs
from jaxgrow.extras.commands.model_outputs import wide_params
from jaxgrow.models import Config
from jaxgrow.models.config import EXPERTS

# Scores of a model by their names: ``layers/influence`` [layers], ``layers/angular`` [counts, layers]
# for the removal of 1, 2, 3 and more layers, ``heads`` and ``mlp`` [layers, units], ``embed`` [units],
# ``experts`` and ``experts/frequency`` [layers, experts].
Scores: TypeAlias = Mapping[str, np.ndarray]
# The measures of layers, and the measure of units.
PARTS = frozenset({"influence", "angular", "units"})


def measure_scores(
    config: Config, parts: Collection[str], params: Params, inputs: Inputs
) -> dict[str, jax.Array]:
    """Measure the importance of layers and units of a model.

    Args:
      config: the config of the model.
      parts: the measures, some of ``PARTS``.
      params: the parameters.
      inputs: the inputs of the model.
    """
    found: dict[str, jax.Array] = {}
    if parts != {"units"}:
        for axis, stream in importance.residual_streams(config, params, inputs).items():
            found[f"{axis}/influence"] = importance.block_influence(stream)
            counts = range(1, len(stream) - 1) if "angular" in parts else ()
            each = [importance.angular_distance(stream, count) for count in counts]
            found |= {f"{axis}/angular": jnp.stack(each)} if each else {}
    if "units" in parts:
        found |= importance.unit_importance(config, params, inputs)
    if EXPERTS in found:
        used = importance.unit_importance(config, params, inputs, experts="frequency")
        found[f"{EXPERTS}/frequency"] = used[EXPERTS]
    return found


def scores_of(source: Checkpoint, inputs: Inputs, parts: Collection[str] = PARTS) -> Scores:
    """Measure the importance of layers and units of a checkpoint, as `measure_scores`."""
    measured = jax.jit(partial(measure_scores, source.config, parts))(wide_params(source), inputs)
    return {name: np.asarray(x) for name, x in measured.items()}


def axis_scores(scores: Scores, axis: str, by: str, removed: int) -> np.ndarray:
    """Return the scores of an axis for the removal of some layers, or of units.

    Args:
      scores: the scores of the model.
      axis: the axis that shrinks.
      by: the measure of layers, "influence" or "angular".
      removed: the number of removed layers.
    """
    if not is_layers(axis):
        return scores[axis]
    if by == "angular" and removed:
        return scores[f"{axis}/angular"][removed - 1]
    return scores[f"{axis}/influence"]


def save_scores(file: Path, source: Checkpoint, measure: Callable[[], Scores]) -> Scores:
    """Measure the scores of a model, and write them as safetensors.

    Each name begins with the fingerprint of the model. If the file cannot be written, nothing is
    measured.
    """
    mark = source.fingerprint()
    with atomic_file(file) as part:
        scores = measure()
        planned = [
            safetensors.Planned(f"{mark}/{name}", x.dtype, x.shape, lambda x=x: x)
            for name, x in ((name, x.astype(np.float32)) for name, x in scores.items())
        ]
        safetensors.write_file(part, planned)
    return scores


def read_scores(file: Path, source: Checkpoint) -> Scores:
    """Read the scores that `save_scores` wrote for a model.

    Raises:
      CheckpointError: the file is damaged, belongs to another model, or lacks scores or has others,
        or some have another shape or dtype, or are not finite.
    """
    way_out = f"Give another file, or remove {file} to measure again"
    stored = safetensors.read_header(file)
    mark = source.fingerprint()
    marks = {name.partition("/")[0] for name in stored}
    if marks != {mark}:
        raise CheckpointError(
            f"{file} has the scores of another model: its fingerprint is {listed(sorted(marks), most=1)[:80]}, "
            f"but {source.folder} has {mark}. Give another path, to which the scores of this model are written"
        )
    expected = expected_scores(source)
    found = {name.partition("/")[2]: tensor for name, tensor in stored.items()}
    if found.keys() != expected.keys():
        differ = sorted(found.keys() ^ expected.keys())
        raise CheckpointError(
            f"{file} has scores of {listed(sorted(found))}, but the model has {listed(sorted(expected))}; "
            f"they differ in {listed(differ)}. {way_out}"
        )
    scores: dict[str, np.ndarray] = {}
    for name, shape in expected.items():
        tensor = found[name]
        if (tensor.stored, tensor.shape) != ("F32", shape):
            raise CheckpointError(
                f"{file}: the scores {name!r} are {tensor.stored} {tensor.shape}, but must be F32 "
                f"{shape}. {way_out}"
            )
        scores[name] = tensor.read()
        if not np.isfinite(scores[name]).all():
            raise CheckpointError(f"{file}: the scores {name!r} are not finite. {way_out}")
    return scores


def expected_scores(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the names and the shapes of the scores of a model, without computing them."""
    shapes = tree_from_paths(
        {p: jax.ShapeDtypeStruct(x.shape, jnp.float32) for p, x in source.leaves.items()}
    )
    found = jax.eval_shape(
        partial(measure_scores, source.config, PARTS), shapes, source.config.example
    )
    return {name: x.shape for name, x in found.items()}
