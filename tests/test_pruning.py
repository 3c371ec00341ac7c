"""Pruning, the sister of coalescing: units that are left out, and what says which.

C leaves units out, D is its `swap`. Equality to the bit where only copies and zeros are involved; tolerance 1e-12 on
functions and scores, in float64.
"""

import json
import shutil
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import chex
import jax
import numpy as np
import optax
import pytest
import runs
import tiny
from test_families import FAMILIES, VARIANTS, assert_fits, batch
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxgrow import correct, grow, importance, interop, swap
from jaxgrow._inputs import of_data
from jaxgrow.cli import main
from jaxgrow.importance import activations, angular, influence, streams
from jaxgrow.matrices import dense
from jaxgrow.models import Adapter, GPT2Config, LlamaConfig
from jaxgrow.operators import keep, llama_pro, prune
from train import pretrain
from train.plan.methods import Stage, VCycle
from train.plan.training import Measure, Train
from train.plan.transforms import Pruning
from train.state.model import Model
from train.state.optim import Optim

TOLERANCE = 1e-12
LARGE = {"layers": 4, "heads": 4, "embed": 12, "mlp": 20}
CONFIG = tiny.config(**LARGE)
RNG = np.random.default_rng(0)
SCORES = {"layers": RNG.random(4), "heads": RNG.random((4, 4)), "mlp": RNG.random((4, 20)), "embed": RNG.random(12)}
DOWN = {
    "layers": keep(LARGE, {"layers": [0, 3]}),
    "units of each layer": prune(LARGE, {"heads": 3, "mlp": 7}, SCORES),
    "everything": prune(LARGE, {"layers": 3, "heads": 2, "mlp": 5, "embed": 6}, SCORES),
}
GROUPED = LlamaConfig(
    vocab=11, context=7, layers=2, embed=6, heads=6, kv_heads=3, head_dim=2, mlp=9, tied=True, dtype="float64"
)


@pytest.fixture(autouse=True)
def double(x64):
    """Algebra in float64."""


# --- what it keeps ---


@pytest.mark.parametrize("down", DOWN.values(), ids=DOWN)
def test_the_way_down_inverts_the_way_up_and_a_correction_keeps_what_was_left_out(down):
    up, axes = swap(down), tiny.axes(CONFIG)
    large, small = tiny.params(CONFIG), tiny.params(CONFIG.resized(down), seed=1)
    chex.assert_trees_all_equal(grow(down, grow(up, small, axes), axes), small)
    chex.assert_trees_all_equal(correct(large, grow(down, large, axes), up, axes), large)
    corrected = correct(large, small, up, axes)
    chex.assert_trees_all_close(grow(down, corrected, axes), small, rtol=0, atol=TOLERANCE)
    was = [grow(up, grow(down, p, axes), axes) for p in (large, corrected)]
    for (path, x, new), (_, seen, now) in zip(tiny.pairs(large, corrected), tiny.pairs(*was), strict=True):
        np.testing.assert_allclose(x - seen, new - now, rtol=0, atol=TOLERANCE, err_msg=path)  # what C does not see


def test_each_layer_keeps_its_own_units():
    """By hand: two layers, three units."""
    sizes = {"layers": 2, "embed": 1, "mlp": 3}
    params = {"up": np.arange(6.0).reshape(2, 1, 3), "down": -np.arange(6.0).reshape(2, 3, 1), "bias": np.ones((2, 1))}
    axes = {
        "up": ("layers", "embed.in", "mlp"),
        "down": ("layers", "mlp.in", "embed"),
        "bias": ("layers", "embed.bias"),
    }
    found = grow(keep(sizes, {"mlp": [[0, 2], [1, 2]]}), params, axes)
    assert found["up"].tolist() == [[[0, 2]], [[4, 5]]]
    assert found["down"].tolist() == [[[0], [-2]], [[-4], [-5]]]
    assert found["bias"] is params["bias"]


@cache
def grouped():
    """Of queries that share keys, what stays and what is left, in weights that differ from layer to layer."""
    scores = {"heads": RNG.random((2, 6)), "mlp": RNG.random((2, 9))}
    return prune(GROUPED.sizes(), {"kv_heads": 2, "mlp": 4}, scores), tiny.params(GROUPED)


def test_units_that_are_left_out_are_units_that_say_nothing():
    """A model with zeros for them computes what the smaller one does: so every query still reads its own key."""
    down, params = grouped()
    small, axes, config = grow(down, params, GROUPED.axes()), GROUPED.axes(), GROUPED.resized(down)
    assert (config.heads, config.kv_heads, config.mlp) == (4, 2, 4)
    silent = grow(swap(down), small, axes)
    expected = tiny.forward(GROUPED)(silent, tiny.tokens())
    np.testing.assert_allclose(tiny.forward(config)(small, tiny.tokens()), expected, rtol=0, atol=TOLERANCE)


def test_key_heads_go_with_the_queries_that_are_worth_most():
    sizes = {"layers": 1, "embed": 4, "heads": 6, "kv_heads": 3, "mlp": 4}
    scores = {"heads": [5.0, 0.0, 3.0, 3.0, 1.0, 4.0]}

    def kept(**target):
        found = prune(sizes, target, scores)
        return {axis: dense(m.write).argmax(1).tolist() for axis, m in found.items()}

    assert kept(kv_heads=2) == {"heads": [0, 1, 2, 3], "kv_heads": [0, 1]}
    assert kept(heads=3) == {"heads": [0, 2, 5]}  # one of each
    assert kept(heads=2, kv_heads=2) == {"heads": [0, 5], "kv_heads": [0, 2]}
    with pytest.raises(ValueError, match=r"4 query heads on 3 key heads are not 1 \.\. 2 to each"):
        kept(heads=4)


FUSED = {"GPT-2, fused adapters": replace(FAMILIES["GPT-2"], adapter=Adapter(2, fused=2))}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=n, marks=[pytest.mark.slow] * (n in (*VARIANTS, "GPT-2")))
        for n, c in (FAMILIES | FUSED).items()
    ],
)
def test_every_family_is_measured_and_pruned(config):
    """By shapes; CaiT's class layers have no scores, and go along. Stages have no one stream."""
    if len(config.depths) > 1:
        with pytest.raises(ValueError, match="2 stages has no one residual stream"):
            streams(config, {}, batch(config)[0])
        return
    config, inputs = replace(config, dtype="float32"), batch(config)[0]
    with jax.enable_x64(False):
        params = jax.eval_shape(config.init, jax.random.key(0))
        stream = jax.eval_shape(partial(streams, config), params, inputs)
        found = jax.eval_shape(partial(activations, config), params, inputs)
    sizes = config.sizes()
    assert (stream.shape[0], stream.shape[-1]) == (sizes["layers"] + 1, sizes["embed"])
    assert found["heads"].shape == (sizes["layers"], sizes["heads"])
    scores = {"layers": np.arange(4.0)} | {axis: RNG.random(x.shape) for axis, x in found.items()}
    target = {"layers": 3, "heads": 2, "mlp": 5, "embed": 4} | ({"kv_heads": 1} if "kv_heads" in sizes else {})
    with jax.enable_x64(False):
        assert_fits(prune(sizes, target, scores), config)


# --- what says which ---


@cache
def measured():
    """Of a GPT-2: its parameters, streams and activations."""
    params = tiny.params(CONFIG)
    both = jax.jit(
        lambda p, t: (streams(CONFIG, p, t), activations(CONFIG, p, t), CONFIG.module.apply({"params": p}, t))
    )
    return params, *jax.device_get(both(params, tiny.tokens()))


def normed(x, norm):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.eps) * norm["scale"] + norm["bias"]


def test_streams_and_activations_are_those_of_the_blocks_one_by_one():
    """By NumPy, layer after layer; what comes out at the end makes the logits."""
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
        scores = np.where(np.tri(5, dtype=bool), np.einsum("bthk,bshk->bhts", q, k) / 5**0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(found["heads"][i], np.sqrt((y**2).sum(-1)).mean((0, 1)), rtol=0, atol=TOLERANCE)
        x = x + np.einsum("bthk,hkd->btd", y, w["attention"]["out"]["kernel"]) + w["attention"]["out"]["bias"]
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
    np.testing.assert_allclose(influence(stream), expected, rtol=0, atol=TOLERANCE)
    blocks = [(np.arccos(cosine(stream[i], stream[i + 2])) / np.pi).mean() for i in range(3)]
    a, b, c = blocks
    np.testing.assert_allclose(angular(stream, 2), [a, min(a, b), min(b, c), c], rtol=0, atol=TOLERANCE)
    best = int(np.argmin(blocks))
    lost = set(range(4)) - set(
        dense(prune(LARGE, {"layers": 2}, {"layers": angular(stream, 2)})["layers"].write).argmax(1)
    )
    assert lost == {best, best + 1}
    with pytest.raises(ValueError, match=r"is of 1 \.\. 4 consecutive layers, which there are, not 5"):
        angular(stream, 5)


@pytest.mark.parametrize("by", ["influence", "angular"])
def test_layers_that_add_nothing_are_found_and_the_function_is_kept_to_the_bit(by):
    """LLaMA Pro's new layers, of which nobody tells."""
    small = tiny.params(CONFIG)
    pro = llama_pro(LARGE, {"layers": 6})
    config, large = CONFIG.resized(pro), grow(pro, small, tiny.axes(CONFIG))
    stream = deep_streams(config)(large, tiny.tokens())
    scores = np.asarray(influence(stream) if by == "influence" else angular(stream, 1))
    assert np.flatnonzero(scores == 0).tolist() == [2, 5]
    assert scores[[0, 1, 3, 4]].min() > 1e-3
    chex.assert_trees_all_equal(
        grow(prune(config.sizes(), {"layers": 4}, {"layers": scores}), large, config.axes()), small
    )


@cache
def deep_streams(config):
    return jax.jit(partial(streams, config))


def test_units_that_say_nothing_are_found():
    params, _, found, _ = measured()
    up = params["blocks"]["mlp"]["up"]
    silent = np.arange(20)[None] % 5 == np.arange(4)[:, None]  # others in each layer
    up = {"kernel": np.where(silent[:, None], 0, up["kernel"]), "bias": np.where(silent, 0, up["bias"])}
    planted = params | {"blocks": params["blocks"] | {"mlp": params["blocks"]["mlp"] | {"up": up}}}
    scores = jax.device_get(jax.jit(partial(activations, CONFIG))(planted, tiny.tokens()))
    np.testing.assert_array_equal(np.asarray(scores["mlp"]) == 0, silent)
    down, before = prune(LARGE, {"mlp": 16}, scores), tiny.forward(CONFIG)(planted, tiny.tokens())

    def change(growth):
        after = tiny.forward(CONFIG.resized(growth))(grow(growth, planted, tiny.axes(CONFIG)), tiny.tokens())
        return np.abs(after - before).max()

    assert change(down) < TOLERANCE
    assert change(prune(LARGE, {"mlp": 16}, {"mlp": -np.asarray(scores["mlp"])})) > 1e-2  # the best ones
    assert change(prune(LARGE, {"mlp": 16}, found)) > 1e-2  # scores of another model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(keep, LARGE, {"layers": [1, 0]}), r"axis 'layers': .* some of 0 .. 3, in order, not \[1, 0\]"),
        (partial(keep, LARGE, {"mlp": [20]}), r"some of 0 .. 19"),
        (partial(keep, LARGE, {"mlp": [[0], [1]]}), r"a list, or of each of 4 layers, but have shape \(2, 1\)"),
        (partial(keep, LARGE, {"embed": [[0]] * 4}), r"axis 'embed': the units that stay are a list, but"),
        (partial(keep, LARGE, {"kv_heads": [0]}), "axis 'kv_heads': the model has no such axis"),
        (partial(keep, GROUPED.sizes(), {"kv_heads": [0, 1]}), "would not read, of 2 key heads"),
        (partial(keep, GROUPED.sizes(), {"heads": [0, 1, 2]}), "would not read, of 3 key heads"),
        (
            partial(prune, LARGE, {"vocab": 3, "mlp": 21}, {}),
            r"axis 'vocab'.*\n  axis 'mlp': prune\(\) cannot take 20 to 21",
        ),
        (partial(prune, LARGE, {"mlp": 3}, {"heads": [1]}), "axis 'mlp': there are no scores, only of heads"),
        (partial(prune, LARGE, {"layers": 3}, {"layers": [1]}), r"its scores have shape \(1,\), not \(4,\)"),
        (partial(prune, LARGE, {"layers": 3}, {"layers": [1, 2, np.nan, 3]}), "its scores are not finite"),
    ],
)
def test_what_cannot_be_pruned(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 of bytes with LLaMA Pro's layers 2 and 5, which add nothing; beside it the model that it was made of."""
    config = GPT2Config(vocab=256, context=32, layers=4, embed=12, heads=4, head_dim=3, mlp=20)
    params = tiny.params(config, dtype="float32")
    pro = llama_pro(config.sizes(), {"layers": 6})
    where = tmp_path_factory.mktemp("pruned")
    interop.save(where / "small", config, params)
    interop.save(where / "deep", config.resized(pro), grow(pro, params, config.axes()))
    (where / "text.txt").write_text("Ein Text, an dem gemessen wird. " * 20)
    return where


def run(*arguments):
    assert main([str(a) for a in arguments]) == 0


def test_the_command_takes_away_what_adds_nothing(folder, tmp_path, capsys):
    with jax.enable_x64(False):
        run("prune", folder / "deep", tmp_path / "b", "--layers", 4, "--data", folder / "text.txt", "--json")
        about = json.loads(capsys.readouterr().out)
        assert about["arguments"]["removed"] == [2, 5]
        assert [about["report"]["scores"][i] for i in (2, 5)] == [0, 0]
        whole, pruned, random = (about["report"][name] for name in ("whole", "pruned", "random"))
        assert (pruned["loss"], pruned["max_abs"], pruned["kl"]) == (whole["loss"], 0, 0)
        assert abs(random["loss"] - whole["loss"]) > 1e-3 and random["kl"] > 1e-3
        assert about["report"]["inputs"].startswith("the first 8 x 32 tokens of ")
        chex.assert_trees_all_equal(interop.load(tmp_path / "b")[1], interop.load(folder / "small")[1])
        record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
        assert (record["operator"], record["arguments"]["by"]) == ("prune", "influence")
        logits = tiny.forward(interop.load(folder / "small")[0])(interop.load(folder / "small")[1], text(folder))
    log_p = logits - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    loss = -np.mean([[log_p[i, j, text(folder)[i, j + 1]] for j in range(31)] for i in range(8)])
    assert whole["loss"] == pytest.approx(loss, rel=1e-5)


def text(folder):
    return np.frombuffer((folder / "text.txt").read_bytes()[: 8 * 32], np.uint8).reshape(8, 32).astype(np.int32)


def test_the_command_on_units_of_a_model_with_grouped_queries(folder, tmp_path, capsys):
    """.. by token ids, to Orbax; layers by angles, for people."""
    config = replace(GROUPED, dtype="float32", layers=3)
    params = tiny.params(config, dtype="float32")
    ids = np.random.default_rng(1).integers(0, 11, 8 * 7)
    np.save(tmp_path / "ids.npy", ids)
    target = {"layers": 2, "kv_heads": 2, "mlp": 4, "embed": 5}
    options = [word for axis, size in target.items() for word in (f"--{axis.replace('_', '-')}", size)]
    with jax.enable_x64(False):
        interop.save(tmp_path / "a", config, params)
        arguments = (
            "prune",
            tmp_path / "a",
            tmp_path / "b",
            *options,
            "--by",
            "angular",
            "--data",
            tmp_path / "ids.npy",
        )
        run(*arguments, "--to", "orbax")
        found = interop.load(tmp_path / "b")[1]
        inputs = ids.reshape(8, 7)
        units, stream = jax.jit(lambda p, x: (activations(config, p, x), streams(config, p, x)))(params, inputs)
        scores = units | {"layers": angular(stream, 1)}
    chex.assert_trees_all_close(
        found, grow(prune(config.sizes(), target, scores), params, config.axes()), rtol=0, atol=0
    )
    out = capsys.readouterr().out
    gone = int(np.argmin(scores["layers"]))
    assert f"layers that went: {gone}\nangular of each layer: " in out and "the function is changed" in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["whole", "pruned", "random", "random:"]


def test_text_is_what_the_models_own_tokenizer_makes_of_it(folder, tmp_path):
    shutil.copytree(folder / "small", tmp_path / "a")
    words = Tokenizer(models.WordLevel({"Ein": 3, "Text": 5, "?": 7}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.save(str(tmp_path / "a/tokenizer.json"))
    inputs, _ = of_data(interop.open_checkpoint(tmp_path / "a"), folder / "text.txt")
    assert inputs[0, :5].tolist() == [3, 5, 7, 7, 7]
    (tmp_path / "a/tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(interop.CheckpointError, match=r"tokenizer.json is no tokenizer: .* as a .npy of token ids"):
        of_data(interop.open_checkpoint(tmp_path / "a"), folder / "text.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to prune: give the new size of an axis, as --layers 24"),
        (("--mlp", 8, "--by", "angular"), "--by angular says which layers go: give --layers"),
        (("--layers", 7), "axis 'layers': prune() cannot take 6 to 7; it leaves 1 .. 6"),
        (("--kv-heads", 1), "axis 'kv_heads': prune() takes layers, embed, heads, mlp"),
        (("--embed", 6), "head_dim 3"),  # which no GPT2LMHeadModel has
    ],
)
def test_what_the_command_refuses_before_it_measures(folder, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(importance, "streams", None)
    words = ["prune", folder / "deep", tmp_path / "b", "--data", folder / "text.txt", *arguments]
    assert main([str(w) for w in words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_models_that_no_text_is_for(tmp_path):
    class Images:
        config, folder = FAMILIES["ViT"], tmp_path

        def sizes(self):
            return self.config.sizes()

    with pytest.raises(interop.CheckpointError, match="takes images, and this command measures on text"):
        of_data(Images(), tmp_path / "text.txt")
    words = tiny.config(head_dim=2)
    interop.save(tmp_path / "a", replace(words, dtype="float32"), tiny.params(words, dtype="float32"))
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(interop.CheckpointError, match=r"no tokenizer.json in .*; give --data as a .npy"):
        of_data(interop.open_checkpoint(tmp_path / "a"), tmp_path / "text.txt")


# --- in a V-cycle ---


class Bench:
    """What phases ask of a run, without one."""

    def __init__(self, **models):
        self.models, self.ledger, self.finite = (
            models,
            SimpleNamespace(add=lambda **_: None),
            lambda step, values: values,
        )

    def compute(self, phase, function, *arguments):
        return function(phase, optax.identity(), *arguments), lambda: 0.0

    def held_out(self, batches):
        tokens = np.stack([tiny.tokens(seed=i) for i in range(batches)])
        return tokens[..., :-1], tokens[..., 1:]

    def validate(self, step, model): ...

    def log(self, step, **values): ...


def test_a_pruned_v_cycle_measures_goes_down_and_comes_back():
    """.. to the bit, where the small model learned nothing; what waited is what it was, where it did."""
    method = VCycle(groupings=(Pruning(2, batches=2),), alpha=1.0, correction=True)
    measure, coalesce, correction = (p for p in method.plan(CONFIG, Optim(), 9) if not isinstance(p, Train))
    params, axes = tiny.params(CONFIG), tiny.axes(CONFIG)
    bench = Bench(large=Model(params, None, CONFIG))
    bench.models["large"] = measure.run(bench)
    each = jax.vmap(lambda tokens: influence(streams(CONFIG, params, tokens)))
    expected = jax.jit(each)(bench.held_out(2)[0]).mean(0)
    np.testing.assert_allclose(bench.models["large"].sensitivity, expected, rtol=0, atol=TOLERANCE)
    kept = sorted(np.argsort(expected)[2:].tolist())
    assert kept != [0, 1]  # as before it is measured
    bench.models["coarse1"] = small = coalesce.run(bench)
    down = keep(LARGE, {"layers": kept})
    chex.assert_trees_all_equal(small.params, grow(down, params, axes))
    chex.assert_trees_all_equal(correction.run(bench).params, params)
    learned = jax.tree.map(lambda x: 0.9 * x, small.params)
    bench.models["coarse1"] = replace(small, params=learned)
    chex.assert_trees_all_equal(correction.run(bench).params, correct(params, learned, swap(down), axes))


def test_a_pruning_may_name_what_stays():
    large = Model({}, None, CONFIG, np.array([0.1, 0.5, 0.3, 0.2], np.float32))
    assert Pruning(2).measured(large).kept == (1, 2)
    named = Pruning(2, kept=(0, 3))
    assert named.measured(large) == named
    assert not any(isinstance(p, Measure) for p in VCycle(groupings=(named,)).plan(CONFIG, Optim(), 9))


@pytest.mark.slow  # phase by phase in the fast suite
def test_a_run_whose_small_model_learned_nothing(tmp_path):
    """The loss is what it was."""
    method = VCycle(
        (Stage(0.25),), (Stage(0.0), Stage(0.0)), (Pruning(2, batches=2),), 1.0, True, "exact", "asymmetric"
    )
    experiment = runs.experiment(tmp_path, model=runs.LARGE, method=method)
    with jax.enable_x64(False):
        pretrain.run(experiment, tmp_path / "run")
    lines = runs.log(tmp_path / "run")
    losses = {line["phase"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert losses["correct large coarse1"] == losses["train large"] != losses["coalesce large"]
    (sensitivity,) = (line["sensitivity"] for line in lines if "sensitivity" in line)
    assert len(sensitivity) == 4 and min(sensitivity) > 0
