"""Pruning removes the units that the scores select, and inverts and corrects like coalescing.

C removes units, D is its `swap`. Results are bitwise identical where only copies and zeros are
involved; the tolerance is 1e-12 on functions and scores, in float64.
"""

import json
import shutil
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import checkpoints as gpt2
import chex
import jax
import numpy as np
import optax
import pytest
import tiny
import vision
from families import FAMILIES, VARIANTS, assert_fits, batch
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxgrow import checkpoints, correct, grow, swap
from jaxgrow.axes import axis_kind, is_layers, sibling_axis
from jaxgrow.cli.program import main
from jaxgrow.extras import importance
from jaxgrow.extras.commands.model_inputs import inputs_from_file
from jaxgrow.extras.importance import (
    angular_distance,
    block_influence,
    residual_streams,
    unit_importance,
)
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.growth.matrices import dense
from jaxgrow.models import GPT2Config, LlamaConfig
from jaxgrow.operators import best_units, keep_units, llama_pro, prune
from train.extras.pruning import Pruning
from train.plan.methods import VCycle
from train.plan.training import Measure, Train
from train.state.model import TrainState
from train.state.optim import Optim

TOLERANCE = 1e-12
LARGE = {"layers": 4, "heads": 4, "embed": 12, "mlp": 20}
CONFIG = tiny.config(**LARGE)
RNG = np.random.default_rng(0)
SCORES = {
    "layers": RNG.random(4),
    "heads": RNG.random((4, 4)),
    "mlp": RNG.random((4, 20)),
    "embed": RNG.random(12),
}
TEXT = dict(vocab=11, context=7, layers=2, embed=6, head_dim=2, mlp=9, dtype="float64")
GROUPED = LlamaConfig(**TEXT, heads=6, kv_heads=3, tied=True)

# The layers of the first stage are shifted in alternation; the second stage is one window. Heads
# are as wide as the stream, so a kernel that copies a head makes its output visible.
WIDTHS = dict(layers=(4, 3), embed=(6, 12), heads=(2, 4), head_dim=3, mlp=(9, 11))
IMAGES = dict(image=8, patch=1, channels=2, classes=7, window=4, position_mlp=5)
SWIN = SwinConfig(**WIDTHS, **IMAGES, dtype="float64")
STAGES = SWIN.sizes()
SWIN_SCORES = {
    f"{axis}.{s}": RNG.random(
        (*([SWIN.layers[s]] if axis in ("heads", "mlp") else []), STAGES[f"{axis}.{s}"])
    )
    for axis in ("layers", "heads", "mlp", "embed")
    for s in (0, 1)
}
ALL = {axis: n - 1 for axis, n in STAGES.items() if axis in SWIN_SCORES}
DOWN = {
    "layers": (CONFIG, keep_units(LARGE, {"layers": [0, 3]})),
    "units of each layer": (CONFIG, prune(LARGE, {"heads": 3, "mlp": 7}, SCORES)),
    "all": (CONFIG, prune(LARGE, {"layers": 3, "heads": 2, "mlp": 5, "embed": 6}, SCORES)),
    "layers of a stage": (SWIN, prune(STAGES, {"layers.0": 2}, SWIN_SCORES)),
    "units of stages": (SWIN, prune(STAGES, {"heads.1": 3, "mlp.0": 4}, SWIN_SCORES)),
    "all of all stages": (SWIN, prune(STAGES, ALL, SWIN_SCORES)),
}


@pytest.fixture(autouse=True)
def double(x64):
    """Compute in float64."""


# --- the kept units ---


@pytest.mark.parametrize(("config", "down"), DOWN.values(), ids=DOWN)
def test_pruning_inverts_its_swap_and_correct_keeps_the_rest(config, down):
    up, axes = swap(down), tiny.axes(config)
    large, small = tiny.params(config), tiny.params(config.resized(down), seed=1)
    chex.assert_trees_all_equal(grow(down, grow(up, small, axes), axes), small)
    chex.assert_trees_all_equal(correct(large, grow(down, large, axes), up, axes), large)
    corrected = correct(large, small, up, axes)
    chex.assert_trees_all_close(grow(down, corrected, axes), small, rtol=0, atol=TOLERANCE)
    was = [grow(up, grow(down, p, axes), axes) for p in (large, corrected)]
    for (path, x, new), (_, seen, now) in zip(
        tiny.pairs(large, corrected), tiny.pairs(*was), strict=True
    ):
        # Compare the part that C removes.
        np.testing.assert_allclose(x - seen, new - now, rtol=0, atol=TOLERANCE, err_msg=path)


@cache
def grouped():
    """Return a pruning of a GQA model, and parameters that differ between layers."""
    scores = {"heads": RNG.random((2, 6)), "mlp": RNG.random((2, 9))}
    return prune(GROUPED.sizes(), {"kv_heads": 2, "mlp": 4}, scores), tiny.params(GROUPED)


def test_units_that_are_left_out_are_units_that_say_nothing():
    """The smaller model computes the same as a model with zeros for the removed units.

    Therefore every query still reads its own key.
    """
    down, params = grouped()
    small, axes, config = grow(down, params, GROUPED.axes()), GROUPED.axes(), GROUPED.resized(down)
    assert (config.heads, config.kv_heads, config.mlp) == (4, 2, 4)
    silent = grow(swap(down), small, axes)
    expected = tiny.forward(GROUPED)(silent, tiny.tokens())
    np.testing.assert_allclose(
        tiny.forward(config)(small, tiny.tokens()), expected, rtol=0, atol=TOLERANCE
    )


def test_key_heads_go_with_the_queries_that_are_worth_most():
    sizes = {"layers": 1, "embed": 4, "heads": 6, "kv_heads": 3, "mlp": 4}
    scores = {"heads": [5.0, 0.0, 3.0, 3.0, 1.0, 4.0]}

    def kept(**target):
        found = prune(sizes, target, scores)
        return {axis: dense(m.write).argmax(1).tolist() for axis, m in found.items()}

    assert kept(kv_heads=2) == {"heads": [0, 1, 2, 3], "kv_heads": [0, 1]}
    assert kept(heads=3) == {"heads": [0, 2, 5]}  # one per key/value head
    assert kept(heads=2, kv_heads=2) == {"heads": [0, 5], "kv_heads": [0, 2]}
    message = r"4 query heads cannot be divided among 3 key/value heads"
    with pytest.raises(ValueError, match=message):
        kept(heads=4)


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=n) for n, c in FAMILIES.items() if n not in (*VARIANTS, "GPT-2")],
)
def test_every_family_is_measured_and_pruned(config):
    """Checks shapes. The class layers of CaiT have no scores and are pruned with the others."""
    config, inputs = replace(config, dtype="float32"), batch(config)[0]
    with jax.enable_x64(False):
        params = jax.eval_shape(config.init, jax.random.key(0))
        found = jax.eval_shape(partial(residual_streams, config), params, inputs)
        units = jax.eval_shape(partial(unit_importance, config), params, inputs)
    sizes = config.sizes()
    assert list(found) == [axis for axis in sizes if is_layers(axis)]
    assert set(units) == {axis for axis in sizes if axis_kind(axis) in ("heads", "mlp", "embed")}
    for layers, stream in found.items():
        heads, embed = (sibling_axis(layers, axis) for axis in ("heads", "embed"))
        assert (stream.shape[0], stream.shape[-1]) == (sizes[layers] + 1, sizes[embed])
        assert units[heads].shape == (sizes[layers], sizes[heads]) and units[embed].shape == (
            sizes[embed],
        )
    scores = {axis: RNG.random(x.shape[0] - 1) for axis, x in found.items()}
    scores |= {axis: RNG.random(x.shape) for axis, x in units.items()}
    least = {"layers": 1, "heads": 2, "mlp": 5, "embed": 4}
    least["kv_heads"] = sizes.get("kv_heads", 0) // 2
    target = {axis: least[axis_kind(axis)] for axis in sizes if axis_kind(axis) in least}
    with jax.enable_x64(False):
        small = assert_fits(prune(sizes, target, scores, config.traits["alternating"]), config)
    assert small.sizes().items() >= target.items()


# --- the choice of units and layers ---


@cache
def measured():
    """Return the parameters, streams and activations of a GPT-2."""
    params = tiny.params(CONFIG)
    both = jax.jit(
        lambda p, t: (
            residual_streams(CONFIG, p, t)["layers"],
            unit_importance(CONFIG, p, t),
            CONFIG.module.apply({"params": p}, t),
        )
    )
    return params, *jax.device_get(both(params, tiny.tokens()))


def normed(x, norm):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.eps) * norm["scale"] + norm["bias"]


def test_measured_streams_match_a_blockwise_numpy_computation():
    """NumPy computes layer after layer, and the logits from the last stream."""
    params, stream, found, logits = measured()
    x = params["token_embedding"][tiny.tokens()] + params["position_embedding"][:5]
    norms = np.zeros(12)
    for i in range(4):
        np.testing.assert_allclose(stream[i], x, rtol=0, atol=TOLERANCE)
        w = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        h = normed(x, w["attention_norm"])
        norms += np.abs(h).mean((0, 1)) / 8
        q, k, v = (
            np.einsum("btd,dhk->bthk", h, w["attention"][n]["kernel"]) + w["attention"][n]["bias"]
            for n in ("query", "key", "value")
        )
        scores = np.where(
            np.tri(5, dtype=bool), np.einsum("bthk,bshk->bhts", q, k) / 5**0.5, -np.inf
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(
            found["heads"][i], np.sqrt((y**2).sum(-1)).mean((0, 1)), rtol=0, atol=TOLERANCE
        )
        x = (
            x
            + np.einsum("bthk,hkd->btd", y, w["attention"]["out"]["kernel"])
            + w["attention"]["out"]["bias"]
        )
        h = normed(x, w["mlp_norm"])
        norms += np.abs(h).mean((0, 1)) / 8
        h = np.asarray(jax.nn.gelu(h @ w["mlp"]["up"]["kernel"] + w["mlp"]["up"]["bias"]))
        np.testing.assert_allclose(found["mlp"][i], np.abs(h).mean((0, 1)), rtol=0, atol=TOLERANCE)
        x = x + h @ w["mlp"]["down"]["kernel"] + w["mlp"]["down"]["bias"]
    np.testing.assert_allclose(found["embed"], norms, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(stream[4], x, rtol=0, atol=TOLERANCE)
    expected = normed(x, params["final_norm"]) @ params["token_embedding"].T
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-11)


def test_influence_and_angles_are_those_of_cosines():
    stream = measured()[1]

    def cosine(a, b):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))

    expected = [1 - cosine(stream[i], stream[i + 1]).mean() for i in range(4)]
    np.testing.assert_allclose(block_influence(stream), expected, rtol=0, atol=TOLERANCE)
    blocks = [(np.arccos(cosine(stream[i], stream[i + 2])) / np.pi).mean() for i in range(3)]
    a, b, c = blocks
    np.testing.assert_allclose(
        angular_distance(stream, 2), [a, min(a, b), min(b, c), c], rtol=0, atol=TOLERANCE
    )
    best = int(np.argmin(blocks))
    lost = set(range(4)) - set(
        dense(
            prune(LARGE, {"layers": 2}, {"layers": angular_distance(stream, 2)})["layers"].write
        ).argmax(1)
    )
    assert lost == {best, best + 1}
    message = "count is 5, but must be between 1 and the 4 layers of the stream"
    with pytest.raises(ValueError, match=message):
        angular_distance(stream, 5)


KEEP, PRUNE, KEYS = partial(keep_units, LARGE), partial(prune, LARGE), GROUPED.sizes()


@pytest.mark.parametrize(("make", "message"), [
    (partial(KEEP, {"layers": [1, 0]}), r"'layers': .* 0 .. 3, in ascending order, not \[1, 0\]"),
    (partial(KEEP, {"mlp": [20]}), r"some of 0 .. 19"),
    (partial(KEEP, {"mlp": [[0], [1]]}), r"or one list for each of 4 layers, .* \(2, 1\)"),
    (partial(KEEP, {"embed": [[0]] * 4}), "'embed': the kept units must be a list of indices"),
    (partial(KEEP, {"kv_heads": [0]}), "axis 'kv_heads': the model has no such axis"),
    (partial(keep_units, KEYS, {"kv_heads": [0, 1]}), "read the same one of 2 key/value heads"),
    (partial(keep_units, KEYS, {"heads": [0, 1, 2]}), "read the same one of 3 key/value heads"),
    (partial(PRUNE, {"vocab": 3, "mlp": 21}, {}),
     r"axis 'vocab'.*\n  axis 'mlp': prune cannot change the size from 20 to 21\. .* in 1"),
    (partial(PRUNE, {"mlp": 3}, {"heads": [1]}), "scores are missing. There are scores of heads"),
    (partial(PRUNE, {"layers": 3}, {"layers": [1]}), r"scores have shape \(1,\), not \(4,\)"),
    (partial(PRUNE, {"layers": 3}, {"layers": [1, 2, np.nan, 3]}), "scores are not finite"),
    (partial(prune, STAGES, {"layers": 3}, {}), "'layers': .* takes layers.0, layers.1, embed.0,"),
    (partial(keep_units, STAGES, {"mlp.1": [[0]] * 4}), r"each of 3 layers, .* \(4, 1\)"),
    (partial(keep_units, STAGES, {"embed.1": [[0]] * 3}), "'embed.1': .* a list of indices"),
])  # fmt: skip
def test_what_cannot_be_pruned(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- stages ---


@cache
def measured_swin():
    """Return the parameters, streams and activations of the Swin."""
    params = tiny.params(SWIN)
    return params, *jax.device_get(look(params))


@jax.jit
def look(params):
    images = vision.images(SWIN)
    return residual_streams(SWIN, params, images), unit_importance(SWIN, params, images)


def without(params, **layers):
    """Make the layers at these places of a stage add nothing, for example ``blocks0=[1]``."""
    params = jax.tree.map(np.copy, params)
    for stage, places in layers.items():
        for norm in ("attention_norm", "mlp_norm"):
            for leaf in params[stage][norm].values():
                leaf[places] = 0
    return params


def change(growth, params):
    """Return the change of the logits of a Swin when it is pruned."""
    before = vision.forward(SWIN)(params, vision.images(SWIN))
    after = vision.forward(SWIN.resized(growth))(
        grow(growth, params, tiny.axes(SWIN)), vision.images(SWIN)
    )
    return np.abs(after - before).max()


def test_layers_that_add_nothing_go_first_in_every_stage():
    """Where windows are shifted in alternation, layers are removed in pairs.

    Removing a single layer would change the shift of all following layers.
    """
    params = without(measured_swin()[0], blocks0=[1, 2], blocks1=[1])
    scores = {axis: np.asarray(block_influence(x)) for axis, x in look(params)[0].items()}
    assert [np.flatnonzero(x == 0).tolist() for x in scores.values()] == [[1, 2], [1]]
    alternating = SWIN.traits["alternating"]
    assert alternating == ("layers.0",)
    down = prune(STAGES, {"layers.0": 2, "layers.1": 2}, scores, alternating)
    assert [dense(m.write).argmax(1).tolist() for m in down.values()] == [[0, 3], [0, 2]]
    assert change(down, params) < TOLERANCE
    # This removes a layer that adds something.
    assert change(keep_units(STAGES, {"layers.0": [0, 3], "layers.1": [0, 1]}), params) > 1e-2
    # This removes one layer that adds nothing, but it changes the shift of two others.
    assert change(keep_units(STAGES, {"layers.0": [0, 2, 3]}), params) > 1e-2
    assert kept_layers(scores, 3) == [0, 1, 2] and kept_layers(scores, 1) == [0]


def kept_layers(scores, count):
    down = prune(STAGES, {"layers.0": count}, scores, SWIN.traits["alternating"])
    return dense(down["layers.0"].write).argmax(1).tolist()


def test_alternating_choice_is_best_among_all_choices():
    """The scores are integers, so sums are exact."""
    for layers in range(1, 9):
        for count in range(1, layers + 1):
            scores = RNG.integers(0, 5, layers)
            by_turns = [
                c
                for c in combinations(range(layers), count)
                if all((j - i) % 2 == 0 for i, j in enumerate(c))
            ]
            found = best_units(scores, count, alternating=True)
            assert tuple(found) in by_turns
            assert scores[found].sum() == max(scores[list(c)].sum() for c in by_turns)


def test_silent_units_are_found_in_every_layer_of_every_stage():
    """Each layer has other silent units, in its heads and in its MLP."""
    params = jax.tree.map(np.copy, measured_swin()[0])
    silent = {}
    for s, (layers, heads, units) in enumerate(zip(SWIN.layers, SWIN.heads, SWIN.mlp, strict=True)):
        silent[f"heads.{s}"] = np.arange(heads)[None] == np.arange(layers)[:, None] % heads
        silent[f"mlp.{s}"] = np.arange(units)[None] % 4 == np.arange(layers)[:, None] % 3
        value, up = params[f"blocks{s}"]["attention"]["value"], params[f"blocks{s}"]["mlp"]["up"]
        for leaf, axis in ((value["bias"], "heads"), (up["bias"], "mlp")):
            leaf[silent[f"{axis}.{s}"]] = 0
        for leaf, axis in ((value["kernel"], "heads"), (up["kernel"], "mlp")):
            np.moveaxis(leaf, 1, 2)[silent[f"{axis}.{s}"]] = 0
    scores = {axis: np.asarray(x) for axis, x in look(params)[1].items()}
    for axis, quiet in silent.items():
        np.testing.assert_array_equal(scores[axis] == 0, quiet)
    target = {axis: int((~quiet).sum(1).max()) for axis, quiet in silent.items()}
    assert change(prune(STAGES, target, scores), params) < TOLERANCE
    # The control: every layer uses the scores of the first.
    assert change(prune(STAGES, target, {axis: x[0] for axis, x in scores.items()}), params) > 1e-2


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a byte-level GPT-2 with LLaMA Pro's no-op layers 2 and 5, and its source model."""
    config = GPT2Config(vocab=256, context=32, layers=4, embed=12, heads=4, head_dim=3, mlp=20)
    params = tiny.params(config, dtype="float32")
    pro = llama_pro(config.sizes(), {"layers": 6})
    where = tmp_path_factory.mktemp("pruned")
    checkpoints.save(where / "small", config, params)
    checkpoints.save(where / "deep", config.resized(pro), grow(pro, params, config.axes()))
    (where / "text.txt").write_text("Ein Text, an dem gemessen wird. " * 20)
    return where


def run(line):
    assert main(line.split()) == 0


def test_the_command_takes_away_what_adds_nothing(folder, tmp_path, capsys):
    with jax.enable_x64(False):
        run(f"prune {folder}/deep {tmp_path}/b --layers 4 --data {folder}/text.txt --json")
        about = json.loads(capsys.readouterr().out)
        assert about["arguments"]["removed"] == {"layers": [2, 5]}
        assert [about["report"]["scores"]["layers"][i] for i in (2, 5)] == [0, 0]
        whole, pruned, random = (about["report"][name] for name in ("whole", "pruned", "random"))
        assert (pruned["loss"], pruned["max_abs"], pruned["kl"]) == (whole["loss"], 0, 0)
        assert abs(random["loss"] - whole["loss"]) > 1e-3 and random["kl"] > 1e-3
        assert about["report"]["inputs"].startswith("the first 8 x 32 tokens of ")
        chex.assert_trees_all_equal(
            checkpoints.load(tmp_path / "b")[1], checkpoints.load(folder / "small")[1]
        )
        record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
        assert (record["operator"], record["arguments"]["by"]) == ("prune", "influence")
        logits = tiny.forward(checkpoints.load(folder / "small")[0])(
            checkpoints.load(folder / "small")[1], text(folder)
        )
    log_p = logits - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    loss = -np.mean([[log_p[i, j, text(folder)[i, j + 1]] for j in range(31)] for i in range(8)])
    assert whole["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_result_of_a_lora_without_its_model_tells_as_much(tmp_path, capsys):
    nine = replace(gpt2.CONFIG, embed=27, heads=9, mlp=18)
    model = gpt2.saved(tmp_path / "model", nine)
    lora = gpt2.lora_folder(tmp_path / "lora", nine)
    np.save(tmp_path / "ids.npy", np.arange(200) % 11)

    def told(line):
        found = []
        for more in ("", "--lora-only"):
            run(f"{line} --lora {lora} --dry-run --json {more}")
            found.append(json.loads(capsys.readouterr().out))
        assert found[1]["arguments"].items() <= found[0]["arguments"].items()
        return found

    about, alone = told(f"prune {model} {tmp_path}/b --layers 2 --data {tmp_path}/ids.npy")
    assert alone["report"] == about["report"] and alone["arguments"]["removed"]
    about, alone = told(f"coalesce {model} {tmp_path}/b --heads far")
    assert any("merged groups of 3" in note for note in alone["notes"])
    run(f"coalesce {model} {tmp_path}/b --heads far --lora {lora} --lora-only")
    assert "note: 9 heads cannot be grouped in pairs" in capsys.readouterr().out


def text(folder):
    return (
        np.frombuffer((folder / "text.txt").read_bytes()[: 8 * 32], np.uint8)
        .reshape(8, 32)
        .astype(np.int32)
    )


def test_the_command_on_images_and_stages(tmp_path, capsys):
    """A Swin in the format of Hugging Face, with layers in both stages that add nothing."""
    more = dict(embed=(6, 12), mlp=(9, 18), position_mlp=512, eps=1e-5, dtype="float32")
    config = replace(SWIN, **more)
    images = vision.images(config)
    np.save(tmp_path / "images.npy", images)
    with jax.enable_x64(False):
        params = without(tiny.params(config, dtype="float32"), blocks0=[1, 2], blocks1=[1])
        checkpoints.save(tmp_path / "a", config, params)
        run(f"prune {tmp_path}/a {tmp_path}/b --layers 2,2 --data {tmp_path}/images.npy --json")
        found = checkpoints.load(tmp_path / "b")
    about = json.loads(capsys.readouterr().out)
    assert about["arguments"]["target"] == {"layers.0": 2, "layers.1": 2}
    assert about["arguments"]["removed"] == {"layers.0": [1, 2], "layers.1": [1]}
    assert about["report"]["scores"]["layers.1"][1] == 0 == about["report"]["pruned"]["max_abs"]
    assert about["report"]["random"]["max_abs"] > 1e-2
    down = keep_units(config.sizes(), {"layers.0": [0, 3], "layers.1": [0, 2]})
    assert found[0].layers == (2, 2)
    chex.assert_trees_all_equal(found[1], grow(down, params, config.axes()))


@pytest.mark.parametrize(("images", "message"), [
    (np.zeros((3, 8, 8, 1)),
     r"contains float64 \[3, 8, 8, 1\], but the model expects normalised images as floats \[N, 8, 8, 2\]"),
    (np.zeros((3, 8, 8, 2), np.uint8), r"contains uint8 \[3, 8, 8, 2\]"),
    (np.full((1, 8, 8, 2), np.inf), "images with NaN or infinite values: remove these images"),
    (None, "contains no images: "),
])  # fmt: skip
def test_what_are_no_images_of_a_model(tmp_path, images, message):
    file = tmp_path / "images.npy"
    file.write_text("a text") if images is None else np.save(file, images)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        inputs_from_file(SimpleNamespace(config=SWIN, sizes=SWIN.sizes), file)


def test_text_is_what_the_models_own_tokenizer_makes_of_it(folder, tmp_path):
    shutil.copytree(folder / "small", tmp_path / "a")
    known = Tokenizer(models.WordLevel({"Ein": 3, "Text": 5, "?": 7}, unk_token="?"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.enable_truncation(2)
    known.save(str(tmp_path / "a/tokenizer.json"))
    inputs, _ = inputs_from_file(checkpoints.open_checkpoint(tmp_path / "a"), folder / "text.txt")
    assert inputs[0, :5].tolist() == [3, 5, 7, 7, 7]


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "nothing to prune: give the new size of an axis, such as --layers 24"),
    (("--mlp", 8, "--by", "angular"), "--by angular selects the layers to remove: give their new number with "
     "--layers, or omit --by"),
    (("--layers", 7), "prune cannot change the size from 6 to 7. The new size must be in 1 .. 6"),
    (("--kv-heads", 1), "axis 'kv_heads': the model has no such axis"),
    (("--embed", 6), "head_dim 3"),  # which a GPT2LMHeadModel cannot have
    (("--layers", 2, "--lora-only"), "--lora-only requires a LoRA: give its directory with --lora DIR"),
    (("--layers", 2, "--lora", "lora", "--lora-only", "--dtype", "float16"),
     "--dtype: --lora-only writes no model, to which this applies; omit --dtype"),
])  # fmt: skip
def test_what_the_command_refuses_before_it_measures(
    folder, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(importance, "residual_streams", None)
    words = ["prune", folder / "deep", tmp_path / "b", "--data", folder / "text.txt", *arguments]
    usage = message.startswith(
        ("nothing to prune", "--by", "--lora-only", "--dtype")
    )  # wrong for every model
    assert main([str(w) for w in words]) == (2 if usage else 1)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_units_of_experts_are_refused_before_anything_is_measured(tmp_path, capsys):
    config = replace(GROUPED, dtype="float32", experts=3)
    checkpoints.save(tmp_path / "a", config, tiny.params(config, dtype="float32"))
    words = ["prune", tmp_path / "a", tmp_path / "b", "--data", tmp_path / "none.npy", "--mlp", 4]
    assert main([str(w) for w in words]) == 1
    assert "does not measure the importance of the units of experts" in capsys.readouterr().err


MIXED = replace(GROUPED, experts=12, active=2, layers=3)
FEW = np.random.default_rng(4).integers(0, 11, (1, 3))  # 6 assignments to 12 experts


def reap(w, x_TD, active, normed):
    """Return REAP and the frequency of each expert, by loops (Lasby et al., 2025, Eq. 9)."""
    experts = w["router"]["kernel"].shape[-1]
    gates, norms = np.zeros((2, len(x_TD), experts))
    for t, x in enumerate(x_TD):
        exp = np.exp(x @ w["router"]["kernel"])
        p = exp / exp.sum()
        for e in sorted(range(experts), key=lambda e: -p[e])[:active]:
            g = x @ w["gate"]["kernel"][e]
            y = (g / (1 + np.exp(-g)) * (x @ w["up"]["kernel"][e])) @ w["down"]["kernel"][e]
            gates[t, e], norms[t, e] = p[e], np.sqrt((y**2).sum())
        if normed:
            gates[t] /= gates[t].sum()
    users = (gates > 0).sum(0)
    return (gates * norms).sum(0) / np.maximum(users, 1), users / len(x_TD)


@pytest.mark.parametrize("normed", [True, False])
def test_the_importance_of_an_expert_is_the_mean_of_its_weighted_output(normed):
    config = replace(MIXED, layers=1, gates_normed=normed, parallel=True)
    params = tiny.params(config)
    # With parallel sublayers, the mixture reads the norm of the embeddings.
    x = params["token_embedding"][FEW[0]]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.eps)
    w = jax.tree.map(lambda a: a[0], params["blocks"])
    expected = reap(w["mlp"], x * w["mlp_norm"]["scale"], config.active, normed)
    for kind, scores in zip(("reap", "frequency"), expected, strict=True):
        found = unit_importance(config, params, FEW, experts=kind)["experts"]
        assert found.shape == (1, 12)
        np.testing.assert_allclose(found[0], scores, rtol=0, atol=TOLERANCE)
    assert expected[1].sum() == pytest.approx(config.active)


def test_experts_without_tokens_are_removed_without_an_effect():
    params = tiny.params(MIXED)
    forward = tiny.forward(MIXED)
    scores = {"experts": np.asarray(unit_importance(MIXED, params, FEW)["experts"])}
    down = prune(MIXED.sizes(), {"experts": 6}, scores)
    small = MIXED.resized(down)
    assert small.experts == 6
    pruned = tiny.forward(small)(grow(down, params, MIXED.axes()), FEW)
    np.testing.assert_allclose(pruned, forward(params, FEW), rtol=0, atol=1e-10)
    wrong = prune(MIXED.sizes(), {"experts": 6}, {"experts": -scores["experts"]})
    other = tiny.forward(small)(grow(wrong, params, MIXED.axes()), FEW)
    assert np.abs(other - pruned).max() > 1e-3


def test_the_command_removes_experts(tmp_path, capsys):
    config = replace(MIXED, dtype="float32")
    np.save(tmp_path / "ids.npy", FEW.reshape(-1))
    words = f"prune {tmp_path}/a {tmp_path}/b --data {tmp_path}/ids.npy --to orbax --experts"
    with jax.enable_x64(False):
        checkpoints.save(tmp_path / "a", config, tiny.params(config, dtype="float32"))
        run(f"{words} 6 --json")
    about = json.loads(capsys.readouterr().out)
    assert checkpoints.load(tmp_path / "b")[0].experts == 6
    assert about["report"]["pruned"]["max_abs"] < 1e-4 < about["report"]["random"]["max_abs"]
    # Here, all experts that are used fit.
    assert about["report"]["frequency"]["max_abs"] < 1e-4
    assert main(f"{words} 1".split()) == 1
    assert "routes each token to 2 experts, so at least --experts 2" in capsys.readouterr().err
    assert main(f"{words} 13".split()) == 1
    assert "axis 'experts': prune cannot change the size from 12 to 13" in capsys.readouterr().err


# --- in a V-cycle ---


class Bench:
    """The interface of a run that phases use, without a run."""

    def __init__(self, **models):
        self.models, self.ledger, self.finite = (
            models,
            SimpleNamespace(add=lambda **_: None),
            lambda step, values: values,
        )

    def compute(self, phase, function, *arguments, donate=False):
        return function(phase, optax.identity(), *arguments), 0.0

    def validation_batches(self, batches):
        if isinstance(self.models["large"].config, SwinConfig):
            return np.stack([vision.images(SWIN, seed=i) for i in range(batches)]), np.zeros(
                (batches, vision.BATCH), int
            )
        tokens = np.stack([tiny.tokens(seed=i) for i in range(batches)])
        return tokens[..., :-1], tokens[..., 1:]

    def validate(self, step, model): ...

    def log(self, step, **values): ...


def test_a_pruned_v_cycle_measures_goes_down_and_comes_back():
    """The cycle is bitwise neutral if the small model learns nothing.

    If it learns, the result equals `correct` of the waiting parameters.
    """
    method = VCycle(groupings=(Pruning(2, batches=2),), alpha=1.0, correction=True)
    measure, coalesce, correction = (
        p for p in method.plan(CONFIG, Optim(), 9) if not isinstance(p, Train)
    )
    params, axes = tiny.params(CONFIG), tiny.axes(CONFIG)
    bench = Bench(large=TrainState(params, None, CONFIG))
    bench.models["large"] = measure.run(bench)
    each = jax.vmap(
        lambda tokens: block_influence(residual_streams(CONFIG, params, tokens)["layers"])
    )
    expected = jax.jit(each)(bench.validation_batches(2)[0]).mean(0)
    np.testing.assert_allclose(bench.models["large"].sensitivity, expected, rtol=0, atol=TOLERANCE)
    kept = sorted(np.argsort(expected)[2:].tolist())
    assert kept != [0, 1]  # unlike the choice without a measurement
    bench.models["coarse1"] = small = coalesce.run(bench)
    down = keep_units(LARGE, {"layers": kept})
    chex.assert_trees_all_equal(small.params, grow(down, params, axes))
    chex.assert_trees_all_equal(correction.run(bench).params, params)
    learned = jax.tree.map(lambda x: 0.9 * x, small.params)
    bench.models["coarse1"] = replace(small, params=learned)
    chex.assert_trees_all_equal(
        correction.run(bench).params, correct(params, learned, swap(down), axes)
    )


def test_a_swin_goes_down_by_pruning_and_comes_back():
    method = VCycle(groupings=(Pruning((2, 2), batches=2),), alpha=1.0, correction=True)
    measure, coalesce, correction = (
        p for p in method.plan(SWIN, Optim(), 9) if not isinstance(p, Train)
    )
    params, axes = without(measured_swin()[0], blocks0=[1, 2], blocks1=[1]), tiny.axes(SWIN)
    bench = Bench(large=TrainState(params, None, SWIN))
    bench.models["large"] = measure.run(bench)
    assert np.flatnonzero(bench.models["large"].sensitivity == 0).tolist() == [1, 2, 5]
    bench.models["coarse1"] = small = coalesce.run(bench)
    assert small.config.layers == (2, 2)
    down = keep_units(STAGES, {"layers.0": [0, 3], "layers.1": [0, 2]})
    chex.assert_trees_all_equal(small.params, grow(down, params, axes))
    chex.assert_trees_all_equal(correction.run(bench).params, params)
    message = r"layers=2 is for a model with 1 stages, but this one has 2, with \(4, 3\) layers"
    with pytest.raises(ValueError, match=message):
        VCycle(groupings=(Pruning(2),)).plan(SWIN, Optim(), 9)
    message = r"axis 'layers.0': .* some of 0 .. 3, in ascending order, not \[0, 5\]"
    with pytest.raises(ValueError, match=message):
        Pruning((2, 1), kept=(0, 5, 6)).up(SWIN)


def test_a_pruning_may_name_what_stays():
    large = TrainState({}, None, CONFIG, np.array([0.1, 0.5, 0.3, 0.2], np.float32))
    assert Pruning(2).measured(large).kept == (1, 2)
    named = Pruning(2, kept=(0, 3))
    assert named.measured(large) == named
    assert not any(
        isinstance(p, Measure) for p in VCycle(groupings=(named,)).plan(CONFIG, Optim(), 9)
    )


def test_reap_changes_the_output_of_a_layer_less_than_random_experts():
    """On real text, with experts whose outputs have different sizes."""
    text = (Path(__file__).parents[2] / "docs/howto/experts.md").read_bytes()[:1024]
    tokens = np.frombuffer(text, np.uint8).astype(np.int32).reshape(8, 128)
    config = replace(MIXED, vocab=256, context=128, layers=1, experts=8)
    params = tiny.params(config)
    params["blocks"]["mlp"]["down"]["kernel"] *= np.geomspace(0.1, 1, 8)[None, :, None, None]

    def output(config, params):
        run = partial(config.module.apply, observe=lambda x, y: y)
        return np.asarray(jax.jit(run)({"params": params}, tokens)[1])

    before = output(config, params)

    def error(scores):
        down = prune(config.sizes(), {"experts": 5}, {"experts": scores})
        after = output(config.resized(down), grow(down, params, config.axes()))
        return np.abs(after - before).mean()

    scores = unit_importance(config, params, tokens)["experts"]
    rng = np.random.default_rng(0)
    by_chance = [error(rng.random((1, 8))) for _ in range(6)]
    assert error(np.asarray(scores)) < 0.7 * np.mean(by_chance)
