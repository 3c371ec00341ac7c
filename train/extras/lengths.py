"""How long are the runs of a comparison, if the command line changes the steps of its baseline?"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from train.analysis.comparing import LENGTHS
from train.common.errors import UserError
from train.config.experiment import Experiment, load_as, load_experiment
from train.config.overrides import all_settings, with_overrides

ALIKE = 0.03  # relative costs that differ by less count as equal


def load_alike(
    texts: Sequence[str], overrides: Sequence[str]
) -> tuple[list[Experiment], list[str]]:
    """Load the configs of a comparison, the first of which is the baseline.

    An override of ``steps`` or ``epochs`` is the length of the baseline. Any other config keeps its
    length relative to the baseline's, so that its relative cost does not change either.

    Returns:
      The experiments, and a sentence about each change that remains.

    Raises:
      UserError: as for `train.config.experiment.load_experiment`.
    """
    own = [_without_settings(text) for text in texts]
    loaded = [
        load_experiment(text, [*_scaled_overrides(overrides, experiment, own[0])])
        for text, experiment in zip(texts, own, strict=True)
    ]
    return loaded, [*_changed_costs(loaded, own), *_kept_counts(loaded, own)]


def _without_settings(text: str) -> Experiment | None:
    """Load a config without settings; None if it needs settings of the command line to be valid."""
    with suppress(UserError):
        return load_as(Experiment, ":".join(p for p in text.split(":") if "=" not in p))[1]
    return None


def _scaled_overrides(
    overrides: Sequence[str], own: Experiment | None, base: Experiment | None
) -> Iterator[str]:
    """Yield the overrides for a config, with its part of the baseline's new length."""
    if own is None or base is None or own is base:
        yield from overrides
        return
    part = 1.0
    for name in ("steps", "epochs"):
        if getattr(own, name) and getattr(base, name):
            part = getattr(own, name) / getattr(base, name)
    for override in overrides:
        name = override.partition("=")[0]
        if part == 1 or name not in ("steps", "epochs"):
            yield override
            continue
        length = getattr(with_overrides(base, [override]), name)
        new = length and length * part
        yield f"{name}={max(1, round(new)) if name == 'steps' and new else new}"


def _changed_costs(loaded: Sequence[Experiment], own: Sequence[Experiment | None]) -> Iterator[str]:
    """Yield a sentence for each config whose cost relative to the baseline has changed."""
    for after, before in zip(loaded[1:], own[1:], strict=True):
        # Without the corpus, steps and epochs cannot be compared.
        if before is None or own[0] is None or (before.epochs is None) != (own[0].epochs is None):
            continue
        # A config may be valid only together with the settings of the command line.
        with suppress(UserError, ValueError, ArithmeticError):
            now, was = (
                after.cost / loaded[0].cost,
                _cost_per_epoch(before) / _cost_per_epoch(own[0]),
            )
            if abs(now / was - 1) > ALIKE:
                yield (
                    f"{after.name} costs {now:.0%} of the FLOPs of {loaded[0].name}, but {was:.0%} in the config "
                    "files: the settings of the command line change the two costs by different factors."
                )


def _cost_per_epoch(experiment: Experiment) -> float:
    """Return the cost of an experiment; without steps, the number of steps is in proportion to the epochs."""
    steps = experiment.steps or round(1e7 * (experiment.epochs or 1) / experiment.mean_batch)
    return replace(experiment, steps=steps, epochs=None).cost


def _kept_counts(loaded: Sequence[Experiment], own: Sequence[Experiment | None]) -> Iterator[str]:
    """Yield a sentence about numbers of steps that have not changed with the baseline's steps."""
    steps, before = loaded[0].steps, own[0].steps if own[0] else 0
    kept: dict[str, object] = {}
    for experiment in loaded:
        for s in all_settings(experiment):
            if s.name.rpartition(".")[2] in getattr(s.owner, "step_counts", ()) and s.value:
                kept.setdefault(s.name, s.value)
    if before and steps and steps != before and kept:
        names = ", ".join(f"{name}={value}" for name, value in kept.items())
        yield (
            f"{loaded[0].name} has {steps:,} steps instead of {before:,}, but these numbers of steps are "
            f"as in the config files: {names}."
        )


LENGTHS.add("alike", load_alike)
