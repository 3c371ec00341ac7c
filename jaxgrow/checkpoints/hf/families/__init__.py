"""How does each Hugging Face architecture store its models? One module for each family.

A module has a tuple ``FAMILIES`` of its architectures. `jaxgrow.checkpoints.hf.registry` finds
every module in this folder. If several architectures can store the same model, the pre-training
architecture comes first. The other families are extras (`jaxgrow.extras.families`).
"""
