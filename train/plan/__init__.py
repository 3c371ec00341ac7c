"""Plans: what a run does, as data: a tuple of phases (`train.plan.phase`), built by a method (`train.plan.methods`)."""
