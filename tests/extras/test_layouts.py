"""Arrays with flattened axes, scaled values or other files grow as plain parameters do.

The references are `grow` and `grow_optimizer` in memory. `test_third_party` uses the real packages.
"""

import json

import numpy as np
import optax
import pytest
from foreign_runs import (
    D,
    E,
    H,
    K,
    L,
    M,
    V,
    drawn,
    easydel_run,
    levanter_params,
    levanter_step,
    titan_shapes,
)

from jaxgrow import grow, grow_optimizer, operators
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.cli.program import main
from jaxgrow.extras.integrations import command, orbax_run
from jaxgrow.extras.integrations.formats import FORMATS, GEMMA, TORCHTITAN, FormatRow, solve_sizes
from jaxgrow.extras.integrations.trees import open_tree

TX = optax.adamw(1e-3)
SIZES = {"embed": 16, "heads": 8, "kv_heads": 4, "mlp": 20}
WIDE = "--method hypercloning --embed 16 --heads 8 --kv-heads 4 --mlp 20".split()  # noqa: SIM905


@pytest.mark.parametrize(("layout", "shape"), [
    (FormatRow(("embed.in", "heads", "head_dim"), "embed (heads head_dim)"), (E, H * D)),
    (FormatRow(("heads", "head_dim", "embed.in"), "kv_heads q_heads_per_group head_dim embed"), (K, H // K, D, E)),
    (FormatRow(("embed.norm.scale",), embed_power=0.5, plus=-1.0), (E,)),
    (FormatRow(("embed.in", "mlp")).stacked(1), (E, L, M)),
    (FormatRow(("heads", "embed.in"), "(heads) embed").stacked(0), (L, H, E)),
])  # fmt: skip
def test_a_layout_reads_and_writes_what_it_says(layout, shape):
    sizes = {"embed": E, "heads": H, "kv_heads": K, "head_dim": D, "mlp": M, "layers": L}
    array = drawn(*shape)
    assert layout.shape(sizes) == shape
    for power in (0, 1, 2):
        leaf = layout.leaf(array, sizes, power)
        assert leaf.ndim == len(layout.names)
        np.testing.assert_allclose(layout.array(leaf, sizes, power), array, rtol=1e-6)


def test_the_moments_of_a_scaled_array_are_scaled_inversely():
    """If ``array = 2 * leaf - 1``, the gradient of the leaf is twice the gradient of the array."""
    layout, sizes = FormatRow(("embed.norm.scale",), embed_power=0.5, plus=-1.0), {"embed": 4}
    one = np.ones(4, np.float32)
    assert layout.leaf(one, sizes).tolist() == [1.0] * 4
    assert layout.leaf(one, sizes, 1).tolist() == [2.0] * 4
    assert layout.leaf(one, sizes, 2).tolist() == [4.0] * 4


def test_sizes_follow_from_flattened_axes_or_are_asked_for():
    layouts = {"q": FormatRow(("heads", "head_dim", "embed.in"), "(heads head_dim) embed")}
    assert solve_sizes(layouts, {"q": (12, 8)}, {"head_dim": 3})["heads"] == 4
    norm = {"n": FormatRow(("head_dim.norm.scale",))}
    assert solve_sizes(layouts | norm, {"q": (12, 8), "n": (3,)}, {})["heads"] == 4
    with pytest.raises(CheckpointError, match="--head-dim N"):
        solve_sizes(layouts, {"q": (12, 8)}, {})
    with pytest.raises(CheckpointError, match=r"\(heads head_dim\) of size 12"):
        solve_sizes(layouts, {"q": (12, 8)}, {"head_dim": 5})


# --- levanter: an OCDBT database without Orbax's metadata ---


def test_a_levanter_checkpoint_grows_as_in_memory(tmp_path):
    params = levanter_params()
    _, state = TX.update(params, TX.init(params), params)
    arrays = {f"model/{p}": x for p, x in params.items()} | {"step": np.int32(3)}
    for kind in ("mu", "nu"):
        moments = getattr(state[0], kind)
        arrays |= {f"opt_state/0/{kind}/{p}": np.asarray(x) for p, x in moments.items()}
    levanter_step(tmp_path / "a" / "step-3", arrays)
    given = (*WIDE, "--optimizer", "exact")
    assert main(["grow", str(tmp_path / "a"), str(tmp_path / "b"), *given]) == 0
    run, grown = (command.open_run(tmp_path / name, None, None) for name in "ab")
    assert run.format is FORMATS["levanter"] and grown.sizes()["heads"] == 8

    leaves = {path: run.read(place) for path, place in run.places.items()}
    growth = operators.hypercloning(run.sizes(), SIZES)
    _, state = TX.update(leaves, TX.init(leaves), leaves)
    state = grow_optimizer(TX, state, growth, leaves, run.axes, "exact")
    for path, x in grow(growth, leaves, run.axes).items():
        np.testing.assert_allclose(grown.read(grown.places[path]), x, rtol=1e-6)
    for path, place in grown.states:
        expected = (state[0].nu if place.power == 2 else state[0].mu)[path]
        np.testing.assert_allclose(grown.read(place), expected, rtol=1e-5, err_msg=path)
    manifest = json.loads((tmp_path / "b" / "step-3" / "manifest.json").read_text())
    shapes = {entry["path"]: tuple(entry["shape"]) for entry in manifest["arrays"]}
    assert shapes == {path: array.shape for path, array in grown.tree.arrays.items()}
    assert json.loads((tmp_path / "b" / "step-3" / "metadata.json").read_text()) == {"step": 3}


# --- EasyDeL: zarr folders, an index, and pickled trees ---


def test_an_easydel_checkpoint_grows_in_width(tmp_path, capsys):
    folder, given = str(easydel_run(tmp_path / "a")), ("--head-dim", str(D))
    assert main(["grow", folder, str(tmp_path / "b"), *given, *WIDE, "--optimizer", "copy"]) == 0
    run, grown = (command.open_run(tmp_path / name, "easydel", None, D) for name in "ab")
    leaves = {path: run.read(place) for path, place in run.places.items()}
    growth = operators.hypercloning(run.sizes(), SIZES)
    for path, x in grow(growth, leaves, run.axes).items():
        np.testing.assert_allclose(grown.read(grown.places[path]), x, rtol=1e-6)
    assert len(grown.states) == len(grown.places)
    assert (tmp_path / "b" / "config.json").is_file()
    deep = (*given, "--method", "llama_pro", "--layers", "4")
    assert main(["grow", folder, str(tmp_path / "c"), *deep]) == 1
    assert "format easydel cannot grow layers" in capsys.readouterr().err


# --- Gemma: scaled embeddings, shifted norms, stacked kernels ---


def gemma(transposed: bool) -> dict[str, tuple[int, ...]]:
    layer = {
        "attn/q_einsum/w": (H, E, D),
        "attn/kv_einsum/w": (2, K, E, D),
        "attn/attn_vec_einsum/w": (H, D, E),
        "mlp/gating_einsum": (2, M, E) if transposed else (2, E, M),
        "mlp/linear": (M, E),
        "pre_attention_norm/scale": (E,),
        "post_attention_norm/scale": (E,),
    }
    layers = {f"layer_{i}/{path}": shape for i in range(L) for path, shape in layer.items()}
    return {"embedder/input_embedding": (V, E), "final_norm/scale": (E,), **layers}


@pytest.mark.parametrize("transposed", [True, False])
def test_gemma_finds_the_order_of_the_gating_kernel(transposed):
    layouts = GEMMA.layouts(gemma(transposed), {})
    gating = layouts["layer_0/mlp/gating_einsum"].names
    assert gating == (("gates", "mlp", "embed.in") if transposed else ("gates", "embed.in", "mlp"))
    assert solve_sizes(layouts, gemma(transposed), {})["mlp"] == M


def test_tied_embeddings_of_penzai_are_scaled_at_the_input_only():
    """The input is ``sqrt(embed)`` times the embedding, and the logits read the embedding itself."""
    shapes = {"embedder.embeddings": (V, E), "final_norm/scale.weights": (E,)}
    layouts = FORMATS["penzai"].layouts(shapes, {})
    growth = operators.hypercloning({"embed": E}, {"embed": 4 * E})

    def grown(path: str) -> np.ndarray:
        layout = layouts[path]
        leaf = {path: layout.leaf(drawn(*shapes[path]), {"embed": E, "vocab": V})}
        wide = grow(growth, leaf, {path: layout.names})[path]
        return layout.array(wide, {"embed": 4 * E, "vocab": V})

    embedding, scale = drawn(V, E), drawn(E)
    np.testing.assert_allclose(
        grown("embedder.embeddings"), np.tile(embedding / 2, (1, 4)), rtol=1e-6
    )
    np.testing.assert_allclose(grown("final_norm/scale.weights"), np.tile(scale / 2, 4), rtol=1e-6)
    untied = FORMATS["penzai"].layouts(shapes | {"lm_head.weights": (E, V)}, {})
    assert not any(layout.embed_power for layout in untied.values())


# --- moments that no rule covers ---


def test_moments_of_unknown_shape_are_refused(tmp_path):
    """The factored second moments of Adafactor would otherwise keep their old shapes."""
    arrays = {f"model/{p}": x for p, x in levanter_params().items()}
    arrays["opt_state/0/v/lm_head/weight"] = drawn(E)
    folder = levanter_step(tmp_path / "a", arrays)
    run = command.open_run(folder, None, None)
    growth = operators.hypercloning(run.sizes(), {"mlp": 20})
    with pytest.raises(CheckpointError, match="opt_state/0/v/lm_head/weight"):
        orbax_run.growth_jobs(run, growth, "copy")


# --- torchtitan: torch.distributed.checkpoint ---


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*_rebuild")
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_a_torchtitan_checkpoint_grows_with_its_optimizer(tmp_path, fused):
    """Names of torchtitan 0.2 (separate) and 0.3 (one optimizer state of the fused kernel)."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    names = titan_shapes(fused)
    content: dict = {p.replace("/", "."): torch.from_numpy(drawn(*s)) for p, s in names.items()}
    states = dict(names)
    if fused:
        split = ("wq/weight", "wk/weight", "wv/weight")
        states = {p: s for p, s in names.items() if not p.endswith(split)}
        one = "layers/{}/attention/qkv_linear/wqkv/weight"
        states |= {one.format(i): ((H + 2 * K) * D, E) for i in range(L)}
    for path, shape in states.items():
        key = path.replace("/", ".")
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = torch.from_numpy(np.square(drawn(*shape))).to(torch.bfloat16)
            content[f"optimizer.state.{key}.{kind}"] = moment
        content[f"optimizer.state.{key}.step"] = torch.tensor(3.0)
        content[f"optimizer.param_groups.{key}.lr"] = 1e-3
    content |= {"train_state.step": 3, "lr_scheduler.last_epoch": 3}
    checkpoint.save(content, checkpoint_id=tmp_path / "a" / "step-3", no_dist=True)

    given = ("--head-dim", str(D), "--optimizer")
    deep = ("--method", "llama_pro", "--layers", "4")
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["grow", a, b, *WIDE, *given, "exact"]) == 0
    assert main(["grow", b, c, *deep, *given, "copy"]) == 0

    old, wider, grown = (open_tree(tmp_path / name) for name in "abc")
    run = command.open_run(tmp_path / "a", "torchtitan", None, D)
    assert run.format is TORCHTITAN and run.sizes()["kv_heads"] == K
    growth = operators.hypercloning(run.sizes(), SIZES)
    leaves = {path: run.read(place) for path, place in run.places.items()}
    after = command.open_run(tmp_path / "b", None, None, D)
    for path, x in grow(growth, leaves, run.axes).items():
        np.testing.assert_allclose(after.read(after.places[path]), x, rtol=1e-6)
    assert len(grown.arrays) > len(wider.arrays) > 0 and len(wider.arrays) == len(old.arrays)

    # What torchtitan does: load into the state of the larger model.
    metadata, like = checkpoint.FileSystemReader(tmp_path / "c" / "step-3").read_metadata(), {}
    for key, about in metadata.state_dict_metadata.items():
        tensor = hasattr(about, "size")
        like[key] = torch.empty(about.size, dtype=about.properties.dtype) if tensor else None
    checkpoint.load(like, checkpoint_id=tmp_path / "c" / "step-3", no_dist=True)
    assert like["layers.3.feed_forward.w1.weight"].shape == (20, 16)
    assert like["optimizer.state.layers.3.feed_forward.w1.weight.step"] == 3
    assert like["optimizer.param_groups.layers.3.feed_forward.w1.weight.lr"] == 1e-3
    assert like["train_state.step"] == 3 and like["lr_scheduler.last_epoch"] == 3
    kernel = "attention.qkv_linear.wqkv" if fused else "attention.wq"
    moment = like[f"optimizer.state.layers.3.{kernel}.weight.exp_avg"]
    assert moment.shape == (2 * (H + 2 * K) * D if fused else 2 * H * D, 16)
    assert moment.dtype == torch.bfloat16
