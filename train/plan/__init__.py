"""Which steps does a run consist of?

A plan is a tuple of phases (`train.plan.phase`). A method (`train.plan.methods`) builds it.
"""
