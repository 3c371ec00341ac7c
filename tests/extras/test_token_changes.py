"""A vocabulary grows and shrinks by maps of its axis, with all that has its rows.

Old rows are bitwise equal. Means and covariances of sampled rows are those of the old rows, up to
the error of their number.
"""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import tiny
from checkpoints import change, saved, tensors
from safetensors.numpy import load_file, save_file

from jaxgrow import checkpoints, grow, grow_optimizer
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.cli.program import main
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.peft import lora
from jaxgrow.extras.vocabulary import new_tokens, renumbered_ids
from jaxgrow.models import LlamaConfig, ViTConfig

LLAMA = LlamaConfig(
    vocab=11, context=7, layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=20, tied=False
)
KEEP = [0, 2, 3, 7, 10]


def run(*words):
    return main([str(word) for word in words])


def logits(folder, tokens):
    config, params = checkpoints.load(folder)
    return np.asarray(tiny.forward(config)(params, tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a Llama with its own head, special tokens and generation settings."""
    folder = tmp_path_factory.mktemp("words") / "llama"
    checkpoints.save(folder, LLAMA, tiny.params(LLAMA, dtype="float32"))
    (folder / "tokenizer.json").write_text('{"model": 1}')
    change(folder, bos_token_id=2, eos_token_id=[7, 10], pad_token_id=-1)
    (folder / "generation_config.json").write_text('{"eos_token_id": 10, "top_k": 7}')
    return folder


# --- the map ---


def test_sampled_rows_have_the_mean_and_the_covariance_of_the_old_rows():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3)) + rng.normal(size=3)
    params = {"embedding": rows, "head": rows[:, ::-1].T + 1}
    axes = {"embedding": ("vocab", "embed"), "head": ("embed.in", "vocab")}
    count = 40_000
    grown = grow(new_tokens({"vocab": 40}, {"vocab": 40 + count}, seed=1), params, axes)
    np.testing.assert_array_equal(grown["embedding"][:40], rows)
    # The rows of both leaves together
    old, new = (
        np.concatenate([p["embedding"][part], p["head"].T[part]], 1)
        for p, part in ((params, slice(40)), (grown, slice(40, None)))
    )
    spread = old.std(0)
    np.testing.assert_allclose((new.mean(0) - old.mean(0)) / spread, 0, atol=5 / count**0.5)
    covariance = np.cov(old.T, bias=True) / np.outer(spread, spread)
    found = np.cov(new.T) / np.outer(spread, spread)
    np.testing.assert_allclose(found, covariance, atol=0.03)
    # Their distribution is close to a normal one, whose fourth moment is 3.
    moment = ((new - new.mean(0)) ** 4).mean(0) / new.var(0) ** 2
    np.testing.assert_allclose(moment, 3, atol=0.4)


def test_the_seed_decides():
    first, same, other = (
        new_tokens({"vocab": 9}, {"vocab": 20}, seed=seed)["vocab"].write.index
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


@pytest.mark.parametrize("policy", ["exact", "copy"])
def test_moments_of_new_rows(policy):
    params = {"embedding": np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)}
    axes = {"embedding": ("vocab", "embed")}
    tx = optax.adam(1e-2)
    _, state = tx.update(params, tx.init(params), params)
    growth = new_tokens({"vocab": 9}, {"vocab": 12}, [[0, 3]])
    adam = grow_optimizer(tx, state, growth, params, axes, policy)[0]
    for old, new in ((state[0].mu, adam.mu), (state[0].nu, adam.nu)):
        old, new = np.asarray(old["embedding"]), np.asarray(new["embedding"])
        np.testing.assert_allclose(new[:9], old, rtol=1e-6)
        expected = (old[0] + old[3]) / 2 if policy == "copy" else 0 * old[0]
        np.testing.assert_allclose(new[9], expected, rtol=1e-6)
    assert (np.asarray(adam.nu["embedding"]) >= 0).all()


@pytest.mark.parametrize(("target", "like", "message"), [
    ({"vocab": 9}, (), "the new size must be at least 10"),
    ({"vocab": 10}, ([1], [2]), "the new size must be at least 11"),
    ({"vocab": 10}, ([1, 9],), r"the new token 9 is the mean of 2 old tokens, \[1, 9\]: give 1"),
    ({"vocab": 10}, ([],), "give 1 to 64 ids from 0 to 8"),
    ({"embed": 10}, (), "the target has embed"),
])  # fmt: skip
def test_wrong_targets(target, like, message):
    with pytest.raises(ValueError, match=message):
        new_tokens({"vocab": 9, "embed": 4}, target, like)


# --- grow ---


@pytest.mark.parametrize("tied", [True, False])
def test_old_tokens_keep_their_logits_bitwise(folder, tmp_path, capsys, tied):
    source = saved(tmp_path / "gpt") if tied else folder
    assert run("grow", source, tmp_path / "b", "--vocab", 16, "--seed", 3) == 0
    out = capsys.readouterr().out
    assert "the function is changed" in out
    assert "the rows of the 11 old tokens are unchanged: their logits are bitwise equal" in out
    assert "add the 5 new tokens to them, with the ids 11 to 15" in out
    tokens = tiny.tokens(2, 7)
    np.testing.assert_array_equal(logits(tmp_path / "b", tokens)[..., :11], logits(source, tokens))
    growth = new_tokens({"vocab": 11}, {"vocab": 16}, seed=3)
    config, params = checkpoints.load(source)
    found = checkpoints.load(tmp_path / "b")
    assert found[0].vocab == 16
    for path, names in (
        ("token_embedding", ("vocab", "embed")),
        ("head_kernel", ("embed.in", "vocab")),
    ):
        if path in params:
            expected = grow(growth, {"x": params[path]}, {"x": names})["x"]
            np.testing.assert_allclose(found[1][path], expected, rtol=1e-6)
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
    assert record["arguments"]["tokenizer"] == "the tokenizer files are copied, not changed"
    assert (tmp_path / "b/tokenizer.json").read_text() == '{"model": 1}'
    assert config.vocab == 11


def test_a_report_measures_the_softmax_over_the_new_rows(folder, tmp_path, capsys):
    run("grow", folder, tmp_path / "b", "--vocab", 16)
    capsys.readouterr()
    assert run("report", folder, tmp_path / "b", "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["max_abs"] == about["kl"] == 0
    share = about["notes"][-1]
    assert "the other 5 tokens of b have together a mean probability of 0." in share
    wrong = tmp_path / "ids.npy"
    np.save(wrong, np.arange(14))
    assert run("report", tmp_path / "b", folder, "--data", wrong) == 1
    error = capsys.readouterr().err
    assert "ids.npy has the token id 13, but the second model has ids from 0 to 10" in error


def test_rows_like_given_tokens(folder, tmp_path):
    (tmp_path / "like.json").write_text('{"<think>": [3, 4], "<tool>": [7]}')
    assert run("grow", folder, tmp_path / "b", "--like-tokens", tmp_path / "like.json") == 0
    old, new = tensors(folder), tensors(tmp_path / "b")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        x = old[name]
        expected = np.concatenate([x, [(x[3] + x[4]) / 2, x[7]]])
        np.testing.assert_allclose(new[name], expected, rtol=1e-6)
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())["arguments"]
    assert record["like_tokens"] == {"<think>": [3, 4], "<tool>": [7]}
    assert record["target"] == {"vocab": 13}


def test_new_tokens_get_the_ids_that_the_tokenizer_gives_them(folder, tmp_path, capsys):
    source = tmp_path / "a model"
    shutil.copytree(folder, source)
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 10}}}')
    (tmp_path / "like.json").write_text('{"b": [3], "<think>": [4]}')
    assert run("grow", source, tmp_path / "b", "--like-tokens", tmp_path / "like.json") == 1
    assert "the tokenizer of" in (error := capsys.readouterr().err) and "'b' has the id 10" in error
    (tmp_path / "like.json").write_text('{"<think>": [4]}')
    assert run("grow", source, tmp_path / "b", "--like-tokens", tmp_path / "like.json") == 0
    out = capsys.readouterr().out
    assert "so it would give" not in out
    assert f"jaxgrow report '{source}' {tmp_path}/b measures it" in out
    # The tokenizer has a token for which the model has no row, as that of Gemma 3 1B.
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 11}}}')
    like = ("--like-tokens", tmp_path / "like.json", "--overwrite")
    assert run("grow", source, tmp_path / "b", *like) == 1
    assert f"First run jaxgrow grow '{source}' DST --vocab 12" in capsys.readouterr().err
    assert run("grow", source, tmp_path / "more", "--vocab", 12) == 0
    assert "copied, not changed\n" in capsys.readouterr().out
    assert run("grow", tmp_path / "more", tmp_path / "b", *like) == 0
    assert "add the 1 new tokens to them, with the ids 12 to 12" in capsys.readouterr().out
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 10}}}')
    assert run("grow", source, tmp_path / "b", *like) == 0
    out = capsys.readouterr().out
    # The model has unused rows, as many published models.
    padded = ("grow", tmp_path / "b", tmp_path / "c", "--vocab", 16)
    (tmp_path / "b/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 10}}}')
    assert run(*padded) == 0
    advice = f"remove the unused rows before, run jaxgrow prune {tmp_path}/b DST --vocab 11"
    assert advice in capsys.readouterr().out
    assert run("prune", tmp_path / "b", tmp_path / "d", "--vocab", 11) == 0
    assert run("grow", tmp_path / "d", *padded[2:], "--overwrite") == 0
    assert "so it would give" not in capsys.readouterr().out


@pytest.mark.parametrize("direction", ["grow", "prune"])
def test_loras_with_saved_embeddings_and_optimizer_state_follow(
    folder, tmp_path, capsys, direction
):
    how = lora.LoRA(2, 2.0, ("blocks/attention/query",))
    factors = lora.init_lora(how, LLAMA.axes(), LLAMA.sizes(), jax.random.key(0))
    factors = jax.tree.map(lambda x: np.ones(x.shape, np.float32), factors)
    params = tiny.params(LLAMA, 5, "float32")
    own = {path: params[path] for path in ("token_embedding", "head_kernel")}
    peft.write_peft(tmp_path / "lora", peft.PeftAdapter(LLAMA, how, factors, own))
    state = {
        f"state.{name}.{kind}": np.abs(x) + 1
        for name, x in tensors(folder).items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    (tmp_path / "keep.json").write_text(json.dumps({"keep": KEEP}))
    options = {"grow": ("--vocab", 13), "prune": ("--vocab", tmp_path / "keep.json")}[direction]
    words = (direction, folder, tmp_path / "b", *options, "--lora", tmp_path / "lora")
    save_file(state, tmp_path / "optimizer.safetensors")
    words += ("--optimizer-state", tmp_path / "optimizer.safetensors")
    assert run(*words) == 2
    assert "--optimizer-state: the optimizer state is dropped without" in capsys.readouterr().err
    assert run(*words, "--optimizer", "exact") == 0
    adapter = peft.read_peft(tmp_path / "b", open_checkpoint(tmp_path / "b").config)
    embedding = adapter.saved["token_embedding"]
    kept = np.arange(11) if direction == "grow" else KEEP
    np.testing.assert_array_equal(embedding[: len(kept)], own["token_embedding"][kept])
    np.testing.assert_array_equal(
        adapter.saved["head_kernel"][:, : len(kept)], own["head_kernel"][:, kept]
    )
    assert len(embedding) == (13 if direction == "grow" else 5)
    found = load_file(tmp_path / "b/optimizer.safetensors")
    for name in state:
        if "embed_tokens" in name or "lm_head" in name:
            np.testing.assert_allclose(found[name][: len(kept)], state[name][kept], rtol=1e-6)
            assert not found[name][len(kept) :].any()


# --- prune ---


def test_kept_tokens_keep_their_rows_and_special_tokens_get_their_new_ids(folder, tmp_path, capsys):
    (tmp_path / "keep.json").write_text(json.dumps({"keep": KEEP[::-1]}))
    assert run("prune", folder, tmp_path / "b", "--vocab", tmp_path / "keep.json") == 0
    assert "the tokenizer files are copied, not changed" in capsys.readouterr().out
    tokens = np.array([[0, 1, 2, 3, 4, 1, 0]])
    np.testing.assert_array_equal(
        logits(tmp_path / "b", tokens), logits(folder, np.array(KEEP)[tokens])[..., KEEP]
    )
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["vocab_size"] == 5 and config["bos_token_id"] == 1
    assert config["eos_token_id"] == [3, 4] and config["pad_token_id"] == -1
    generation = json.loads((tmp_path / "b/generation_config.json").read_text())
    assert generation == {"eos_token_id": 4, "top_k": 7}
    # The first tokens keep their ids.
    assert run("prune", folder, tmp_path / "c", "--vocab", 11) == 0
    assert json.loads((tmp_path / "c/config.json").read_text())["eos_token_id"] == [7, 10]


def test_the_first_tokens(folder, tmp_path, capsys):
    assert run("prune", folder, tmp_path / "b", "--vocab", 8) == 1
    error = capsys.readouterr().err
    assert (
        "config.json has special tokens that are not among the 8 kept ones: eos_token_id 10"
        in error
    )
    assert not (tmp_path / "b").exists()
    gpt = saved(tmp_path / "gpt")
    assert run("prune", gpt, tmp_path / "b", "--vocab", 8, "--dtype", "bfloat16") == 0
    assert open_checkpoint(tmp_path / "b").sizes()["vocab"] == 8


def test_tokens_that_only_an_adapter_has_are_not_lost(folder, tmp_path, capsys):
    """Its rows belong to more tokens than the growth of the model has."""
    settings = lora.LoRA(rank=2)
    factors = lora.init_lora(settings, LLAMA.axes(), LLAMA.sizes(), jax.random.key(0))
    factors = jax.tree.map(lambda x: np.ones(x.shape, np.float32), factors)
    more = {"token_embedding": np.ones((13, 16), np.float32), "head_kernel": np.ones((16, 13))}
    adapter = peft.PeftAdapter(replace(LLAMA, vocab=13), settings, factors, more)
    peft.write_peft(tmp_path / "lora", adapter, folder)
    lost = ("--lora", tmp_path / "lora")
    for words in (("grow", "--vocab", 16), ("prune", "--vocab", 11)):
        assert run(words[0], folder, tmp_path / "b", *words[1:], *lost) == 1
        assert "belongs to a model with vocab 13, not 11. First merge" in capsys.readouterr().err
    assert run("grow", folder, tmp_path / "b", "--method", "stack", "--layers", 4, *lost) == 0


def test_a_tied_head_of_half_precision_is_the_mean_in_float32(tmp_path, capsys):
    """Sums and norms of large numbers would be infinite in float16, and a mean would be rounded twice."""
    gpt = replace(LLAMA, eps=1e-5)
    checkpoints.save(tmp_path / "a", gpt, tiny.params(gpt, dtype="float32"))
    file = tmp_path / "a" / "model.safetensors"
    save_file(
        {n: (x * 4e4).clip(-6e4, 6e4).astype(np.float16) for n, x in load_file(file).items()}, file
    )
    old = {name: x.astype(np.float32) for name, x in load_file(file).items()}
    mean = (old["model.embed_tokens.weight"] + old["lm_head.weight"]) / 2
    for name, dtype in (("b", np.float16), ("c", np.float32)):
        words = ("--method", "tie", *(("--dtype", "float32") if dtype is np.float32 else ()))
        assert run("grow", tmp_path / "a", tmp_path / name, *words) == 0
        assert "nan" not in capsys.readouterr().out
        found = tensors(tmp_path / name)["model.embed_tokens.weight"]
        np.testing.assert_array_equal(found, mean.astype(dtype))


def test_ids_in_lists_and_parts():
    content = {"suppress_tokens": [1, 2], "text_config": {"eos_token_id": 2, "vocab_size": 3}}
    assert renumbered_ids(content, "config.json", {1: 0, 2: 1}, 3) == {
        "suppress_tokens": [0, 1],
        "text_config": {"eos_token_id": 1, "vocab_size": 3},
    }


@pytest.mark.parametrize(("words", "message"), [
    ("grow {a} {b} --vocab 11", "the new size must be at least 12"),
    ("grow {a} {b} --vocab 16 --layers 4", "--layers: --vocab and --like-tokens change only"),
    ("grow {a} {b} --vocab 9999999", "--vocab 9999999: the maximum is 1,048,576"),
    ("grow {a} {b} --like-tokens {wrong}", "'x' must be a list of old ids, such as [12, 881]"),
    ("grow {a} {b} --like-tokens {empty}", "has no new tokens"),
    ("grow {a} {b} --like-tokens {like} --seed 3", "--seed: the rows of --like-tokens are not"),
    ("prune {a} {b} --vocab 12", "--vocab 12 is not a choice of tokens: give a number from 1 to 11"),
    ("prune {a} {b} --vocab 0", 'or a JSON file {"keep": [ids from 0 to 10, each of them once]}'),
    ("prune {a} {b} --vocab {twice}", "is not a choice of tokens"),
    ("prune {a} {b} --vocab {wrong}", "is not a choice of tokens"),
    ("prune {a} {b} --vocab 8 --layers 1", "--layers: --vocab keeps given tokens"),
    ("prune {a} {b} --vocab {b}", "no such file or directory"),
    ("grow {a} {b} --method loop --loop 0-1x2 --blend 1", "--blend: loop only repeats layers"),
    ("grow {a} {b} --method loop --loop 0-1x2 --seed 1", "--seed: loop only repeats layers"),
])  # fmt: skip
def test_what_is_refused(folder, tmp_path, capsys, words, message):
    files = {"wrong": {"x": [True]}, "empty": {}, "twice": {"keep": [1, 1]}, "like": {"x": [1]}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    places = {name: tmp_path / name for name in (*files, "b")}
    assert main([word.format(a=folder, **places) for word in words.split()]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_methods_without_maps_are_not_shown(folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("show", folder, "--method", "tie", "--out", tmp_path / "a.png")
    assert "'tie' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [900, 5000])
def test_deep_lists_of_special_tokens_are_one_line(folder, tmp_path, capsys, depth):
    """How deep Python reads lists, and how deep its functions call each other, depends on its version."""
    source = tmp_path / "a"
    shutil.copytree(folder, source)
    deep = "[" * depth + "5" + "]" * depth
    (source / "generation_config.json").write_text(f'{{"eos_token_id": {deep}}}')
    (tmp_path / "keep.json").write_text(json.dumps({"keep": KEEP}))
    words = [str(source), str(tmp_path / "b"), "--vocab", str(tmp_path / "keep.json")]
    assert main(["prune", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    unread = f"the special tokens of {source} cannot be read: RecursionError"
    assert unread in line or "generation_config.json" in line
    assert not (tmp_path / "b").exists()


def test_a_run_whose_special_tokens_change_is_first_converted(folder, tmp_path, capsys):
    (tmp_path / "keep.json").write_text(json.dumps({"keep": KEEP}))
    pruned = ("prune", tmp_path / "orbax", tmp_path / "b", "--vocab", tmp_path / "keep.json")
    assert run("convert", folder, tmp_path / "orbax", "--to", "orbax") == 0
    assert run(*pruned) == 0
    assert run("convert", tmp_path / "b", tmp_path / "c", "--to", "hf") == 0
    assert json.loads((tmp_path / "c/config.json").read_text())["eos_token_id"] == [3, 4]
    # A run has no config.json, but records its special tokens.
    record = json.loads((tmp_path / "orbax/jaxgrow.json").read_text())
    del record["huggingface"]
    (tmp_path / "orbax/jaxgrow.json").write_text(
        json.dumps(record | {"head": {"eos_token_id": 10}})
    )
    assert run(*pruned, "--overwrite") == 1
    error = capsys.readouterr().err
    assert f"jaxgrow convert {tmp_path}/orbax DST --to hf" in error
    assert run("convert", tmp_path / "orbax", tmp_path / "hf", "--to", "hf") == 0
    assert run("prune", tmp_path / "hf", *pruned[2:], "--overwrite") == 0
    assert json.loads((tmp_path / "b/config.json").read_text())["eos_token_id"] == 4


def test_a_model_without_tokens(tmp_path, capsys):
    config = ViTConfig(
        image=4, patch=2, channels=3, layers=1, embed=6, heads=2, head_dim=3, mlp=8, classes=3
    )
    checkpoints.save(tmp_path / "a", config, tiny.params(config, dtype="float32"))
    assert run("grow", tmp_path / "a", tmp_path / "b", "--vocab", 16) == 1
    assert "is a ViTConfig, which has no tokens. Give a text model" in capsys.readouterr().err


def test_special_tokens_of_other_kinds_of_settings_are_named():
    with pytest.raises(CheckpointError, match="bos_token_id 4, pad_token_id 5"):
        renumbered_ids({"bos_token_id": 4, "pad_token_id": 5}, "config.json", {0: 0}, 9)
