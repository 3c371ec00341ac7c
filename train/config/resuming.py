"""The settings that may change when a run is resumed. Each setting belongs to one class.

=========== ======================================================= ==========================
class       a setting that decides                                  another value on resume
=========== ======================================================= ==========================
objective   the function that is trained, and how                   is refused
execution   how the run is computed; it changes rounding only       is recorded with its step
observation when the run is evaluated, logged and saved             is recorded with its step
place       where the data are stored                               is recorded with its step,
                                                                    if the data are the same
=========== ======================================================= ==========================
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from jaxgrow.models import Config
from jaxgrow.models.config import EXPERTS
from jaxgrow.typed import Json
from train.config.experiment import Experiment, unequal_settings
from train.plan.modifiers import DropLayers
from train.plan.training import Train

Class: TypeAlias = Literal["objective", "execution", "observation", "place"]

# The class of each setting, by its name in ``config.json``. The first pattern that fits decides. A
# model is an exception: its fields `Config.executed_by` are execution.
CLASSES: Mapping[str, Class] = {
    **dict.fromkeys(("name", "steps", "epochs", "seconds", "batch", "seed"), "objective"),
    **dict.fromkeys(("ramp", "ramp.*"), "objective"),
    **dict.fromkeys(("data.*.path", "data.*.valid_path", "data.*.tokenizer"), "place"),
    # The paths of a mixture; the identity of the data contains its weights.
    **dict.fromkeys(("data.*.path.*", "data.*.valid_path.*"), "place"),
    **dict.fromkeys(("data.*.cache", "data.*.workers"), "execution"),
    # The most programs that are compiled for skipped layers.
    "method.*.programs": "execution",
    **dict.fromkeys(("data", "optim", "model", "method"), "objective"),
    **dict.fromkeys(("data.*", "optim.*", "model.*", "method.*"), "objective"),
    **dict.fromkeys(("accumulate", "parallel", "mesh", "mesh.*"), "execution"),
    **dict.fromkeys(("on_nan", "most_skipped"), "execution"),
    **dict.fromkeys(("eval_every", "eval_batches", "log_every"), "observation"),
    **dict.fromkeys(("loggers", "loggers.*"), "observation"),
    **dict.fromkeys(("checkpoint_every", "checkpoint_minutes", "keep_every"), "observation"),
}


def class_of(name: str, config: Json) -> Class:
    """Return the class of a setting.

    Args:
      name: name of the setting in ``config.json``.
      config: content of the ``config.json``.
    """
    *above, last = name.split(".")
    node: Any = config
    for part in above:
        node = node[int(part)] if isinstance(node, list) else node.get(part)
        if not isinstance(node, dict | list):
            break
    family = Config.families.get(node.get("family", "")) if isinstance(node, dict) else None
    if family is not None and last in family.executed_by:
        return "execution"
    return next(kind for pattern, kind in CLASSES.items() if fnmatchcase(name, pattern))


def resume_conflicts(
    old: Json,
    new: Json,
    bound: Mapping[str, str] | None = None,
    known: bool = False,
) -> list[str]:
    """Return the differences of two ``config.json`` with which a run is not resumed.

    Args:
      old: one config.
      new: the other config.
      bound: settings of the execution that change the result of the run, each with the reason.
      known: whether the identity of the data is known, so that they may have moved.
    """
    reasons = bound or {}
    found = []
    for name, (a, b) in unequal_settings(old, new).items():
        kind = class_of(name, new)
        if name in reasons or kind == "objective" or (kind == "place" and not known):
            why = f" ({reasons[name]})" if name in reasons else ""
            found.append(f"{name}: {a!r} and {b!r}{why}")
    return found


def binding_settings(experiment: Experiment) -> dict[str, str]:
    """Return the settings of other classes that are part of the objective here, with the reasons."""
    found = {}
    if any(phase.probes for phase in experiment.plan):
        why = "it changes the data on which the importance of layers is measured"
        found = {"accumulate": why, "eval_batches": why}
    if any(phase.judges for phase in experiment.plan):
        found["eval_batches"] = "the best evaluation decides which parameters are kept"
    for phase in experiment.plan:
        if not isinstance(phase, Train):
            continue
        if phase.config.sizes().get(EXPERTS, 0):
            found["accumulate"] = "experts are balanced within each micro-batch"
            if getattr(phase.config, "capacity", 0.0):
                why = "the capacity of an expert is that of each device"
                found |= dict.fromkeys(("parallel", *_MESH), why)
        if any(isinstance(m, DropLayers) for m in phase.modifiers):
            found["accumulate"] = "each micro-batch drops other layers"
    return found


_MESH = ("mesh.data", "mesh.fsdp", "mesh.expert", "mesh.replica", "mesh.context")
