"""The command ``jaxgrow`` writes loadable checkpoints, and errors exit with 1 or 2 and a message.

Most tests run the command in process.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import tiny
from checkpoints import CONFIG, contents, saved, tensors

from jaxgrow import checkpoints, grow, operators
from jaxgrow.cli.arguments import command_parser
from jaxgrow.cli.program import main
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.commands.model_outputs import outputs_of
from jaxgrow.extras.peft.lora import LoRA, init_lora
from jaxgrow.growth.merge import interpolate
from jaxgrow.models import GPT2Config, LlamaConfig

METHODS = operators.DEPTH | operators.WIDTH
SIZES = {"layers": 4, "embed": 12, "heads": 4, "mlp": 20}
GEMMA = {
    "model_type": "gemma",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Skip fsync, which would take most of the time of these tests."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def run(*arguments: object) -> None:
    assert main([str(a) for a in arguments]) == 0


def refused(capsys, *arguments: object, status: int = 1) -> str:
    assert main([str(a) for a in arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


def test_a_v_cycle_by_hand(tmp_path, folder, capsys):
    groups = ("--heads", "0+2,1+3", "--layers", "0+1,2+3")
    run("coalesce", folder, tmp_path / "small", *groups)
    run("decoalesce", tmp_path / "small", tmp_path / "up", *groups)
    run("interpolate", folder, tmp_path / "up", tmp_path / "mix", "--alpha", "0.25")
    up = operators.decoalesce(SIZES, heads=((0, 2), (1, 3)), layers=((0, 1), (2, 3)))
    down = operators.coalesce(SIZES, heads=((0, 2), (1, 3)), layers=((0, 1), (2, 3)))
    before, axes = tiny.params(CONFIG, dtype="float32"), CONFIG.axes()
    small = grow(down, before, axes)
    expected = interpolate(before, grow(up, small, axes), 0.25)
    config, params = checkpoints.load(tmp_path / "small")
    assert config == replace(CONFIG, layers=2, embed=6, heads=2, mlp=10)
    chex.assert_trees_all_close(params, small, rtol=1e-6, atol=1e-6)
    config, params = checkpoints.load(tmp_path / "mix")
    assert config == CONFIG
    chex.assert_trees_all_close(params, expected, rtol=1e-6, atol=1e-6)
    record = json.loads((tmp_path / "up/jaxgrow.json").read_text())
    assert record["operator"] == "decoalesce"
    assert record["arguments"] == {
        "heads": [[0, 2], [1, 3]],
        "layers": [[0, 1], [2, 3]],
        "tied": "norm",
    }
    assert len(json.loads((tmp_path / "mix/jaxgrow.json").read_text())["sources"]) == 2


@pytest.mark.parametrize(
    ("groups", "tied"),
    [
        ("far", "norm"),
        ("adjacent", "paper"),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (("far", "paper"), ("adjacent", "norm"))
        ),
    ],
)
def test_pairs_by_name_and_what_a_tied_head_keeps(tmp_path, folder, capsys, tied, groups):
    run("decoalesce", folder, tmp_path / "up", "--heads", groups, "--tied", tied)
    assert checkpoints.load(tmp_path / "up")[0] == replace(CONFIG, embed=24, heads=8, mlp=40)
    capsys.readouterr()
    run("report", folder, tmp_path / "up")
    largest = float(capsys.readouterr().out.split("max |a - b| ")[1].split(",")[0])
    assert (largest < 1e-4) == (tied == "norm")
    run("coalesce", tmp_path / "up", tmp_path / "down", "--heads", groups, "--tied", tied)
    chex.assert_trees_all_equal(checkpoints.load(tmp_path / "down")[1], checkpoints.load(folder)[1])


def test_uneven_groups(tmp_path, folder):
    run("coalesce", folder, tmp_path / "small", "--heads", "0+1+2,3", "--layers", "3,0+1+2")
    run(
        "decoalesce",
        tmp_path / "small",
        tmp_path / "up",
        "--heads",
        "0+1+2,3",
        "--layers",
        "3,0+1+2",
    )
    assert checkpoints.load(tmp_path / "up")[0] == CONFIG


def test_solar_averages_the_layers_where_its_copies_meet(tmp_path, folder, capsys):
    run("grow", folder, tmp_path / "b", "--method", "solar", "--layers", "5", "--blend", "1")
    expected = grow(
        operators.solar(SIZES, {"layers": 5}, blend=1),
        tiny.params(CONFIG, dtype="float32"),
        CONFIG.axes(),
    )
    config, params = checkpoints.load(tmp_path / "b")
    assert config.layers == 5
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    record = json.loads((tmp_path / "b" / "jaxgrow.json").read_text())
    assert record["arguments"]["blend"] == 1
    capsys.readouterr()
    for method, more in (("stack", ["--layers", "8"]), ("upcycle", ["--experts", "4"])):
        asked = ["grow", str(folder), str(tmp_path / "c"), "--method", method, *more]
        assert main([*asked, "--blend", "1"]) == 2
        said = capsys.readouterr().err
        assert f"{method} does not average layers" in said and "omit --blend" in said


TARGETS = {
    "g_stack": {"layers": 8},
    "solar": {"layers": 6},
    "staged": {"embed": 24, "heads": 8, "mlp": 40},
    "hypercloning": {"embed": 24, "heads": 8, "mlp": 40},
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_grows_a_folder(tmp_path, folder, method, capsys):
    default = {"layers": 6} if method in operators.DEPTH else {"embed": 18, "heads": 6, "mlp": 30}
    target = TARGETS.get(method, default)
    seed = ["--seed", "3"] if method in ("fpi", "net2net", "aki", "lemon", "average") else []
    options = [text for axis, size in target.items() for text in (f"--{axis}", size)]
    run("grow", folder, tmp_path / "b", "--method", method, *options, *seed)
    growth = METHODS[method](SIZES, target, *([3] if seed else []))
    config, params = checkpoints.load(tmp_path / "b")
    assert config == CONFIG.resized(growth)
    expected = grow(growth, tiny.params(CONFIG, dtype="float32"), CONFIG.axes())
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
    traits = {
        "lemon": {"norm": "layer"},
        "llama_pro": {"post_norm": False},
        "interleave": {"period": 1},
    }.get(method, {})
    assert record["arguments"] == {
        "method": method,
        "target": target,
        **traits,
        **({"seed": 3} if seed else {}),
    }
    again = [f"--{axis}={size - 1}" for axis, size in SIZES.items() if axis in target]
    assert f": {operators.OPERATORS[method].name} cannot reduce the size" in refused(
        capsys, "grow", folder, tmp_path / "c", "--method", method, *again
    )


def test_convert_there_and_back(tmp_path, folder):
    run("convert", folder, tmp_path / "o", "--to", "orbax")
    # The source is in the Orbax format again.
    run("grow", tmp_path / "o", tmp_path / "deep", "--method", "stack", "--layers", "6")
    assert (tmp_path / "deep/params").is_dir()
    run("convert", tmp_path / "deep", tmp_path / "b", "--to", "hf")
    run("grow", folder, tmp_path / "c", "--method", "stack", "--layers", "6")
    one, two = (contents(tmp_path / n) for n in "bc")
    assert one.pop("jaxgrow.json") != two.pop("jaxgrow.json")
    assert {k: v for k, v in one.items() if k != "config.json"} == {
        k: v for k, v in two.items() if k != "config.json"
    }
    assert json.loads(one["config.json"]) == json.loads(two["config.json"])


def test_a_model_that_no_architecture_stores_goes_to_orbax(tmp_path, folder, capsys):
    arguments = ("grow", folder, tmp_path / "b", "--method", "hypercloning", "--embed", "24")
    assert "--to orbax writes any model" in refused(capsys, *arguments)
    run(*arguments, "--to", "orbax")
    run("report", folder, tmp_path / "b")
    assert float(capsys.readouterr().out.split("max |a - b| ")[1].split(",")[0]) < 1e-4


def test_inspect_requires_the_format_that_is_given(folder, capsys):
    error = refused(capsys, "inspect", folder, "--format", "maxtext")
    assert f"{folder} contains no Orbax checkpoint" in error


def test_a_run_is_a_source(tmp_path, small_run, capsys):
    from train.store.workdir import load_params

    run("inspect", small_run)
    assert "GPT2Config" in capsys.readouterr().out
    run("convert", small_run, tmp_path / "hf", "--to", "hf")
    config, params = checkpoints.load(tmp_path / "hf")
    assert isinstance(config, GPT2Config)
    chex.assert_trees_all_equal(params, load_params(small_run))
    assert not (tmp_path / "hf/metrics.jsonl").exists()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "neither a finished run nor a Hugging Face folder" in refused(
        capsys, "inspect", tmp_path / "run"
    )


def test_inspect(folder, capsys):
    run("inspect", folder)
    out = capsys.readouterr().out
    assert "GPT2LMHeadModel" in out
    assert "context=7 embed=12 head_dim=3 heads=4 layers=4 mlp=20 vocab=11" in out
    (key,) = [
        line.split() for line in out.splitlines() if line.startswith("blocks/attention/key/kernel")
    ]
    assert " ".join(key[1:9]) == "(4, 12, 4, 3) layers embed.in heads head_dim.in"
    assert "transformer.h.{layers}.attn.c_attn.weight" in key
    block = 4 * (12 * 12 + 12) + (12 * 20 + 20) + (20 * 12 + 12) + 2 * 24
    assert out.splitlines()[-1] == f"{(11 + 7) * 12 + 4 * block + 24:,} parameters, 19.9 kB"


def test_report_on_tokens_of_a_file(tmp_path, folder, capsys):
    np.save(tmp_path / "ids.npy", np.arange(10, dtype=np.uint16).reshape(2, 5))
    run("report", folder, folder, "--data", tmp_path / "ids.npy")
    out = capsys.readouterr().out
    assert "the first 1 x 7 tokens" in out
    assert "max |a - b| 0.00e+00" in out


def test_report_does_not_round_operands_on_accelerators(folder):
    """By default, accelerators round the operands of float32 matrix products."""
    compare = outputs_of(checkpoints.open_checkpoint(folder))
    program = str(jax.make_jaxpr(compare)(np.zeros((1, 4), np.int32)))
    exact = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert program.count("dot_general[") == program.count(exact) > 0


def test_report_on_a_text(tmp_path, capsys):
    """The model has no tokenizer and a vocabulary of bytes, and the data are read as in `prune`."""
    model = saved(tmp_path / "bytes", replace(CONFIG, vocab=256, layers=1))
    (model / "tokenizer.json").unlink()
    (tmp_path / "text.txt").write_text("A text of forty bytes, a few more, three")
    run("report", model, model, "--data", tmp_path / "text.txt")
    assert "the first 5 x 7 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("ids", [[], ["a", "b"], [11], [-1, 2], [0.5]], ids=str)
def test_tokens_that_are_none(tmp_path, folder, capsys, ids):
    np.save(tmp_path / "ids.npy", np.array(ids))
    assert "ids.npy" in refused(capsys, "report", folder, folder, "--data", tmp_path / "ids.npy")


def test_report_counts_logits_that_are_not_finite(tmp_path, folder, capsys):
    params = tiny.params(CONFIG, dtype="float32")
    params["token_embedding"][3, 0] = np.inf
    checkpoints.save(tmp_path / "inf", CONFIG, params)
    for options in ((), ("--json",)):
        error = refused(capsys, "report", folder, tmp_path / "inf", *options)
        assert f"{tmp_path / 'inf'} returns " in error and " NaN and " in error
        assert f"{folder} returns" not in error


def test_models_of_two_tokenizers_are_noted(tmp_path, folder, capsys):
    words = ["<unk>", "a", "b"]
    for name, model in (
        ("ab", {"vocab": {word: i for i, word in enumerate(words)}}),
        ("ba", {"vocab": [["<unk>", 0.0], ["b", -1.0], ["a", -2.0]]}),
    ):
        file = saved(tmp_path / name) / "tokenizer.json"
        file.write_text(json.dumps({"model": model, "added_tokens": [{"id": 0, "content": "<x>"}]}))
    both = tmp_path / "ab", tmp_path / "ba"
    note = (
        f"the tokenizers in {both[0]} and {both[1]} differ, so 2 token ids mean different tokens: "
        '1, for example, means "a" in the first and "b" in the second'
    )
    run("report", *both)
    assert f"note: {note}" in capsys.readouterr().out
    run("report", *both, "--json")
    assert note in json.loads(capsys.readouterr().out)["notes"][0]
    mix = ("interpolate", *both, tmp_path / "mix", "--alpha", "0.5")
    assert "`jaxgrow merge` matches their rows by token" in refused(capsys, *mix)
    # Equal tokenizers, and a file that is not a tokenizer.
    for other in (both[0], folder):
        run("report", both[0], other)
        assert "note" not in capsys.readouterr().out


def test_report_needs_one_vocabulary(tmp_path, folder, capsys):
    other = saved(tmp_path / "b", replace(CONFIG, vocab=13))
    assert "vocabularies differ, 11 and 13" in refused(capsys, "report", folder, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("coalesce",), "no groups: give --heads, --layers or both"),
        (("coalesce", "--kv-heads", "far"), "axis 'kv_heads': the model has no such axis"),
        (("decoalesce", "--kv-heads", "far"), "axis 'kv_heads': the model has no such axis"),
        (
            ("coalesce", "--heads", "far:3"),
            "axis 'heads': far groups of 3: 4 is not a multiple of 3",
        ),
        (("coalesce", "--mlp", "far:8"), "axis 'mlp': far groups of 8: 20 is not a multiple of 8"),
        (
            ("grow", "--method", "net2net", "--embed", "18"),
            "head_dim 3 (it would be 4.5); --embed 12 or --heads 6 fits, or --to orbax",
        ),
        (
            ("grow", "--method", "hypercloning", "--mlp", "50"),
            "needs a multiple of 20, not 50. For example, use --mlp 60",
        ),
        (
            ("grow", "--method", "aki", "--heads", "8", "--embed", "24", "--noise", "9"),
            "but aki does not do that for this model",
        ),
        (
            ("grow", "--method", "fpi", "--mlp", "25", "--noise", "inf"),
            "--noise inf is not a number of decibels",
        ),
        (
            ("grow", "--method", "fpi", "--mlp", "25", "--seed", "-1"),
            "--seed -1: a seed must be a non-negative integer",
        ),
        (
            ("decoalesce", "--layers", "alike"),
            "--layers alike: the kinds of the layers of the large model are not known",
        ),
        (
            ("coalesce", "--layers", "far:3"),
            "or a size that divides it: far:2, or --layers alike",
        ),
        (
            ("coalesce", "--heads", "0+1,1+2"),
            "axis 'heads': the groups must hold each of its 4 units exactly once",
        ),
        (("coalesce", "--heads", "0+1+4,2+3"), "outside 0 .. 3: [4]"),
        (("decoalesce", "--heads", "0+1,2+3"), "--heads: 2 groups, but the source has 4 heads"),
        (("decoalesce", "--layers", "0,1,2"), "--layers: 3 groups, but the source has 4 layers"),
        (
            ("grow", "--method", "upcycle", "--experts", "1"),
            "--active 2 (the default): each token is routed to at least 1 and at most 1 experts",
        ),
        (("grow", "--method", "stack"), "nothing to grow"),
        (
            ("grow", "--method", "stack", "--layers", "3"),
            "stack cannot reduce the size from 4 to 3",
        ),
        (
            ("grow", "--method", "stack", "--embed", "24"),
            "axis 'embed': stack grows layers; choose one of aki, average, fpi, hypercloning",
        ),
        (
            ("grow", "--method", "stack", "--layers", "8", "--seed", "1"),
            "--seed: stack does not use random numbers",
        ),
        (("grow", "--method", "hypercloning", "--kv-heads", "8"), "axis 'kv_heads'"),
        (
            ("grow", "--method", "net2net", "--layers", "8"),
            "axis 'layers': net2net grows embed, heads, mlp; choose one of aki, average, g_stack",
        ),
        (("convert",), "convert needs at least one of --to"),
        (
            ("grow", "--method", "stack", "--layers", "8", "--optimizer-state", "o.pt"),
            "--optimizer-state: the optimizer state is dropped without --optimizer copy, exact",
        ),
        (
            ("grow", "--method", "stack", "--layers", "8", "--head-dim", "3"),
            "--head-dim: only checkpoints of other trainers need it",
        ),
        (
            ("grow", "--method", "upcycle", "--experts", "4", "--optimizer", "copy"),
            "--optimizer: not supported for upcycle, which does not grow an optimizer state",
        ),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_written(
    tmp_path, folder, capsys, arguments, message
):
    command, *options = arguments
    # wrong for any SRC
    usage = (
        "no groups",
        "--noise inf",
        "nothing to grow",
        "--seed",
        "convert needs",
        "--layers alike",
        "--active",
        "--optimizer",
        "--head-dim",
    )
    status = 2 if message.startswith(usage) else 1
    assert message in refused(capsys, command, folder, tmp_path / "b", *options, status=status)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_the_lora_that_is_grown_is_not_replaced(tmp_path, folder, capsys, options):
    settings = LoRA(rank=2)
    factors = init_lora(settings, CONFIG.axes(), CONFIG.sizes(), jax.random.key(0))
    lora = tmp_path / "lora"
    peft.save(lora, peft.PeftAdapter(CONFIG, settings, factors))
    before = contents(lora)
    grow = ("grow", folder, lora, "--method", "stack", "--layers", "8", "--lora", lora)
    message = f"{lora} is the source {lora}, contains it, or is inside it"
    assert message in refused(capsys, *grow, "--overwrite", *options)
    growth = operators.stack(CONFIG.sizes(), {"layers": 8})
    with pytest.raises(checkpoints.CheckpointError, match="is the source"):
        checkpoints.transform(folder, checkpoints.Output(lora, overwrite=True), growth, lora=lora)
    assert contents(lora) == before


def test_groups_of_key_heads_are_named_like_their_option(tmp_path, capsys):
    config = LlamaConfig(
        vocab=11, context=7, layers=2, embed=12, heads=4, kv_heads=2, head_dim=4, mlp=20
    )
    source = saved(tmp_path / "a", config)
    arguments = ("decoalesce", source, tmp_path / "b", "--heads", "far", "--kv-heads", "0,1,2")
    assert "--kv-heads: 3 groups, but the source has 2 kv_heads" in refused(capsys, *arguments)


def test_models_and_weights_that_do_not_go_together(tmp_path, folder, capsys):
    deep = saved(tmp_path / "deep", replace(CONFIG, layers=5))
    arguments = ("interpolate", folder, deep, tmp_path / "b", "--alpha")
    assert "the two models differ: layers 4 and 5" in refused(capsys, *arguments, "0.5")
    for alpha in ("nan", "2", "-0.1"):
        assert f"--alpha {alpha} is not from 0 to 1" in refused(capsys, *arguments, alpha, status=2)
    assert "there is no folder" in refused(capsys, "inspect", tmp_path / "nowhere")


def test_words_that_are_none(capsys):
    for arguments, message in (
        (("--heads", "0-1"), "separate groups with a comma"),
        (
            ("--heads", "far", "--shard-size", "5"),
            "'5' is not a file size: give one such as 500MB, 1.5GB or 5GiB",
        ),
        (("--heads", "far", "--shard-size", "0GB"), "'0GB' is not a file size"),
        (("--heads", "far", "--dtype", "int8"), "choose from"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["coalesce", "a", "b", *arguments])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


# --- the output of a run, and dry runs ---


def test_version_and_what_each_method_takes_and_keeps(capsys):
    from jaxgrow import __version__

    for arguments in (["--version"], ["grow", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    version, *lines = capsys.readouterr().out.splitlines()
    assert version == f"jaxgrow {__version__}"
    told = {line.split()[0]: line for line in lines if line and line.split()[0] in METHODS}
    assert told.keys() == METHODS.keys()
    assert "layers" in told["stack"] and told["stack"].endswith("no")
    assert "kv-heads" in told["hypercloning"] and told["hypercloning"].endswith("yes")


def test_all_architectures_are_listed(capsys):
    run("architectures")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(checkpoints.FAMILIES)
    assert "LlamaForCausalLM  (model_type llama)" in lines
    run("architectures", "--json")
    assert json.loads(capsys.readouterr().out)["GPT2LMHeadModel"] == "gpt2"


@pytest.mark.parametrize(
    ("command", "option", "about"),
    [
        ("coalesce", "--tied", "how the scale of tied embeddings is corrected"),
        ("convert", "--dtype", "rounded once at the end (default: the dtype of the source)"),
        (
            "grow",
            "--layers",
            "the new number of layers; for a model with stages (Swin) one per stage, such as 2,2,18,2",
        ),
        (
            "prune",
            "src",
            "of a run (if it has not finished, its newest checkpoint; RUN@STEP chooses one)",
        ),
    ],
)
def test_help_explains_each_option(command, option, about):
    actions = command_parser().get_default("commands")[command]._actions
    found = next(a for a in actions if option in (a.dest, *a.option_strings))
    assert about in found.help


def test_every_argument_has_help():
    for name, command in command_parser().get_default("commands").items():
        for action in command._actions:
            assert action.help or action.choices or action.type is float, (name, action.dest)


def test_heads_that_make_no_pairs_are_told(tmp_path, capsys):
    """Examples: GPT-2 XL's 25 heads are merged to five, and SmolLM2-135M's nine to three."""
    nine = saved(tmp_path / "nine", replace(CONFIG, embed=27, heads=9, mlp=18))
    run("coalesce", nine, tmp_path / "b", "--heads", "far")
    assert (
        "note: 9 heads cannot be grouped in pairs, so 'far' merged groups of 3, like far:3"
        in capsys.readouterr().out
    )
    run("coalesce", nine, tmp_path / "c", "--heads", "far:3", "--json")
    assert json.loads(capsys.readouterr().out)["notes"] == []
    chex.assert_trees_all_equal(
        checkpoints.load(tmp_path / "b")[1], checkpoints.load(tmp_path / "c")[1]
    )


DRY = {
    "llama_pro": (("--layers", 6), True),
    "stack": (("--layers", 6), False),
    "hypercloning": (("--embed", 24, "--heads", 8, "--mlp", 40), True),
    # random copies have unequal counts
    "fpi": (("--heads", 8, "--mlp", 33, "--embed", 24), False),
    "net2net": (("--mlp", 33), True),
    "lemon": (("--embed", 18, "--heads", 6), True),
    "zero_pad": (("--mlp", 33), True),
    "aki": (("--mlp", 33), False),
    "staged": (("--embed", 24, "--heads", 8, "--mlp", 40), True),
    "sparkling": (("--mlp", 33), False),
}


# other methods cover the same output
AGAIN = ("stack", "net2net", "zero_pad", "aki", "staged", "sparkling")


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m in AGAIN)) for m in DRY]
)
def test_a_dry_run_predicts_the_result_and_writes_nothing(tmp_path, folder, method, capsys):
    """The dry run reports the same as the run, and its statement about the function is correct."""
    options, kept = DRY[method]
    arguments = ("grow", folder, tmp_path / "b", "--method", method, *options, "--json")
    run(*arguments, "--dry-run")
    dry = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    run(*arguments)
    wet = json.loads(capsys.readouterr().out)
    assert (dry.pop("written"), wet.pop("written")) == (False, True)
    assert dry == wet
    assert (dry["keeps"], dry["notes"]) == (kept, [])
    assert (
        dry["bytes"]
        == 4 * dry["parameters"]
        == 4 * sum(x.size for x in tensors(tmp_path / "b").values())
    )
    assert dry["sizes"] == checkpoints.open_checkpoint(tmp_path / "b").sizes()
    run("report", folder, tmp_path / "b", "--json")
    assert (json.loads(capsys.readouterr().out)["max_abs"] < 1e-4) == kept


def test_a_dry_run_for_people_and_one_that_is_refused(tmp_path, folder, capsys):
    run("coalesce", folder, tmp_path / "b", "--heads", "far", "--dry-run")
    out = capsys.readouterr().out
    assert "nothing was written (--dry-run)" in out and "embed=6 head_dim=3 heads=2" in out
    assert "the function is changed" in out
    arguments = (
        "grow",
        folder,
        tmp_path / "b",
        "--method",
        "hypercloning",
        "--embed",
        "24",
        "--dry-run",
    )
    assert "--heads 8 fits" in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())
    (tmp_path / "b").mkdir()
    assert "--overwrite replaces it" in refused(
        capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", "8", "--dry-run"
    )


def test_inspect_as_json(folder, capsys):
    run("inspect", folder, "--json")
    about = json.loads(capsys.readouterr().out)
    assert about["architecture"] == "GPT2LMHeadModel"
    assert about["sizes"] == checkpoints.open_checkpoint(folder).sizes()
    key = next(leaf for leaf in about["leaves"] if leaf["path"] == "blocks/attention/key/kernel")
    assert (key["shape"], key["dtype"]) == ([4, 12, 4, 3], "float32")


def test_shards_as_large_as_asked(tmp_path, folder):
    run("convert", folder, tmp_path / "b", "--shard-size", "2KB")
    files = sorted((tmp_path / "b").glob("model-*.safetensors"))
    assert len(files) > 5
    chex.assert_trees_all_equal(checkpoints.load(tmp_path / "b")[1], checkpoints.load(folder)[1])


def test_noise_tells_copies_apart_and_keeps_the_function(tmp_path, folder, capsys):
    arguments = ("--method", "hypercloning", "--mlp", "40")
    run("grow", folder, tmp_path / "plain", *arguments)
    for name, options in (("a", (10,)), ("b", (10,)), ("c", (10, "--seed", 1)), ("quiet", (40,))):
        run("grow", folder, tmp_path / name, *arguments, "--noise", *options)
    plain, a, b, c, quiet = (
        checkpoints.load(tmp_path / name)[1] for name in ("plain", "a", "b", "c", "quiet")
    )
    chex.assert_trees_all_equal(a, b)
    assert tiny.distance(a, c) > 0.01
    assert [path for path, x, noisy in tiny.pairs(plain, a) if np.any(x != noisy)] == [
        "blocks/mlp/down/kernel"
    ]
    x, noisy, less = (p["blocks"]["mlp"]["down"]["kernel"] for p in (plain, a, quiet))
    for snr, added in ((10, noisy - x), (40, less - x)):
        np.testing.assert_allclose(
            added.std() / np.sqrt((x**2).mean()), 10 ** (-snr / 20), rtol=0.01
        )
        # The noise of the two copies cancels.
        np.testing.assert_allclose(added[:, :20], -added[:, 20:], atol=1e-6)
    assert not np.allclose(added[0], added[1], rtol=0.1)  # each layer has different noise
    capsys.readouterr()
    run("report", folder, tmp_path / "a", "--json")
    assert json.loads(capsys.readouterr().out)["max_abs"] < 1e-4


def test_the_record_has_what_was_done_before(tmp_path, folder):
    first = checkpoints.open_checkpoint(folder).fingerprint()
    run("coalesce", folder, tmp_path / "small", "--layers", "far")
    run("decoalesce", tmp_path / "small", tmp_path / "up", "--layers", "far")
    run("interpolate", folder, tmp_path / "up", tmp_path / "mix", "--alpha", "0.5")
    run("convert", tmp_path / "mix", tmp_path / "orbax", "--to", "orbax")
    record = json.loads((tmp_path / "orbax/jaxgrow.json").read_text())
    made, *steps = record["history"]
    assert made["made"] == first  # the folder's own record
    assert [step["operator"] for step in steps] == ["coalesce", "decoalesce", "interpolate"]
    down, up, mix = steps
    assert (down["sources"], up["sources"], mix["sources"]) == (
        [first],
        [down["made"]],
        [first, up["made"]],
    )
    assert record["sources"] == [mix["made"]]
    assert not any({"config", "history", "huggingface"} & step.keys() for step in record["history"])


def test_folders_of_hugging_faces_cache(tmp_path, capsys):
    hub = tmp_path / "models--org--gpt"
    saved(hub / "snapshots" / "1f")
    run("inspect", hub)
    saved(hub / "snapshots" / "2e", replace(CONFIG, layers=3))
    message = refused(capsys, "inspect", hub)
    assert "has these snapshots: 1f, 2e" in message
    assert "Give the path of one of them, models--org--gpt/snapshots/HASH" in message
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("2e")
    run("convert", hub, tmp_path / "b", "--shard-size", "1GB")
    assert checkpoints.load(tmp_path / "b")[0].layers == 3


def test_weights_of_other_frameworks_stay_behind(tmp_path):
    folder = saved(tmp_path / "a")
    theirs = ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "64.tflite", "model.onnx",
              "model.onnx_data", "q4.GGUF", "pytorch_model.bin.index.json")  # fmt: skip
    for name in (*theirs, "vocab.txt", "README.md"):
        (folder / name).write_text("x")
    run("grow", folder, tmp_path / "b", "--method", "stack", "--layers", "5")
    found = {f.name for f in (tmp_path / "b").iterdir()}
    assert found == {
        "config.json",
        "jaxgrow.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
        "README.md",
    }


def test_subfolders_are_copied_or_listed(tmp_path, capsys):
    source = saved(tmp_path / "a")
    for name in ("additional_chat_templates/tool.jinja", "1_Pooling/config.json", ".cache/x"):
        (source / name).parent.mkdir()
        (source / name).write_text("{{ tools }}")
    run("convert", source, tmp_path / "orbax", "--to", "orbax")
    assert capsys.readouterr().out.endswith(
        f"note: {source} has folders that are not copied: 1_Pooling/\n"
    )
    for _ in range(2):  # the second time, the result is replaced
        run("convert", tmp_path / "orbax", tmp_path / "b", "--to", "hf", "--overwrite")
        assert "note" not in capsys.readouterr().out
        assert (tmp_path / "b/additional_chat_templates/tool.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "b/1_Pooling").exists()
    (tmp_path / "b/additional_chat_templates/mine.txt").write_text("")
    again = ("convert", tmp_path / "orbax", tmp_path / "b", "--to", "hf", "--overwrite")
    assert "additional_chat_templates/mine.txt" in refused(capsys, *again)
    outside = source / "additional_chat_templates" / "out.jinja"
    outside.symlink_to(tmp_path / "b" / "config.json")
    assert "outside the folder" in refused(
        capsys, "grow", source, tmp_path / "c", "--method", "stack", "--layers", "8"
    )


def test_a_file_above_the_new_folder_is_named(tmp_path, folder, capsys):
    (tmp_path / "file").write_text("")
    grow = ("--method", "stack", "--layers", "8")
    for dry in ((), ("--dry-run",)):
        error = refused(capsys, "grow", folder, tmp_path / "file" / "b" / "c", *grow, *dry)
        assert f"because {tmp_path / 'file'} is not a folder" in error


@pytest.mark.slow  # the fast suite covers this with a command in `test_mutations`
def test_the_library_imports_where_unix_modules_are_missing():
    code = "import sys; sys.modules['resource'] = None; from jaxgrow.cli import arguments; arguments.command_parser()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


# --- odd numbers of key/value heads, and MLP sizes that the heads do not divide ---


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mlp", "times"),
    [
        (9, 3, 24, 3),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((14, 2, 38, 2), (15, 5, 40, 5))
        ),
    ],
)
def test_a_llama_of_any_family_goes_down_and_up(tmp_path, heads, kv_heads, mlp, times, capsys):
    """The head counts are from Qwen2.5-0.5B, SmolLM2-135M and SmolLM2-360M."""
    config = LlamaConfig(
        vocab=11,
        context=7,
        layers=2,
        embed=2 * heads,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2,
        mlp=mlp,
    )
    folder = tmp_path / "a"
    checkpoints.save(folder, config, tiny.params(config, dtype="float32"))
    run("coalesce", folder, tmp_path / "small", "--heads", "far")
    small = checkpoints.load(tmp_path / "small")[0]
    assert (small.heads, small.embed, small.mlp) == (
        heads // times,
        2 * heads // times,
        mlp // times,
    )
    run("decoalesce", tmp_path / "small", tmp_path / "up", "--heads", f"far:{times}")
    assert checkpoints.load(tmp_path / "up")[0] == config
    run("coalesce", tmp_path / "up", tmp_path / "again", "--heads", f"far:{times}")
    for _, x, y in tiny.pairs(
        checkpoints.load(tmp_path / "small")[1], checkpoints.load(tmp_path / "again")[1]
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    capsys.readouterr()
    run("report", tmp_path / "small", tmp_path / "up", "--json")
    assert json.loads(capsys.readouterr().out)["max_abs"] < 1e-4
    run(
        "coalesce",
        folder,
        tmp_path / "own",
        "--kv-heads",
        f"adjacent:{times}",
        "--mlp",
        "far",
        "--embed",
        "far:1",
    )
    own = checkpoints.load(tmp_path / "own")[0]
    assert (own.heads, own.embed, own.mlp) == (heads // times, config.embed, mlp // 2)


def test_key_heads_that_are_not_merged_need_their_groups_to_come_back(tmp_path, capsys):
    """The small model does not determine how many key/value heads the large model had."""
    for kv_heads, heads, own in ((1, "far", "0"), (2, "0+1,2+3", "0,1")):
        config = LlamaConfig(
            vocab=11, context=7, layers=1, embed=8, heads=4, kv_heads=kv_heads, head_dim=2, mlp=8
        )
        folder, small, up = (tmp_path / f"{name}{kv_heads}" for name in ("a", "small", "up"))
        checkpoints.save(folder, config, tiny.params(config, dtype="float32"))
        run("coalesce", folder, small, "--heads", heads)
        assert f"give decoalesce the groups --kv-heads {own} as well" in capsys.readouterr().out
        run("decoalesce", small, up, "--heads", heads, "--kv-heads", own)
        assert checkpoints.load(up)[0] == config
        assert "note" not in capsys.readouterr().out


# --- half precision ---


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float16", 3)])
def test_half_precision_is_exact_for_powers_of_two_or_noted(tmp_path, dtype, times, capsys):
    """The reference is float32 with the same half-precision numbers."""
    half, grown = saved(tmp_path / "half", dtype=dtype), tmp_path / "b"
    target = [
        text for axis in ("embed", "heads", "mlp") for text in (f"--{axis}", times * SIZES[axis])
    ]

    def change(*options: object) -> tuple[float, list[str], set[str]]:
        run(
            "grow",
            half,
            grown,
            "--method",
            "hypercloning",
            *target,
            "--overwrite",
            "--json",
            *options,
        )
        about = json.loads(capsys.readouterr().out)
        run("report", half, grown, "--json")
        dtypes = {str(x.dtype) for x in tensors(grown).values()}
        assert about["keeps"]
        return json.loads(capsys.readouterr().out)["max_abs"], about["notes"], dtypes

    error, notes, dtypes = change()
    assert dtypes == {dtype}
    if times == 2:
        assert error < 1e-5 and notes == []
    else:
        assert error > 1e-4 and len(notes) == 1
        assert (
            f"{dtype} rounds parameters whose factor is not a power of two" in notes[0]
            and "--dtype float32" in notes[0]
        )
    error, notes, dtypes = change("--dtype", "float32")
    assert error < 1e-5 and notes == [] and dtypes == {"float32"}


@pytest.mark.parametrize("times", [2, 4])
def test_stored_forms_that_half_precision_rounds_are_noted(tmp_path, times, capsys):
    """Gemma stores the embedding divided by the root of the width, and norm scales minus one."""
    gemma = checkpoints.FAMILIES["GemmaForCausalLM"].from_hf(GEMMA)
    params = tiny.params(gemma, dtype="bfloat16")
    checkpoints.save(tmp_path / "a", gemma, params)
    wide = [
        word
        for axis in ("embed", "heads", "kv_heads", "mlp")
        for word in (f"--{axis.replace('_', '-')}", times * gemma.sizes()[axis])
    ]
    for options, leaves in (
        ((), ["token_embedding", "final_norm/scale"] if times == 2 else ["final_norm/scale"]),
        (("--dtype", "float32"), []),
    ):
        grow = ("--method", "hypercloning", *wide, *options, "--overwrite", "--json")
        run("grow", tmp_path / "a", tmp_path / "b", *grow)
        about = json.loads(capsys.readouterr().out)
        run("report", tmp_path / "a", tmp_path / "b", "--json")
        error = json.loads(capsys.readouterr().out)["max_abs"]
        if leaves:
            assert error > 1e-4 and len(about["notes"]) == 1
            assert f"bfloat16 rounds {', '.join(leaves)}, because" in about["notes"][0]
            assert "--dtype float32" in about["notes"][0]
        else:
            assert error < 1e-4 and about["notes"] == []
    # New layers do not change the width, so nothing is rounded.
    run("grow", tmp_path / "a", tmp_path / "c", "--method", "llama_pro", "--layers", "4", "--json")
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_a_dtype_that_cannot_hold_the_values_is_refused(tmp_path, capsys):
    params = tiny.params(CONFIG, dtype="float32")
    params["token_embedding"][3, 0] = -1e5
    params["blocks"]["mlp"]["up"]["kernel"][2, 0, 0] = 2e5
    checkpoints.save(tmp_path / "a", CONFIG, params)
    error = refused(capsys, "convert", tmp_path / "a", tmp_path / "b", "--dtype", "float16")
    assert "has values up to 100000, but the largest number of float16 is 65504" in error
    assert "token_embedding" in error and not (tmp_path / "b").exists()
    params["token_embedding"][3, 0] = np.nan
    checkpoints.save(tmp_path / "a", CONFIG, params, overwrite=True)
    grow = ("grow", tmp_path / "a", tmp_path / "b", "--method", "stack", "--layers", "8")
    error = refused(capsys, *grow, "--dtype", "float16")
    assert "layer 2 of blocks/mlp/up/kernel has values up to 200000" in error
    run("convert", tmp_path / "a", tmp_path / "b", "--dtype", "bfloat16")
    params["blocks"]["mlp"]["up"]["kernel"][2, 0, 0] = np.inf
    checkpoints.save(tmp_path / "a", CONFIG, params, overwrite=True)
    run("convert", tmp_path / "a", tmp_path / "c", "--dtype", "float16")


def test_half_precision_results_are_rounded_once_at_the_end(tmp_path, folder, capsys):
    arguments = ("--method", "hypercloning", "--embed", "36", "--heads", "12", "--mlp", "60")
    run("grow", folder, tmp_path / "a", *arguments, "--dtype", "bfloat16")
    said = capsys.readouterr().out
    assert (
        "the function is preserved up to rounding\nnote: every parameter is rounded to bfloat16"
        in said
    )
    run("grow", folder, tmp_path / "wide", *arguments)
    assert "the function is preserved\n" in (said := capsys.readouterr().out) and "note" not in said
    run("convert", tmp_path / "wide", tmp_path / "b", "--dtype", "bfloat16")
    chex.assert_trees_all_equal(
        checkpoints.load(tmp_path / "a")[1], checkpoints.load(tmp_path / "b")[1]
    )
    run(
        "interpolate",
        tmp_path / "b",
        tmp_path / "a",
        tmp_path / "mix",
        "--alpha",
        "0.3",
        "--dtype",
        "float32",
    )
    for _, x, y in tiny.pairs(
        checkpoints.load(tmp_path / "mix")[1], checkpoints.load(tmp_path / "b")[1]
    ):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y.astype(np.float32), rtol=1e-6)


def stacked_by_a_process(source, target):
    command = [sys.executable, "-m", "jaxgrow", "grow", str(source), str(target)]
    command += ["--method", "stack", "--layers", "6"]
    root = str(Path(checkpoints.__file__).parents[2])
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.mark.slow  # the fast suite covers this as on Windows in `test_mutations`
def test_as_a_process(tmp_path, folder):
    """The process starts, transforms and ends."""
    done = stacked_by_a_process(folder, tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(tmp_path / "b")[0].layers == 6


@pytest.mark.slow  # the fast suite covers this in process, and `train` in `test_hosts`
def test_as_a_process_what_is_wrong_has_no_traceback(tmp_path, folder):
    again = stacked_by_a_process(folder, tmp_path)
    assert (again.returncode, again.stdout) == (1, "")
    said = f"error: {tmp_path} exists; --overwrite replaces it (in Python: overwrite=True)"
    assert again.stderr.strip() == said


# --- file sizes, completion, python -m ---


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500MB", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("5GiB", 5 << 30),
        ("0.5 kib", 512),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_of_files(text, size):
    assert (
        command_parser().parse_args(["convert", "a", "b", "--shard-size", text]).shard_size == size
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("jaxgrow con", ["convert"]),
        ("jaxgrow grow --met", ["--method"]),
        ("jaxgrow grow a b --method ll", ["llama_pro"]),
        ("jaxgrow convert a b --to o", ["orbax"]),
        ("jaxgrow completion z", ["zsh"]),
        ("jaxgrow grow ./fol", []),  # the shell completes file names
    ],
)
def test_a_shell_completes_commands_options_and_choices(capsys, typed, completed):
    run("completion", "bash")
    words = typed.split()
    asked = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _jaxgrow; echo "${{COMPREPLY[@]}}"'
    said = subprocess.run(
        ["bash", "-c", capsys.readouterr().out + asked], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == completed and said.stderr == ""


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path, folder, monkeypatch):
    """Names of files are bytes, and need not be UTF-8."""
    target = tmp_path / os.fsdecode(b"b\xff")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "utf-8"))
    run("convert", folder, target, "--to", "orbax", "--dry-run")
    assert b"b\\udcff: " in printed.getvalue()


def test_the_output_may_be_closed(folder, monkeypatch):
    """Python then has no stdout, as after `jaxgrow inspect DIR >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    run("inspect", folder)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_reader_that_ends_early_is_no_error(folder):
    """`jaxgrow inspect DIR | head` ends silently, with the status that shells give SIGPIPE."""
    command = [sys.executable, "-m", "jaxgrow", "inspect", str(folder)]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        said = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (said.returncode, said.stderr) == (128 + signal.SIGPIPE, "")


def test_python_m_jaxgrow():
    said = subprocess.run(
        [sys.executable, "-m", "jaxgrow", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("jaxgrow ")
