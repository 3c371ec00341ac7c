"""Every operator equals a slow NumPy transcription of its paper's formula, written in loops.

The tests use `jaxgrow.grow` and its maps only for comparison. Weights are converted to the papers'
layout first: a matrix ``[out, in]`` for the column convention ``y = W x``, ``[in, out]`` for
``y = x W``, with heads and their dimensions as one axis. The tolerance is 1e-14, for float64 sums
of a few numbers of order one.
"""

from functools import partial

import chex
import numpy as np
import pytest
import tiny
from papers import fpi_matrix, in_matrices, layers

from jaxgrow import correct, grow, interpolate
from jaxgrow.operators import coalesce, decoalesce, fpi, hypercloning, interleave, stack

TOLERANCE = 1e-14


def close(a, b):
    chex.assert_trees_all_close(a, b, rtol=0, atol=TOLERANCE)


# --- multi-level: matrices F, T, R, G ---


def rownorm(matrix):
    out = np.zeros_like(matrix)
    for i, row in enumerate(matrix):
        if row.sum() != 0:
            out[i] = row / row.sum()
    return out


def mean_matrix(groups, chunk):
    """``F[i, j] = 1 / |g_i|`` for units j of group i; each unit is a block of ``chunk`` numbers."""
    F = np.zeros((len(groups) * chunk, sum(map(len, groups)) * chunk))
    for i, group in enumerate(groups):
        for j in group:
            for c in range(chunk):
                F[i * chunk + c, j * chunk + c] = 1 / len(group)
    return F


def multilevel(params, head_groups, layer_groups, sizes, tied, direction):
    """Compute C (``down``) or D (``up``) of a GPT-2.

    This follows the parameter table of the published mapper, in its general form.
    """
    H = sizes["heads"]
    F = {
        "d": mean_matrix(head_groups, sizes["embed"] // H),
        "qkv": mean_matrix(head_groups, sizes["head_dim"]),
        "ff": mean_matrix(head_groups, sizes["mlp"] // H),
    }
    T = {axis: rownorm(f.T) for axis, f in F.items()}
    R = mean_matrix(layer_groups, 1)
    G = rownorm(R.T)
    down = direction == "down"
    out_map, in_map, depth = (F, T, R) if down else (T, F, G)
    axes = {"query": ("qkv", "d"), "key": ("qkv", "d"), "value": ("qkv", "d"), "out": ("d", "qkv")}
    axes |= {"up": ("ff", "d"), "down": ("d", "ff")}

    def width(block):
        new = {}
        for name, x in block.items():
            if name in axes:
                o, i = axes[name]
                W = x.T  # [out, in]
                new[name] = (out_map[o] @ W @ in_map[i]).T
            else:
                o = (
                    axes[name.removesuffix(" bias")][0]
                    if name.removesuffix(" bias") in axes
                    else "d"
                )
                new[name] = out_map[o] @ x
        return new

    wide = [width(block) for block in layers(params)]
    new = {"layers": []}
    for t in range(depth.shape[0]):
        new["layers"].append(
            {k: sum(depth[t, s] * wide[s][k] for s in range(depth.shape[1])) for k in wide[0]}
        )
    write, read = out_map["d"], in_map["d"].T
    tables, final = {
        "untied": (write, write),
        "published": (read, write),
        "repaired": (write, read),
    }[tied]
    for table in ("token_embedding", "position_embedding"):
        new[table] = params[table] @ tables.T
    new["final_norm"] = {k: final @ v for k, v in params["final_norm"].items()}
    if "head_kernel" in params:
        new["head_kernel"] = (params["head_kernel"].T @ in_map["d"]).T
    return new


GROUPS = {
    "pairs": (((0, 2), (1, 3)), ((0, 1), (2, 3))),
    "3 + 1": (((1,), (3, 0, 2)), ((2, 0, 1), (3,))),
    "random": (tiny.random_groups(4, 2, seed=0), tiny.random_groups(4, 2, seed=1)),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("tied", ["untied", "published", "repaired"])
def test_coalescing_and_decoalescing(groups, tied):
    """A tied head reads the embedding, which the published maps therefore sum down and share up.

    The repaired maps do this with the final norm instead.
    """
    heads, depth = groups
    large = {"layers": 4, "heads": 4, "embed": 12, "mlp": 20}
    small = {"layers": 2, "heads": 2, "embed": 6, "mlp": 10}
    config = tiny.config(tied=tied != "untied", **large)
    axes = tiny.paper_axes(config) if tied == "published" else tiny.axes(config)
    sizes = {**large, "head_dim": config.head_dim}

    params = tiny.params(config)
    down = grow(coalesce(large, heads=heads, layers=depth), params, axes)
    close(in_matrices(down), multilevel(params, heads, depth, sizes, tied, "down"))

    params = tiny.params(tiny.config(tied=tied != "untied", **small))
    up = grow(decoalesce(large, heads=heads, layers=depth), params, axes)
    close(in_matrices(up), multilevel(params, heads, depth, sizes, tied, "up"))


def test_interpolation_and_correction():
    large, small = {"layers": 4}, {"layers": 2}
    config = tiny.config(**large)
    m, s = tiny.params(config, 1), tiny.params(tiny.config(**small), 2)
    a, groups = 0.25, ((1, 3), (0, 2))
    of = [1, 0, 1, 0]  # the group of each layer
    got = correct(m, s, decoalesce(large, layers=groups), tiny.axes(config), alpha=a)
    u = tiny.params(config, 3)
    mixed = interpolate(m, u, a)
    for path, x, y in tiny.pairs(m, u):
        np.testing.assert_array_equal(dict_at(mixed, path), (1 - a) * x + a * y)
    for path, x, y in tiny.pairs(m["blocks"], s["blocks"]):
        expected = np.stack(
            [x[i] + a * (y[of[i]] - sum(x[j] for j in groups[of[i]]) / 2) for i in range(4)]
        )
        np.testing.assert_allclose(dict_at(got["blocks"], path), expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        got["token_embedding"],
        (1 - a) * m["token_embedding"] + a * s["token_embedding"],
        rtol=0,
        atol=TOLERANCE,
    )


def dict_at(tree, path):
    for key in path.split("/"):
        tree = tree[key]
    return tree


# --- width: y = x W, matrices [in, out] ---


def test_function_preserving_initialisation():
    target = {"embed": 8, "heads": 5, "mlp": 13}
    growth = fpi(tiny.WIDTHS, target, seed=3)
    g = {name: growth[name].write.index[:, 0].tolist() for name in growth}
    for name, sources in g.items():
        old = tiny.WIDTHS[name]
        assert len(sources) == target[name]
        assert sources[:old] == list(range(old))
        assert all(0 <= source < old for source in sources)
    K = tiny.config().head_dim
    qkv = [K * head + k for head in g["heads"] for k in range(K)]
    maps = {
        "query": ("embed", qkv),
        "key": ("embed", qkv),
        "value": ("embed", qkv),
        "out": (qkv, "embed"),
    }
    maps |= {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    maps = {
        name: tuple(g[m] if isinstance(m, str) else m for m in pair) for name, pair in maps.items()
    }

    config = tiny.config(tied=False)
    params = tiny.params(config)
    grown = grow(growth, params, tiny.axes(config))
    for new, old in zip(layers(grown), layers(params), strict=True):
        for name, W in old.items():
            if name in maps:
                expected = fpi_matrix(W, *maps[name])
            else:
                g_out = maps.get(name.removesuffix(" bias"), (None, g["embed"]))[1]
                expected = np.array([W[j] for j in g_out])
            np.testing.assert_allclose(new[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
    for table in ("token_embedding", "position_embedding"):
        np.testing.assert_array_equal(grown[table], params[table][:, g["embed"]])
    head = fpi_matrix(params["head_kernel"], g["embed"], range(config.vocab))
    close(grown["head_kernel"], head)


def test_fpi_draws_uniformly_among_all_old_units():
    """The 35 draws among 3 heads are each within three standard deviations of a third.

    Another seed gives other draws.
    """
    one, other = (
        fpi({"heads": 3}, {"heads": 38}, seed=seed)["heads"].write.index[3:, 0] for seed in (0, 1)
    )
    assert (np.abs(np.bincount(one, minlength=3) - 35 / 3) < 3 * (35 * 2 / 9) ** 0.5).all()
    assert (one != other).any()


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_hypercloning(k, tied):
    """``tile(W, (k, k)) / k``; vectors and embeddings are tiled.

    An untied head is tiled and divided by k; with a tied head, the final norm is.
    """
    config = tiny.config(tied=tied)
    params = tiny.params(config)
    grown = grow(hypercloning(tiny.WIDTHS, tiny.wider(k)), params, tiny.axes(config))
    for new, old in zip(layers(grown), layers(params), strict=True):
        close(
            new,
            {n: np.tile(x, (k, k)) / k if x.ndim == 2 else np.tile(x, k) for n, x in old.items()},
        )
    for table in ("token_embedding", "position_embedding"):
        close(grown[table], np.tile(params[table], (1, k)))
    close(
        grown["final_norm"],
        {n: np.tile(x, k) / (k if tied else 1) for n, x in params["final_norm"].items()},
    )
    if not tied:
        close(grown["head_kernel"], np.tile(params["head_kernel"], (k, 1)) / k)


# --- depth ---


@pytest.mark.parametrize(
    ("operator", "old", "new", "sources"),
    [
        (stack, 3, 6, [0, 1, 2, 0, 1, 2]),
        (stack, 3, 5, [0, 1, 2, 0, 1]),
        (interleave, 3, 6, [0, 0, 1, 1, 2, 2]),
        (interleave, 3, 5, [0, 0, 1, 1, 2]),
        (interleave, 2, 5, [0, 0, 0, 1, 1]),
        (partial(interleave, period=3), 3, 6, [0, 1, 2, 0, 1, 2]),
        (partial(interleave, period=2), 4, 8, [0, 1, 0, 1, 2, 3, 2, 3]),
        (partial(interleave, period=2), 4, 6, [0, 1, 0, 1, 2, 3]),
        (partial(interleave, period=2), 3, 6, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_copies_of_layers(operator, old, new, sources):
    config = tiny.config(layers=old)
    params = tiny.params(config)
    grown = grow(operator({"layers": old}, {"layers": new}), params, tiny.axes(config))
    chex.assert_trees_all_equal(layers(grown), [layers(params)[source] for source in sources])
    chex.assert_trees_all_equal({**grown, "blocks": 0}, {**params, "blocks": 0})
