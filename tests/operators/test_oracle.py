"""Every operator equals a slow NumPy transcription of its paper's formula, per parameter.

The transcriptions are in the layout ``y = x W``, ``[in, out]``, with heads and their dimensions as
one axis. They share no code with jaxgrow; random draws are read from the growth. The tolerance is
1e-14, for float64 sums of a few numbers of order one.
"""

import re
from dataclasses import replace
from functools import partial

import chex
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from papers import AXES, fpi_matrix, in_matrices, layers, widened

from jaxgrow import correct, grow, interpolate
from jaxgrow.extras.fresh import fresh, spectral
from jaxgrow.growth.maps import tile
from jaxgrow.growth.matrices import dense
from jaxgrow.operators import (
    aki,
    average,
    coalesce,
    decoalesce,
    fpi,
    g_stack,
    g_stack_tokens,
    hypercloning,
    interleave,
    lemon,
    lidas,
    llama_pro,
    midas,
    midas_lengths,
    mslt,
    new_layers,
    solar,
    sparkling,
    stack,
    staged,
    zero_pad,
)

TOLERANCE = 1e-14
RAGGED = {"embed": 8, "heads": 5, "mlp": 13}
K = tiny.config().head_dim

either = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def close(a, b):
    chex.assert_trees_all_close(a, b, rtol=0, atol=TOLERANCE)


def grown(growth, tied=True, **widths):
    """Return ``(parameters, the grown parameters as matrices)``."""
    config = tiny.config(tied=tied, **widths)
    params = tiny.params(config)
    return params, in_matrices(grow(growth, params, tiny.axes(config)))


def of_heads(units):
    """Return the positions of all dimensions of these heads."""
    return [K * unit + k for unit in units for k in range(K)]


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
    names = {"embed": "d", "heads": "qkv", "mlp": "ff", None: None}
    out_map[None] = np.eye(11)
    write, read = out_map["d"], in_map["d"].T
    table, final = {
        "untied": (write, write),
        "published": (read, write),
        "repaired": (write, read),
    }[tied]
    new = widened(
        params,
        lambda W, i, o: in_map[names[i]].T @ W @ out_map[names[o]].T,
        lambda v, axis: out_map[names[axis]] @ v,
        final=lambda v, _: final @ v,
    )
    for name in ("token_embedding", "position_embedding"):
        new[name] = params[name] @ table.T
    wide = new["layers"]
    new["layers"] = [
        {name: sum(w * layer[name] for w, layer in zip(row, wide, strict=True)) for name in wide[0]}
        for row in depth
    ]
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


# --- width ---


@either
def test_function_preserving_initialisation(tied):
    """Old units stay in their places; the matrices of the copies are divided by their number."""
    growth = fpi(tiny.WIDTHS, RAGGED, seed=3)
    g = {axis: m.write.index[:, 0].tolist() for axis, m in growth.items()}
    for axis, sources in g.items():
        old = tiny.WIDTHS[axis]
        assert len(sources) == RAGGED[axis]
        assert sources[:old] == list(range(old))
        assert all(0 <= source < old for source in sources)
    g["heads"] = of_heads(g["heads"])
    g[None] = range(11)
    params, large = grown(growth, tied)
    shares = [g["embed"].count(k) if tied else 1 for k in g["embed"]]
    expected = widened(
        params,
        lambda W, i, o: fpi_matrix(W, g[i], g[o]),
        lambda v, axis: v[list(g[axis])],
        final=lambda v, _: v[g["embed"]] / shares,
    )
    close(large, expected)


def test_fpi_draws_uniformly_among_all_old_units():
    """The 35 draws among 3 heads are each within three standard deviations of a third.

    Another seed gives other draws.
    """
    one, other = (
        fpi({"heads": 3}, {"heads": 38}, seed=seed)["heads"].write.index[3:, 0] for seed in (0, 1)
    )
    assert (np.abs(np.bincount(one, minlength=3) - 35 / 3) < 3 * (35 * 2 / 9) ** 0.5).all()
    assert (one != other).any()


@either
@pytest.mark.parametrize("k", [2, 3])
def test_hypercloning(k, tied):
    """``tile(W, (k, k)) / k``; vectors and embeddings are tiled.

    An untied head is tiled and divided by k; with a tied head, the final norm is.
    """
    params, large = grown(hypercloning(tiny.WIDTHS, tiny.wider(k)), tied)

    def matrix(W, reads, writes):
        return np.tile(W, (k, k if writes else 1)) / k

    def vector(v, axis):
        return np.tile(v, k)

    final = k if tied else 1
    close(large, widened(params, matrix, vector, final=lambda v, _: np.tile(v, k) / final))


@either
def test_zero_padding(tied):
    """``[[W, 0], [0, 0]]``, and ``[v, 0]``."""
    params, large = grown(zero_pad(tiny.WIDTHS, RAGGED), tied)
    size = {"embed": 8, "heads": 5 * K, "mlp": 13, None: 11}

    def corner(x, *axes):
        out = np.zeros([size[axis] for axis in axes])
        out[tuple(slice(n) for n in x.shape)] = x
        return out

    close(large, widened(params, corner, corner))


@either
@pytest.mark.parametrize(
    ("more", "sources"),
    [({}, [0, 1, 2]), ({"layers": 8}, [0, 1, 2, 0, 1, 2, 1, 2]), ({"layers": 6}, [0, 1, 2] * 2)],
)
def test_advanced_knowledge_initialisation(more, sources, tied):
    """New heads and units come from FPI of the next layer, both as outputs and as inputs.

    The widened model is then stacked.
    """
    old = {**tiny.WIDTHS, "layers": 3}
    params, large = grown(aki(old, {**RAGGED, **more}, seed=3), tied, layers=3)
    g = {axis: m.write.index[:, 0].tolist() for axis, m in fpi(old, RAGGED, seed=3).items()}
    g["heads"] = of_heads(g["heads"])
    g[None] = range(11)

    def fpi_vector(v, axis):
        return np.array([v[k] for k in g[axis]])

    def last_norm(v, _):
        return np.array([v[k] / (g["embed"].count(k) if tied else 1) for k in g["embed"]])

    expected = widened(
        params, lambda W, i, o: fpi_matrix(W, g[i], g[o]), fpi_vector, final=last_norm
    )
    wide = []
    for layer in range(3):
        this, following = expected["layers"][layer], expected["layers"][min(layer + 1, 2)]
        new = {}
        for name, W in layers(params)[layer].items():
            U = this[name].copy()
            # The axes of this leaf whose new units come from above: all but the residual stream.
            axes = AXES.get(name) or (AXES.get(name.split()[0], ("", "embed"))[1],)
            for dim, axis in enumerate(axes):
                if axis != "embed":
                    for unit in range(W.shape[dim], U.shape[dim]):
                        where = (slice(None),) * dim + (unit,)
                        U[where] = following[name][where]
            new[name] = U
        wide.append(new)
    close(large, {**expected, "layers": [wide[source] for source in sources]})


@either
def test_averages(tied):
    """The averaged initialisation of LiGO: ``B_out W B_in.T``, followed by noisy stacking.

    Each row of C, and of w, is a mean.
    """
    growth = average(tiny.WIDTHS, {**RAGGED, "layers": 5}, seed=3)
    B = {axis: dense(m.write) for axis, m in growth.items()}
    for axis, rows in B.items():
        np.testing.assert_allclose(rows.sum(1), 1)
        if axis != "layers":
            np.testing.assert_array_equal(rows[: tiny.WIDTHS[axis]], np.eye(tiny.WIDTHS[axis]))
    assert (B["embed"][6:] > 0).all() and len(np.unique(B["embed"][6:])) == 12
    assert [int(row.argmax()) for row in B["layers"]] == [0, 1, 0, 1, 0] and (
        B["layers"].max(1) > 0.97
    ).all()
    assert (B["layers"] > 0).all()
    params, large = grown(growth, tied)
    B = {**B, "heads": np.kron(B["heads"], np.eye(K)), None: np.eye(11)}
    expected = widened(params, lambda W, i, o: B[i] @ W @ B[o].T, lambda v, axis: B[axis] @ v)
    old, mixed = expected["layers"], B["layers"]
    expected["layers"] = [
        {name: sum(w * layer[name] for w, layer in zip(row, old, strict=True)) for name in old[0]}
        for row in mixed
    ]
    close(large, expected)


def test_averages_of_heads_that_share_keys_keep_to_their_places():
    growth = average({"heads": 4, "kv_heads": 2, "embed": 6}, {"heads": 6, "kv_heads": 3}, seed=1)
    assert growth["kv_heads"].write.shape == (3, 2)
    np.testing.assert_array_equal(
        dense(growth["heads"].write)[4:] > 0, [[1, 0, 1, 0], [0, 1, 0, 1]]
    )
    wide = dense(average({"mlp": 50}, {"mlp": 53}, seed=1)["mlp"].write)
    assert ((wide[50:] > 0).sum(1) == 32).all() and len(np.unique(wide[50:] > 0, axis=0)) == 3


@either
def test_what_is_fresh_is_as_at_birth_and_the_rest_stays(tied):
    growth = fpi(tiny.WIDTHS, RAGGED, seed=3) | interleave(tiny.WIDTHS, {"layers": 5})
    config = tiny.config(tied=tied)
    params, axes, large = (
        tiny.params(config),
        tiny.axes(config),
        tiny.params(config.resized(growth), seed=9),
    )
    filled = fresh(params, growth, axes, large)
    places = {**tiny.WIDTHS, "heads": 3 * K, None: 11}

    def corner(new, W, *axes):
        out = new.copy()
        out[tuple(slice(places[axis]) for axis in axes)] = W
        return out

    expected, small = in_matrices(large), in_matrices(params)
    for i, of in ((0, 0), (3, 1)):  # the first copies of two layers among five
        layer = expected["layers"][i]
        for name, new in layer.items():
            known = AXES.get(name) or (AXES.get(name.split()[0], ("", "embed"))[1],)
            layer[name] = corner(new, small["layers"][of][name], *known)
    for table in ("token_embedding", "position_embedding"):
        expected[table] = expected[table].copy()
        expected[table][:, :6] = small[table]
    expected["final_norm"] = {
        kind: corner(new, small["final_norm"][kind], "embed")
        for kind, new in expected["final_norm"].items()
    }
    if not tied:
        expected["head_kernel"] = corner(
            expected["head_kernel"], small["head_kernel"], "embed", None
        )
    chex.assert_trees_all_equal(in_matrices(filled), expected)
    with pytest.raises(
        ValueError, match="fresh needs a growth that copies units, but the map from 6 to 8 units"
    ):
        fresh(params, average(tiny.WIDTHS, RAGGED), axes, large)


def test_fresh_checks_the_growth_and_the_initial_parameters():
    params, axes = {"w": np.ones((2, 3), jnp.bfloat16)}, {"w": ("embed.in", "mlp")}
    initial = {"w": np.full((2, 6), 1 / 3, np.float32)}
    with pytest.raises(ValueError, match="w: axis 'mlp' has size 3, but its map takes 4 to 8"):
        fresh(params, {"mlp": tile(4, 2)}, axes, initial)
    for shape in ((2, 3), (1, 6), (6,)):
        wrong = re.escape(
            f"w: initial has shape {shape}, but the grown parameter has shape (2, 6). Initialize"
        )
        with pytest.raises(ValueError, match=wrong):
            fresh(params, {"mlp": tile(3, 2)}, axes, {"w": np.ones(shape)})
    filled = fresh(params, {"mlp": tile(3, 2)}, axes, initial)["w"]
    assert filled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(filled[:, :3], params["w"])
    np.testing.assert_array_equal(filled[:, 3:], initial["w"][:, 3:].astype(jnp.bfloat16))


def test_random_matrices_of_layers_at_the_spectral_scale():
    config = tiny.config(embed=48, heads=12, mlp=144)
    params = tiny.params(config)
    before, after = in_matrices(params), in_matrices(spectral(params, tiny.axes(config)))
    for old, new in zip(before["layers"], after["layers"], strict=True):
        for name, x in new.items():
            if name in AXES:
                assert np.linalg.norm(x, ord=2) == pytest.approx(
                    (x.shape[1] / x.shape[0]) ** 0.5, rel=0.1
                )
                assert np.linalg.norm(old[name], ord=2) > 5  # the control
                old[name] = x
    chex.assert_trees_all_equal(after, before)  # all other parameters


def test_the_spectral_scale_of_kernels_with_outputs_first():
    kernel = np.random.default_rng(0).normal(size=(1, 100, 400))
    rows, columns = (
        spectral({"w": x}, {"w": names})["w"]
        for x, names in (
            (kernel, ("layers", "embed.in", "mlp")),
            (kernel.swapaxes(1, 2), ("layers", "mlp", "embed.in")),
        )
    )
    np.testing.assert_allclose(columns.swapaxes(1, 2), rows, rtol=1e-6)


@either
def test_staged_training(tied):
    """``[[W, 0], [0, W]]`` and ``[v, v]``; the final norm or an untied head is halved."""
    params, large = grown(staged(tiny.WIDTHS, tiny.wider(2)), tied)

    def matrix(W, reads, writes):
        if writes is None:
            return np.concatenate([W, W]) / 2
        zero = np.zeros_like(W)
        return np.block([[W, zero], [zero, W]])

    def vector(v, axis):
        return np.concatenate([v, v])

    close(
        large,
        widened(params, matrix, vector, final=lambda v, _: vector(v, "embed") / (2 if tied else 1)),
    )


def shares_of(growth, axis):
    """Return the share of the source weight for each unit's readers, zero in spare slots."""
    maps = growth if isinstance(growth, dict) else growth.rules[-1].terms[0]
    read = maps[axis].read
    return (
        read[:, : tiny.WIDTHS[axis]].sum(1) if isinstance(read, np.ndarray) else read.weight[:, 0]
    )


@either
@pytest.mark.parametrize("embed", [8, 15, 12], ids=lambda n: f"6 to {n}")
def test_lemon(embed, tied):
    """Tiles have unequal shares, and the spare slots hold means, which the norms silence.

    The factor ``eta^2 = tiles D / D'`` of the norms compensates for them.
    """
    growth = lemon(tiny.WIDTHS, {**RAGGED, "embed": embed}, seed=3)
    params, large = grown(growth, tied)
    tiles = {8: 6, 15: 12, 12: 12}[embed]
    eta = (tiles / embed) ** 0.5
    resized = tiny.config().resized(growth)
    assert resized == replace(tiny.config(**RAGGED), embed=embed, eps=resized.eps)
    assert resized.eps == pytest.approx(tiny.config().eps * eta**2, rel=1e-15)
    share = {axis: shares_of(growth, axis) for axis in RAGGED}
    for axis, drawn in share.items():
        old = tiny.WIDTHS[axis]
        for unit in range(old):
            of_unit = drawn[unit : tiles if axis == "embed" else None : old]
            np.testing.assert_allclose(of_unit.sum(), 1, rtol=0, atol=TOLERANCE)
            assert len(of_unit) == 1 or len(set(of_unit)) == len(of_unit)
    g = {
        "embed": [i % 6 for i in range(tiles)],
        "heads": of_heads([0, 1, 2, 0, 1]),
        "mlp": [i % 9 for i in range(13)],
    }
    share["heads"] = np.repeat(share["heads"], K)
    g[None] = range(11)

    def vector(v, axis):
        spare = [sum(v) / 6] * (embed - tiles) if axis == "embed" else []
        return np.array([*[v[k] for k in g[axis]], *spare])

    def matrix(W, reads, writes):
        rows = [share[reads][i] * vector(W[k], writes) for i, k in enumerate(g[reads])]
        spare = [0 * rows[0]] * (embed - tiles) if reads == "embed" else []
        return np.array([*rows, *spare])

    def norm(v, kind, last=False):
        v = eta * v if kind == "scale" else v
        tile = [
            v[k] * (share["embed"][i] if last and tied else 1) for i, k in enumerate(g["embed"])
        ]
        return np.array([*tile, *[0] * (embed - tiles)])

    close(large, widened(params, matrix, vector, norm, lambda v, kind: norm(v, kind, last=True)))


def test_lemon_s_noise():
    """The noise is ``N(0, 1 / (sqrt(D') L))``, measured on 900 copies.

    The deviation is within three standard errors, 7 %, and the mean is within 0.1.
    """
    growth = lemon({"layers": 3, "embed": 4, "mlp": 900}, {"embed": 16, "mlp": 1800}, seed=1)
    noise = (growth["mlp"].read.weight[900:, 0] - 1 / 2) * (16**0.5 * 3)
    np.testing.assert_allclose(noise.std(), 1, atol=0.07)
    np.testing.assert_allclose(noise.mean(), 0, atol=0.1)
    other = lemon({"layers": 3, "embed": 4, "mlp": 900}, {"embed": 16, "mlp": 1800}, seed=2)
    assert (other["mlp"].read.weight != growth["mlp"].read.weight).any(1).all()


@either
@pytest.mark.parametrize(("target", "alpha"), [
    (RAGGED, {"embed": 2**-0.5, "heads": 3**-0.5, "mlp": (3 / 7) ** 0.5}),  # c = 1/3, 2/3, 4/9
    # c = 3/2, 5/3, 2
    ({"embed": 15, "heads": 8, "mlp": 27}, {"embed": 0.4, "heads": 0.375, "mlp": 1 / 3}),
    ({"mlp": 18}, {"embed": 1, "heads": 1, "mlp": 0.5}),  # c = 1, and 0
])  # fmt: skip
def test_sparkling(target, alpha, tied):
    """Fan-out copies ``[y, y~]``, and all of fan-in is ``alpha [W, W~]``.

    The final norm before a tied head counts as fan-in.
    """
    params, large = grown(sparkling(tiny.WIDTHS, target), tied)
    new = {**tiny.WIDTHS, **target}
    g = {
        axis: [i % tiny.WIDTHS[axis] for i in range(new[axis])]
        for axis in ("embed", "heads", "mlp")
    }
    g["heads"] = of_heads(g["heads"])
    g[None] = range(11)

    def vector(v, axis):
        return np.array([v[k] for k in g[axis]])

    def matrix(W, reads, writes):
        return np.array([[alpha[reads] * W[i, j] for j in g[writes]] for i in g[reads]])

    close(
        large,
        widened(
            params,
            matrix,
            vector,
            final=lambda v, _: vector(v, "embed") * (alpha["embed"] if tied else 1),
        ),
    )


@either
def test_sparkling_twice_as_wide_is_hypercloning_to_the_bit(tied):
    one, other = (grown(f(tiny.WIDTHS, tiny.wider(2)), tied)[1] for f in (sparkling, hypercloning))
    chex.assert_trees_all_equal(one, other)


# --- depth ---


@pytest.mark.parametrize(("operator", "old", "new", "sources"), [
    (stack, 3, 6, [0, 1, 2, 0, 1, 2]),
    (stack, 3, 5, [0, 1, 2, 0, 1]),
    (interleave, 3, 6, [0, 0, 1, 1, 2, 2]),
    (interleave, 3, 5, [0, 0, 1, 1, 2]),
    (interleave, 2, 5, [0, 0, 0, 1, 1]),
    (partial(interleave, period=3), 3, 6, [0, 1, 2, 0, 1, 2]),
    (partial(interleave, period=2), 4, 8, [0, 1, 0, 1, 2, 3, 2, 3]),
    (partial(interleave, period=2), 4, 6, [0, 1, 0, 1, 2, 3]),
    (partial(interleave, period=2), 3, 6, [0, 0, 1, 1, 2, 2]),
    (g_stack, 2, 8, [0, 1] * 4),
    (mslt, 6, 8, [0, 1, 2, 3, 4, 5, 4, 5]),
    (mslt, 3, 6, [0, 1, 2, 0, 1, 2]),
    (midas, 6, 8, [0, 1, 2, 3, 2, 3, 4, 5]),  # block 2 of 3
    (midas, 4, 5, [0, 1, 1, 2, 3]),  # 2 of 4
    (midas, 5, 6, [0, 1, 2, 2, 3, 4]),  # 3 of 5
    (midas, 3, 6, [0, 1, 2, 0, 1, 2]),  # 1 of 1
    (lidas, 6, 8, [0, 1, 2, 2, 3, 3, 4, 5]),
    (lidas, 6, 10, [0, 1, 2, 1, 2, 3, 4, 3, 4, 5]),
    (lidas, 5, 6, [0, 1, 2, 2, 3, 4]),  # an odd number, with most layers from above
    (lidas, 3, 6, [0, 0, 1, 2, 1, 2]),
    (solar, 32, 48, [*range(24), *range(8, 32)]),
    (solar, 3, 4, [0, 1, 1, 2]),
    (solar, 3, 6, [0, 1, 2, 0, 1, 2]),
])  # fmt: skip
def test_copies_of_layers(operator, old, new, sources):
    params, large = grown(operator({"layers": old}, {"layers": new}), layers=old)
    small = in_matrices(params)
    chex.assert_trees_all_equal(
        large, {**small, "layers": [small["layers"][source] for source in sources]}
    )


def test_solar_with_the_overlap_averaged():
    """One copy has the layers 0 to 3, the other has the layers 1 to 4.

    The last two layers of the first copy and the first two of the second are averaged: (2, 1) and
    (3, 2).
    """
    params, large = grown(solar({"layers": 5}, {"layers": 6}, blend=2), layers=5)
    small = in_matrices(params)
    layer = small["layers"]
    means = [
        {name: (layer[i][name] + layer[j][name]) / 2 for name in layer[0]}
        for i, j in ((2, 1), (3, 2))
    ]
    close(large, {**small, "layers": [layer[0], layer[1], *means, layer[3], layer[4]]})


@pytest.mark.parametrize(("old", "new", "sources", "identities"), [
    (4, 6, [0, 1, 1, 2, 3, 3], {2, 5}),
    (2, 4, [0, 0, 1, 1], {1, 3}),
    (3, 4, [0, 1, 2, 2], {3}),
    (5, 7, [0, 1, 1, 2, 3, 4, 4], {2, 6}),
    (2, 2, [0, 1], set()),
])  # fmt: skip
def test_llama_pro(old, new, sources, identities):
    """A copy whose sublayers add nothing follows every L/N layers."""
    growth = llama_pro({"layers": old}, {"layers": new})
    params, large = grown(growth, layers=old)
    small = in_matrices(params)
    expected = [dict(small["layers"][source]) for source in sources]
    for i in identities:
        for name in ("out", "out bias", "down", "down bias"):
            expected[i][name] = 0 * expected[i][name]
    chex.assert_trees_all_equal(large, {**small, "layers": expected})
    assert set(new_layers(growth)) == identities


def test_new_layers_are_all_but_the_first_copies():
    old, new = {"layers": 4}, {"layers": 6}
    assert new_layers(stack(old, {"layers": 8})) == (4, 5, 6, 7)
    assert new_layers(mslt(old, new)) == (4, 5)
    assert new_layers(midas(old, new)) == (2, 3)
    assert new_layers(solar(old, new)) == (3, 4)
    assert new_layers(aki({**tiny.WIDTHS, **old}, {"mlp": 10, **new})) == (4, 5)
    assert new_layers(stack(old, {})) == ()


# --- when to grow ---


@pytest.mark.parametrize(
    ("parameters", "tokens", "expected"),
    [(8e9, 15e12, 6.58e9), (7e9, 2e12, 11.11e9), (13e9, 2e12, 15.84e9), (70e9, 2e12, 42.48e9)],
)
def test_g_stack_s_published_times(parameters, tokens, expected):
    np.testing.assert_allclose(g_stack_tokens(parameters, tokens), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("parameters", "tokens", "asked"), [(410e6, 8.2e9, "242%"), (124e6, 2.5e9, "834%")]
)
def test_g_stack_tokens_are_capped_at_a_share_of_the_training(parameters, tokens, asked):
    with pytest.warns(UserWarning, match=f"gives .* {asked} of the training.*; using 25%"):
        assert g_stack_tokens(parameters, tokens) == tokens / 4
    with pytest.warns(UserWarning, match="using 10%"):
        np.testing.assert_allclose(
            g_stack_tokens(parameters, tokens, at_most=0.1), tokens / 10, rtol=1e-15
        )


def test_the_lengths_of_midas_s_stages():
    np.testing.assert_allclose(midas_lengths(4), [0.1, 0.2, 0.3, 0.4], rtol=1e-15)
    np.testing.assert_allclose(midas_lengths(3, power=2), [1 / 14, 4 / 14, 9 / 14], rtol=1e-15)
    assert midas_lengths(1) == (1.0,)
