"""The names of methods and formats, written by `python docs/tables.py`."""

# For each method: the axes that it grows, and whether it preserves the function of a
# pre-LN model.
METHODS = {
    "stack": ("layers", "no"),
    "interleave": ("layers", "no"),
    "g_stack": ("layers (a multiple of the old number)", "no"),
    "llama_pro": ("layers (at most twice the old number)", "yes, bitwise; post-LN models: no"),
    "untie": ("nothing", "yes, bitwise"),
    "tie": ("nothing", "no"),
    "fpi": (
        "embed, heads, kv-heads, mlp",
        "heads and mlp: yes; embed: no, as the norms see some units more often",
    ),
    "net2net": (
        "embed, heads, kv-heads, mlp",
        "heads and mlp: yes; embed: no, as the norms see some units more often",
    ),
    "aki": ("layers, embed, heads, kv-heads, mlp", "no, by design"),
    "hypercloning": ("embed, heads, kv-heads, mlp (a multiple of the old size)", "yes"),
    "lemon": (
        "embed, heads, kv-heads, mlp",
        "yes; in post-LN models and with LayerScale only if embed grows to a multiple",
    ),
    "mslt": ("layers (at most twice the old number)", "no"),
    "midas": ("layers (one more block, whose size divides the old number of layers)", "no"),
    "lidas": ("layers (at most twice the old number)", "no"),
    "solar": ("layers (even, or odd if blend is odd)", "no"),
    "passthrough": ("layers (the number of layers in a list)", "no"),
    "upcycle": ("experts", "yes"),
    "expert_copies": ("experts", "only if each token uses one expert, whose gate is 1"),
    "virtual_groups": (
        "experts, mlp (experts with fewer mlp units each)",
        "yes, if each token uses a multiple of the number of parts",
    ),
    "loop": ("nothing", "no"),
    "unloop": ("layers (the number of passes of a loop)", "yes, for a model with a loop"),
    "zero_pad": ("embed, heads, kv-heads, mlp", "heads and mlp: yes; embed: no"),
    "staged": ("embed, heads, kv-heads, mlp (twice the old size, for all of them)", "yes"),
    "sparkling": ("embed, heads, kv-heads, mlp", "no; it preserves the scale of activations"),
    "average": ("layers, embed, heads, kv-heads, mlp", "no"),
}
EXPERTS = ("upcycle", "expert_copies", "virtual_groups")
FORMATS = (
    "bonsai",
    "easydel",
    "gemma",
    "levanter",
    "maxtext",
    "nanodo",
    "penzai",
    "torchtitan",
    "tunix",
)
OPTIMIZER_POLICIES = ("copy", "exact", "asymmetric")
