"""Shared code of the oracle tests: weights in the papers' layout, and formulas in NumPy loops."""

import numpy as np

KERNELS = [("attention", n) for n in ("query", "key", "value", "out")]
KERNELS += [("mlp", "up"), ("mlp", "down")]


def flat(block):
    """Return kernels of a block as matrices ``[in, out]``, and its biases and norms as vectors."""
    embed = block["attention_norm"]["scale"].shape[0]
    out = {}
    for part, name in KERNELS:
        kernel, bias = block[part][name]["kernel"], block[part][name]["bias"]
        out[name] = kernel.reshape((-1, embed) if name in ("out", "down") else (embed, -1))
        out[name + " bias"] = bias.reshape(-1)
    for norm in ("attention_norm", "mlp_norm"):
        out[norm + " scale"], out[norm + " bias"] = block[norm]["scale"], block[norm]["bias"]
    return out


def layers(params):
    """Return the blocks one by one, as matrices."""
    count = params["blocks"]["mlp"]["up"]["bias"].shape[0]

    def layer(tree, i):
        return {k: layer(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}

    return [flat(layer(params["blocks"], i)) for i in range(count)]


def in_matrices(params):
    return {**{k: v for k, v in params.items() if k != "blocks"}, "layers": layers(params)}


def fpi_matrix(W, g_in, g_out):
    """``Ũ[i, :] = W[g_in(i), :] / C(g_in(i))``, then ``U[:, j] = Ũ[:, g_out(j)]``."""
    C = [list(g_in).count(k) for k in range(W.shape[0])]
    U = np.zeros((len(g_in), len(g_out)))
    for i in range(len(g_in)):
        for j in range(len(g_out)):
            U[i, j] = W[g_in[i], g_out[j]] / C[g_in[i]]
    return U


# The input and output axes of the matrices of a block. A bias has the output axis of its matrix.
AXES = {name: ("embed", "heads") for name in ("query", "key", "value")}
AXES |= {"out": ("heads", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


def widened(params, matrix, vector, norm=None, final=None):
    """Compute all parameters of a wider model from formulas for matrices ``[in, out]`` and vectors.

    ``matrix(W, in, out)`` and ``vector(v, axis)`` receive the axes, ``None`` for the vocabulary.
    ``norm(v, "scale")`` and ``final(v, "scale")`` compute the parameters of the inner norms and the
    last norm. Without ``norm``, inner norms are computed like vectors. Without ``final``, the last
    norm is computed like the inner norms.
    """
    norm = norm or (lambda v, _: vector(v, "embed"))
    final = final or norm

    def new(name, x):
        if name in AXES:
            return matrix(x, *AXES[name])
        module, kind = name.split()
        return vector(x, AXES[module][1]) if module in AXES else norm(x, kind)

    out = {
        "layers": [{name: new(name, x) for name, x in layer.items()} for layer in layers(params)]
    }
    for table in ("token_embedding", "position_embedding"):
        out[table] = np.stack([vector(row, "embed") for row in params[table]])
    out["final_norm"] = {kind: final(v, kind) for kind, v in params["final_norm"].items()}
    if "head_kernel" in params:
        out["head_kernel"] = matrix(params["head_kernel"], "embed", None)
    return out
