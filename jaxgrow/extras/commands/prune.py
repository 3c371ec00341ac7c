"""The command prune: plan the sizes, measure the importance on data, and report the effect."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import jax
import numpy as np

from jaxgrow import operators
from jaxgrow.axes.names import LAYERS, axis_kind, is_layers, sibling_axis
from jaxgrow.checkpoints import CheckpointError, Grown, Source, open_checkpoint, transform
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.cli.errors import UsageError, errors_with_options, refuse_options
from jaxgrow.cli.grow_commands import refuse_lost_state
from jaxgrow.cli.new_sizes import target_sizes
from jaxgrow.cli.options import AXES
from jaxgrow.cli.writing import output_of, transform_model
from jaxgrow.extras.commands.model_inputs import Inputs, inputs_from_file
from jaxgrow.extras.commands.model_outputs import outputs_of
from jaxgrow.extras.commands.scores import (
    Scores,
    axis_scores,
    read_scores,
    save_scores,
    scores_of,
)
from jaxgrow.extras.commands.sizes import sizes_near
from jaxgrow.extras.commands.vocabulary import prune_vocabulary
from jaxgrow.extras.preservation import measure_preservation
from jaxgrow.growth.maps import Growth
from jaxgrow.models.config import EXPERTS
from jaxgrow.operators.targets import layer_axes, of_kinds, width_axes
from jaxgrow.tables import align_columns
from jaxgrow.typed import Json
from jaxgrow.untrusted import print_text


@dataclass(frozen=True)
class _PruningPlan:
    """A pruning before any measurement.

    Attributes:
      source: the model.
      target: the new sizes.
      by: the measure for the layers.
      inputs: the inputs on which the model is evaluated; None if only stored scores are used.
      what: their description.
      control: a growth to the same sizes that keeps random units.
    """

    source: Checkpoint
    target: dict[str, int]
    by: str
    inputs: Inputs
    what: str
    control: Growth

    def pruned(self, scores: Mapping[str, np.ndarray]) -> Growth:
        """The growth that keeps the units with the highest scores."""
        alternating = self.source.config.traits["alternating"]
        return operators.prune(self.source.sizes(), self.target, scores, alternating)

    def chosen(self, scores: Scores) -> dict[str, np.ndarray]:
        """The scores by axis, of layers by the measure of this pruning."""
        sizes = self.source.sizes()
        removed = {axis: sizes[axis] - n for axis, n in self.target.items()}
        scored = [axis for axis in removed if axis_kind(axis) != "kv_heads"]
        scored += [sibling_axis(a, "heads") for a in removed if axis_kind(a) == "kv_heads"]
        return {a: axis_scores(scores, a, self.by, removed.get(a, 0)) for a in scored}


def run_prune(a: argparse.Namespace) -> None:
    """Run ``jaxgrow prune``."""
    refuse_lost_state(a)
    if a.keep is not None:
        return _prune_to_list(a)
    if a.vocab is not None:
        return prune_vocabulary(a)
    # Detect a result that cannot be written before the expensive measurements.
    output = output_of(a, dry_run=True)
    plan = _pruning_plan(a)
    with errors_with_options():
        transform(plan.source, output, plan.control, lora=a.lora)
    stored = _stored_scores(a, plan)
    scores = plan.chosen(stored)
    growth = plan.pruned(scores)
    report: Json = {}
    if plan.inputs is not None:
        growths = {"pruned": growth, "random": plan.control}
        if EXPERTS in plan.target:
            used = {**scores, EXPERTS: stored[f"{EXPERTS}/frequency"]}
            growths["frequency"] = plan.pruned(used)
        report = _measured_effect(plan, growths)
    given = (("data", a.data), ("scores", a.scores))
    arguments: Json = {"target": plan.target} | {n: str(x) for n, x in given if x is not None}
    if layers := [axis for axis in plan.target if is_layers(axis)]:
        report["scores"] = {axis: scores[axis].tolist() for axis in layers}
        arguments |= {"by": plan.by, "removed": _removed_layers(plan, report["scores"])}
    transform_model(a, plan.source, growth, arguments, report=report)
    if not a.json:
        print_text(_report_as_text(report, arguments))


def _prune_to_list(a: argparse.Namespace) -> None:
    """Keep the layers of ``--keep``."""
    why = "--keep names the layers that stay, so that nothing is measured and no width changes"
    refuse_options(a, why, *AXES, "experts", "by", "data", "scores", "params", "vocab")
    source = open_checkpoint(a.src)
    kept = [layer for _, layer in a.keep]
    with errors_with_options():
        growth = operators.keep_units(source.sizes(), {LAYERS: kept})
    removed = sorted(set(range(source.config.layers)) - set(kept))
    transform_model(a, source, growth, {"sources": kept, "removed": {LAYERS: removed}})


# --- plan ---


def _pruning_plan(a: argparse.Namespace) -> _PruningPlan:
    source = open_checkpoint(a.src)
    target = _wanted_sizes(a, source)
    if source.config.loop is not None:
        raise CheckpointError(
            f"prune does not measure layers that run several times ({source.config.loop}): first give each "
            f"pass its own layer with jaxgrow grow {shlex.quote(str(a.src))} DST --method unloop"
        )
    if a.by and not any(map(is_layers, target)):
        raise UsageError(
            f"--by {a.by} selects the layers to remove: give their new number with --layers, or omit --by"
        )
    if source.config.predicts == "states" and "embed" in target:
        raise CheckpointError(
            "prune compares outputs before and after, but the outputs of a model without a head "
            "are its features on axis 'embed', which would change size. Omit --embed"
        )
    if "mlp" in target and "experts" in source.sizes():
        raise CheckpointError(
            "prune does not measure the importance of the units of experts (axis 'mlp' of a mixture "
            "of experts). Omit --mlp, or remove complete experts with --experts"
        )
    active = source.config.sizes().get("experts") and getattr(source.config, "active", 0)
    if active and target.get("experts", active) < active:
        raise CheckpointError(
            f"--experts {target['experts']}: the model routes each token to {active} experts, so at "
            f"least --experts {active} must stay"
        )
    measured = a.scores is not None and a.scores.exists()
    if a.data is None and not measured:
        missing = "" if a.scores is None else f"{a.scores} does not exist, and "
        raise UsageError(
            f"{missing}prune measures which layers and units matter least: give it inputs with --data FILE, or a "
            "file of --scores of an earlier prune, or the layers that stay, such as --keep 0-3"
        )
    inputs, what = (None, "") if a.data is None else inputs_from_file(source, a.data)
    with errors_with_options():
        control = _random_pruning(source, target)
    return _PruningPlan(source, target, a.by or "influence", inputs, what, control)


def _wanted_sizes(a: argparse.Namespace, source: Source) -> dict[str, int]:
    """The new sizes: the given ones, or those for ``--params``, which keep the layers if possible."""
    if a.params is None:
        return target_sizes(a, source)
    refuse_options(a, "--params chooses the sizes", *AXES, "experts")
    if a.params >= source.parameters:
        raise UsageError(
            f"--params {a.params:,}: {a.src} has {source.parameters:,} parameters, and prune makes a "
            f"model smaller. For larger sizes, run jaxgrow suggest {shlex.quote(str(a.src))} --to-params {a.params}"
        )
    found = sizes_near(source, a.params)
    return next((target for target in found if not any(map(is_layers, target))), found[0])


def _random_pruning(source: Source, target: dict[str, int]) -> Growth:
    """A pruning that keeps random units."""
    sizes = source.sizes()
    rng = np.random.default_rng(0)
    scores = {}
    for axis in (*layer_axes(sizes), *width_axes(sizes), *of_kinds(("experts",), sizes)):
        per_layer = axis_kind(axis) in ("heads", "mlp", "experts")
        shape = (sizes[sibling_axis(axis, LAYERS)], sizes[axis]) if per_layer else sizes[axis]
        scores[axis] = rng.random(shape)
    return operators.prune(sizes, target, scores, source.config.traits["alternating"])


# --- measure ---


def _stored_scores(a: argparse.Namespace, plan: _PruningPlan) -> Scores:
    """The scores in the file ``--scores``, or else those that are measured and written to it."""
    if a.scores is not None and a.scores.exists():
        return read_scores(a.scores, plan.source)
    if a.scores is not None and not a.dry_run:
        return save_scores(a.scores, plan.source, lambda: scores_of(plan.source, plan.inputs))
    parts = {plan.by if is_layers(axis) else "units" for axis in plan.target}
    return scores_of(plan.source, plan.inputs, parts)


def _measured_effect(plan: _PruningPlan, growths: Mapping[str, Growth]) -> Json:
    """The losses of the model, of the pruned model and of the controls, and how outputs differ."""
    original = outputs_of(plan.source)(plan.inputs)
    report: Json = {
        "inputs": plan.what,
        "whole": {"loss": _mean_loss(plan, original[0])},
    }
    for name, pruning in growths.items():
        found = outputs_of(Grown(plan.source, pruning))(plan.inputs)
        with errors_with_options():
            difference = measure_preservation(
                lambda _: original,
                lambda _, found=found: found,
                plan.inputs,
                ("the original model", f"the {name} model"),
            )
        report[name] = {"loss": _mean_loss(plan, found[0]), **asdict(difference)}
    return report


def _mean_loss(plan: _PruningPlan, logits: jax.Array) -> float | None:
    """Mean cross-entropy per predicted token, in nats; None if no token is predicted."""
    config = plan.source.config
    if not config.causal or config.predicts != "tokens" or logits.shape[1] == 1:
        return None
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -float(np.take_along_axis(np.asarray(log_p), plan.inputs[:, 1:, None], -1).mean())


def _removed_layers(
    plan: _PruningPlan, scores: Mapping[str, Sequence[float]]
) -> dict[str, list[int]]:
    """The indices of the removed layers, by axis."""
    sizes = plan.source.sizes()
    alternating = plan.source.config.traits["alternating"]
    removed = {}
    for axis, of in scores.items():
        stay = operators.best_units(of, plan.target[axis], axis in alternating)
        removed[axis] = sorted(set(range(sizes[axis])) - set(stay.tolist()))
    return removed


# --- report ---

# The pruned models of a report, and the descriptions of the controls.
_ROWS = {
    "pruned": "",
    "random": "a control of the same sizes whose units were chosen at random",
    "frequency": "a control that keeps the experts that most tokens use",
}


def _report_as_text(report: Json, arguments: Json) -> str:
    lines = []
    for axis, gone in arguments.get("removed", {}).items():
        scores = " ".join(f"{score:.3g}" for score in report["scores"][axis])
        removed = ", ".join(map(str, gone)) or "none"
        lines += [f"removed {axis}: {removed}", f"{arguments['by']} per layer: {scores}"]
    if "whole" not in report:
        return "\n".join(lines)
    rows = []
    labels = {"whole": "original"} | {name: name for name in _ROWS if name in report}
    for name, label in labels.items():
        row = report[name]
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        difference = (f"{row['kl']:.3g}", f"{row['mean_abs']:.3g}") if "kl" in row else ("", "")
        rows.append((label, loss, *difference))
    head = ("", "loss", "KL from original", "mean |difference|")
    lines += [f"on {report['inputs']}:", align_columns(head, rows, right=(1, 2, 3))]
    lines += [f"{name}: {about}" for name, about in _ROWS.items() if about and name in report]
    return "\n".join(lines)
