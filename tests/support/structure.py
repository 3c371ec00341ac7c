"""Which modules are extras?"""

# The commands that are extras; the other extras lie in the folders `extras`.
EXTRA_COMMANDS = (
    "advise",
    "evaluate",
    "finetune",
    "generate",
    "ligo_maps",
    "predict",
    "preflight",
    "race",
    "scaling",
    "sweep",
    "tokenizer",
    "variance",
)


def is_extra(parts: tuple[str, ...]) -> bool:
    """Return whether the parts of a module's name are those of an extra."""
    return "extras" in parts or (
        parts[0] == "train" and parts[1:2] in [(c,) for c in EXTRA_COMMANDS]
    )
