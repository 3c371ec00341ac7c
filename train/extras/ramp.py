"""How large is the batch in each part of a run? It doubles after some fractions of the steps."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from jaxgrow.layerdrop.schedules import whole_steps
from train.config.experiment import RAMPS
from train.plan.learning import Learn
from train.plan.lifetimes import Plan
from train.plan.phase import Phase
from train.plan.training import Train


def ramped_plan(plan: Plan, ramp: Sequence[float]) -> Plan:
    """Return the plan with a phase of training for each size of the batch.

    With n fractions, the first batch has ``1 / 2^n`` of the samples, and the batch doubles after
    each fraction of the steps of all trainings together. The learning rates do not change, because
    each part of a training has the schedule of the whole. The maps of LiGO are trained with one
    size of the batch.

    Args:
      plan: phases of the run.
      ramp: fractions of the steps, in increasing order.
    """
    total = sum(phase.end - phase.begin for phase in plan if isinstance(phase, Train))
    cuts = [whole_steps(fraction, total) for fraction in ramp]
    phases: list[Phase] = []
    done = 0  # steps of the trainings before the phase
    for phase in plan:
        if not isinstance(phase, Train):
            phases.append(phase)
            continue
        own = [phase.begin + cut - done for cut in cuts]  # as steps of the phase
        within = () if isinstance(phase, Learn) else (x for x in own if phase.begin < x < phase.end)
        edges = [*sorted({phase.begin, *within}), phase.end]
        for begin, until in itertools.pairwise(edges):
            left = sum(cut > begin for cut in own)  # how often the batch still doubles
            phases.append(replace(phase, begin=begin, until=until, shrink=2**left))
        done += phase.end - phase.begin
    return tuple(phases)


RAMPS.add("plan", ramped_plan)
