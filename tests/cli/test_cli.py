"""The command ``jaxgrow`` writes loadable checkpoints, and errors exit with 1 or 2 and a message.

Most tests run the command in process.
"""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chex
import numpy as np
import pytest
import tiny
from cases import cases
from checkpoints import CONFIG, contents, saved, tensors

from jaxgrow import checkpoints, grow, operators
from jaxgrow.cli.arguments import jaxgrow_parser
from jaxgrow.cli.program import main
from jaxgrow.growth.merge import interpolate
from jaxgrow.models import GPT2Config, LlamaConfig

METHODS = operators.DEPTH | operators.WIDTH
SIZES = {"layers": 4, "embed": 12, "heads": 4, "mlp": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def words(*arguments: object) -> list[str]:
    """Divide texts into words; a path is one word."""
    return [w for a in arguments for w in (a.split() if isinstance(a, str) else [str(a)])]


def run(*arguments: object) -> None:
    assert main(words(*arguments)) == 0


def called(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def printed(capsys, *arguments: object) -> str:
    capsys.readouterr()
    run(*arguments)
    return capsys.readouterr().out


def refused(capsys, *arguments: object, status: int = 1) -> str:
    assert main(words(*arguments)) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


def difference(capsys, a: Path, b: Path) -> float:
    return called(capsys, "report", a, b)["max_abs"]


def test_a_v_cycle_by_hand(tmp_path, folder, capsys):
    groups = "--heads 0+2,1+3 --layers 0+1,2+3"
    run("coalesce", folder, tmp_path / "small", groups)
    run("decoalesce", tmp_path / "small", tmp_path / "up", groups)
    run("interpolate", folder, tmp_path / "up", tmp_path / "mix", "--alpha 0.25")
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
    assert "peak memory" in capsys.readouterr().out
    record = json.loads((tmp_path / "up/jaxgrow.json").read_text())
    assert record["operator"] == "decoalesce"
    heads, layers = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert record["arguments"] == {"heads": heads, "layers": layers, "tied": "norm"}
    # The record of a result has the earlier steps of its sources.
    run("convert", tmp_path / "mix", tmp_path / "orbax", "--to orbax")
    first = checkpoints.open_checkpoint(folder).fingerprint()
    record = json.loads((tmp_path / "orbax/jaxgrow.json").read_text())
    made, *steps = record["history"]
    assert made["made"] == first  # the folder's own record
    assert [step["operator"] for step in steps] == ["coalesce", "decoalesce", "interpolate"]
    sources = [step["sources"] for step in steps]
    assert sources == [[first], [steps[0]["made"]], [first, steps[1]["made"]]]
    assert record["sources"] == [steps[2]["made"]]
    assert not any({"config", "history", "huggingface"} & step.keys() for step in record["history"])


@pytest.mark.parametrize(("groups", "tied"), [("far", "norm"), ("adjacent", "paper")])
def test_pairs_by_name_and_what_a_tied_head_keeps(tmp_path, folder, capsys, tied, groups):
    run("decoalesce", folder, tmp_path / "up", f"--heads {groups} --tied {tied}")
    assert checkpoints.load(tmp_path / "up")[0] == replace(CONFIG, embed=24, heads=8, mlp=40)
    assert (difference(capsys, folder, tmp_path / "up") < 1e-4) == (tied == "norm")
    run("coalesce", tmp_path / "up", tmp_path / "down", f"--heads {groups} --tied {tied}")
    chex.assert_trees_all_equal(checkpoints.load(tmp_path / "down")[1], checkpoints.load(folder)[1])


WIDER = {"embed": 24, "heads": 8, "mlp": 40}
# The target of each method, other arguments that it records, and whether it keeps the function.
GROWTHS = {
    "stack": ({"layers": 6}, {}, False),
    "solar": ({"layers": 5}, {"blend": 1}, False),
    "interleave": ({"layers": 6}, {"period": 1}, False),
    "llama_pro": ({"layers": 6}, {"post_norm": False}, True),
    "hypercloning": (WIDER, {}, True),
    "staged": (WIDER, {}, True),
    # random copies have unequal counts
    "fpi": ({"embed": 24, "heads": 8, "mlp": 33}, {"seed": 3}, False),
    "net2net": ({"mlp": 33}, {"seed": 3}, True),
    "lemon": ({"embed": 18, "heads": 6}, {"norm": "layer", "seed": 3}, True),
    "average": ({"embed": 18, "heads": 6, "mlp": 30}, {"seed": 3}, False),
}
# One method for depth, one by maps, and one by rules; the others are extras.
CORE = ("stack", "fpi", "lemon")


@pytest.mark.parametrize("method", cases(GROWTHS.keys(), CORE))
def test_every_method_grows_a_folder_as_its_dry_run_predicts(tmp_path, folder, method, capsys):
    """The statement about the function is correct."""
    target, more, kept = GROWTHS[method]
    given = {axis: x for axis, x in more.items() if axis in ("blend", "seed")}
    options = [f"--{axis} {size}" for axis, size in (target | given).items()]
    arguments = ("grow", folder, tmp_path / "b", "--method", method, *options)
    dry = called(capsys, *arguments, "--dry-run")
    assert not list(tmp_path.iterdir())
    wet = called(capsys, *arguments)
    assert (dry.pop("written"), wet.pop("written")) == (False, True)
    for about in (dry, wet):
        about.pop("seconds"), about.pop("peak_memory")
    assert dry == wet
    assert (dry["keeps"], dry["notes"]) == (kept, [])
    size = 4 * sum(x.size for x in tensors(tmp_path / "b").values())
    assert dry["bytes"] == 4 * dry["parameters"] == size
    assert (difference(capsys, folder, tmp_path / "b") < 1e-4) == kept
    growth = METHODS[method](SIZES, target, **given)
    config, params = checkpoints.load(tmp_path / "b")
    assert config == CONFIG.resized(growth)
    assert dry["sizes"] == config.sizes()
    expected = grow(growth, tiny.params(CONFIG, dtype="float32"), CONFIG.axes())
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
    assert record["arguments"] == {"method": method, "target": target, **more}


def test_convert_there_and_back(tmp_path, folder):
    run("convert", folder, tmp_path / "o", "--to orbax")
    # The source is in the Orbax format again.
    run("grow", tmp_path / "o", tmp_path / "deep", "--method stack --layers 6")
    assert (tmp_path / "deep/params").is_dir()
    run("convert", tmp_path / "deep", tmp_path / "b", "--to hf")
    run("grow", folder, tmp_path / "c", "--method stack --layers 6")
    one, two = (contents(tmp_path / n) for n in "bc")
    for name in ("jaxgrow.json", "README.md"):  # they tell the steps
        assert one.pop(name) != two.pop(name)
    assert json.loads(one.pop("config.json")) == json.loads(two.pop("config.json"))
    assert one == two


def test_what_hugging_face_does_not_store_has_no_options_in_convert(tmp_path, folder, capsys):
    run("grow", folder, tmp_path / "a", "--method hypercloning --embed 24 --to orbax")
    error = refused(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to hf")
    assert "embed=12 or heads=8 fits, or --to orbax writes any model" in error


def test_a_run_is_a_source(tmp_path, small_run, capsys):
    from train.extras.run_params import load_params

    assert "GPT2Config" in printed(capsys, "inspect", small_run)
    run("convert", small_run, tmp_path / "hf", "--to hf")
    config, params = checkpoints.load(tmp_path / "hf")
    assert isinstance(config, GPT2Config)
    chex.assert_trees_all_equal(params, load_params(small_run))
    assert not (tmp_path / "hf/metrics.jsonl").exists()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    error = refused(capsys, "inspect", tmp_path / "run")
    assert "neither a finished run nor a Hugging Face folder" in error


def test_inspect(folder, capsys):
    out = printed(capsys, "inspect", folder)
    assert "GPT2LMHeadModel" in out
    assert "context=7 embed=12 head_dim=3 heads=4 layers=4 mlp=20 vocab=11" in out
    lines = out.splitlines()
    (key,) = [line.split() for line in lines if line.startswith("blocks/attention/key/kernel")]
    assert " ".join(key[1:9]) == "(4, 12, 4, 3) layers embed.in heads head_dim.in"
    assert "transformer.h.{layers}.attn.c_attn.weight" in key
    block = 4 * (12 * 12 + 12) + (12 * 20 + 20) + (20 * 12 + 12) + 2 * 24
    assert lines[-1] == f"{(11 + 7) * 12 + 4 * block + 24:,} parameters, 19.9 kB"
    about = called(capsys, "inspect", folder)
    assert about["architecture"] == "GPT2LMHeadModel"
    assert about["sizes"] == checkpoints.open_checkpoint(folder).sizes()
    key = next(leaf for leaf in about["leaves"] if leaf["path"] == "blocks/attention/key/kernel")
    assert (key["shape"], key["dtype"]) == ([4, 12, 4, 3], "float32")


# Arguments, the status, and words of the message.
WRONG = [
    ("coalesce --heads 0+1+4,2+3", 1, "outside 0 .. 3: [4]"),
    ("decoalesce --heads 0+1,2+3", 1, "--heads: 2 groups, but the source has 4 heads"),
    ("grow --method stack --embed 24", 1, "'embed': stack grows layers; choose one of aki, average"),
    ("grow --method net2net --layers 8", 1, "net2net grows embed, heads, mlp; choose one of aki"),
    ("grow --method net2net --embed 18", 1, "head_dim 3 (it would be 4.5); --embed 12 or --heads 6"),
    ("grow --method hypercloning --mlp 50", 1, "needs a multiple of 20, not 50. For example, use --mlp 60"),
    ("grow --method aki --heads 8 --embed 24 --noise 9", 1, "but aki does not do that for this model"),
    ("grow --method upcycle --experts 1", 2, "--active 2 (the default): each token is routed to"),
    ("grow --method upcycle --experts 4 --optimizer copy", 2, "upcycle, which does not grow an optimizer"),
    ("grow --method stack --layers 8 --optimizer-state o.pt", 2, "dropped without --optimizer copy, exact"),
    # The options of coalesce are groups, not sizes.
    ("coalesce --embed far", 1, "(it would be 1.5); embed=12 or heads=2 fits"),
    ("grow --method stack --layers 8 --to orbax --shard-size 1GB", 1, "no weight files whose size can be"),
    ("grow --method stack --layers 8 --head-dim 3", 2, "only checkpoints of other trainers need it"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "status", "message"), WRONG, ids=[line for line, *_ in WRONG])
def test_what_cannot_be_done_is_said_and_nothing_is_written(
    tmp_path, folder, capsys, line, status, message
):
    command, _, options = line.partition(" ")
    assert message in refused(capsys, command, folder, tmp_path / "b", options, status=status)
    assert not list(tmp_path.iterdir())


def test_groups_of_key_heads_are_named_like_their_option(tmp_path, capsys):
    sizes = {"vocab": 11, "context": 7, "layers": 2, "embed": 12, "heads": 4, "kv_heads": 2}
    source = saved(tmp_path / "a", LlamaConfig(**sizes, head_dim=4, mlp=20))
    up = ("decoalesce", source, tmp_path / "b", "--heads far --kv-heads 0,1,2")
    assert "--kv-heads: 3 groups, but the source has 2 kv_heads" in refused(capsys, *up)


@pytest.mark.parametrize("alpha", ["nan", "-0.1"])
def test_a_weight_is_from_0_to_1(tmp_path, folder, capsys, alpha):
    arguments = ("interpolate", folder, folder, tmp_path / "b", "--alpha", alpha)
    assert f"--alpha {alpha} is not from 0 to 1" in refused(capsys, *arguments, status=2)


@pytest.mark.parametrize(("options", "message"), [
    ("--heads 0-1", "separate groups with a comma"),
    ("--heads far --shard-size 5", "'5' is not a file size: give one such as 500MB, 1.5GB"),
    ("--heads far --shard-size 0GB", "'0GB' is not a file size"),
    ("--heads far --dtype int8", "choose from"),
])  # fmt: skip
def test_words_that_are_none(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words("coalesce a b", options))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --- the output of a run, and dry runs ---


def test_version_and_what_each_method_takes_and_keeps(capsys):
    from jaxgrow import __version__

    for arguments in ("--version", "grow --help"):
        with pytest.raises(SystemExit) as stopped:
            main(words(arguments))
        assert stopped.value.code == 0
    version, *lines = capsys.readouterr().out.splitlines()
    assert version == f"jaxgrow {__version__}"
    told = {line.split()[0]: line for line in lines if line and line.split()[0] in METHODS}
    assert told.keys() == METHODS.keys()
    assert "layers" in told["stack"] and told["stack"].endswith("no")
    assert "kv-heads" in told["hypercloning"] and told["hypercloning"].endswith("yes")


def test_all_architectures_are_listed(capsys):
    lines = printed(capsys, "architectures").splitlines()
    assert [line.split()[0] for line in lines] == sorted(checkpoints.FAMILIES)
    assert "LlamaForCausalLM  (model_type llama)" in lines
    assert called(capsys, "architectures")["GPT2LMHeadModel"] == "gpt2"


def test_every_argument_has_help():
    for name, command in jaxgrow_parser().get_default("commands").items():
        for action in command._actions:
            assert action.help or action.choices or action.type is float, (name, action.dest)


def test_heads_that_make_no_pairs_are_told(tmp_path, capsys):
    """Examples: GPT-2 XL's 25 heads are merged to five, and SmolLM2-135M's nine to three."""
    nine = saved(tmp_path / "nine", replace(CONFIG, embed=27, heads=9, mlp=18))
    out = printed(capsys, "coalesce", nine, tmp_path / "b", "--heads far")
    note = "9 heads cannot be grouped in pairs, so 'far' merged groups of 3, like far:3"
    assert f"note: {note}" in out
    assert called(capsys, "coalesce", nine, tmp_path / "c", "--heads far:3")["notes"] == []
    one, two = (checkpoints.load(tmp_path / name)[1] for name in "bc")
    chex.assert_trees_all_equal(one, two)


def test_a_dry_run_for_people_and_one_that_is_refused(tmp_path, folder, capsys):
    out = printed(capsys, "coalesce", folder, tmp_path / "b", "--heads far --dry-run")
    assert "nothing was written (--dry-run)" in out and "embed=6 head_dim=3 heads=2" in out
    assert "the function is changed" in out
    wide = ("grow", folder, tmp_path / "b", "--method hypercloning --embed 24 --dry-run")
    assert "--heads 8 fits" in refused(capsys, *wide)
    assert not list(tmp_path.iterdir())
    deep = ("grow", folder, tmp_path / "b", "--method stack --layers 8 --dry-run")
    (tmp_path / "b").mkdir()
    assert "--overwrite replaces it" in refused(capsys, *deep)
    (tmp_path / "file").write_text("")
    deep = ("grow", folder, tmp_path / "file/b/c", "--method stack --layers 8")
    for dry in ("", "--dry-run"):
        error = refused(capsys, *deep, dry)
        assert f"because {tmp_path / 'file'} is not a folder" in error


def test_noise_is_added_in_decibels_and_keeps_the_function(tmp_path, folder, capsys):
    noises = {"plain": "", "a": "--noise 20", "again": "--noise 20", "b": "--noise 20 --seed 1"}
    for name, noise in noises.items():
        run("grow", folder, tmp_path / name, "--method hypercloning --mlp 40", noise)
    plain, a, again, b = (checkpoints.load(tmp_path / name)[1] for name in noises)
    chex.assert_trees_all_equal(a, again)
    assert tiny.distance(a, b) > 0.01
    changed = [path for path, x, noisy in tiny.pairs(plain, a) if np.any(x != noisy)]
    assert changed == ["blocks/mlp/down/kernel"]
    x, noisy = (p["blocks"]["mlp"]["down"]["kernel"] for p in (plain, a))
    added = noisy - x
    np.testing.assert_allclose(added.std() / np.sqrt((x**2).mean()), 10 ** (-20 / 20), rtol=0.01)
    assert not np.allclose(added[0], added[1], rtol=0.1)  # each layer has different noise
    assert difference(capsys, folder, tmp_path / "a") < 1e-4


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
    run("convert", hub, tmp_path / "b", "--shard-size 1GB")
    assert checkpoints.load(tmp_path / "b")[0].layers == 3


def test_weights_of_other_frameworks_stay_behind(tmp_path):
    folder = saved(tmp_path / "a")
    left = "pytorch_model.bin tf_model.h5 flax_model.msgpack rust_model.ot 64.tflite model.onnx "
    left += "model.onnx_data q4.GGUF pytorch_model.bin.index.json"
    for name in (*left.split(), "vocab.txt", "README.md"):
        (folder / name).write_text("x")
    run("grow", folder, tmp_path / "b", "--method stack --layers 5")
    found = {f.name for f in (tmp_path / "b").iterdir()}
    own = "config.json jaxgrow.json model.safetensors tokenizer.json vocab.txt README.md"
    assert found == {*own.split()}


def test_subfolders_are_copied_or_listed(tmp_path, capsys):
    source = saved(tmp_path / "a")
    for name in ("additional_chat_templates/tool.jinja", "1_Pooling/config.json", ".cache/x"):
        (source / name).parent.mkdir()
        (source / name).write_text("{{ tools }}")
    out = printed(capsys, "convert", source, tmp_path / "orbax", "--to orbax")
    assert out.endswith(f"note: {source} has folders that are not copied: 1_Pooling/\n")
    again = ("convert", tmp_path / "orbax", tmp_path / "b", "--to hf --overwrite")
    for _ in range(2):  # the second time, the result is replaced
        assert "note" not in printed(capsys, *again)
        assert (tmp_path / "b/additional_chat_templates/tool.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "b/1_Pooling").exists()
    (tmp_path / "b/additional_chat_templates/mine.txt").write_text("")
    assert "additional_chat_templates/mine.txt" in refused(capsys, *again)
    outside = source / "additional_chat_templates" / "out.jinja"
    outside.symlink_to(tmp_path / "b" / "config.json")
    grow = ("grow", source, tmp_path / "c", "--method stack --layers 8")
    assert "outside the folder" in refused(capsys, *grow)


# --- odd numbers of key/value heads, and MLP sizes that the heads do not divide ---


def test_a_llama_of_any_family_goes_down_and_up(tmp_path, capsys):
    """The head counts are from SmolLM2-135M."""
    heads, kv_heads, mlp, times = 9, 3, 24, 3
    sizes = {"embed": 2 * heads, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    config = LlamaConfig(vocab=11, context=7, layers=2, head_dim=2, **sizes)
    folder, small, up, again, own = (tmp_path / n for n in ("a", "small", "up", "again", "own"))
    checkpoints.save(folder, config, tiny.params(config, dtype="float32"))
    run("coalesce", folder, small, "--heads far")
    found = checkpoints.load(small)[0]
    assert (found.heads, found.embed, found.mlp) == (heads // times, found.heads * 2, mlp // times)
    run("decoalesce", small, up, f"--heads far:{times}")
    assert checkpoints.load(up)[0] == config
    run("coalesce", up, again, f"--heads far:{times}")
    for _, x, y in tiny.pairs(checkpoints.load(small)[1], checkpoints.load(again)[1]):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    assert difference(capsys, small, up) < 1e-4
    run("coalesce", folder, own, f"--kv-heads adjacent:{times} --mlp far --embed far:1")
    found = checkpoints.load(own)[0]
    assert (found.heads, found.embed, found.mlp) == (heads // times, config.embed, mlp // 2)


def test_key_heads_that_are_not_merged_need_their_groups_to_come_back(tmp_path, capsys):
    """The small model does not determine how many key/value heads the large model had."""
    sizes = {"vocab": 11, "context": 7, "layers": 1, "embed": 8, "heads": 4, "head_dim": 2}
    for kv_heads, heads, own in ((1, "far", "0"), (2, "0+1,2+3", "0,1")):
        config = LlamaConfig(**sizes, kv_heads=kv_heads, mlp=8)
        folder, small, up = (tmp_path / f"{name}{kv_heads}" for name in ("a", "small", "up"))
        checkpoints.save(folder, config, tiny.params(config, dtype="float32"))
        out = printed(capsys, "coalesce", folder, small, "--heads", heads)
        assert f"give decoalesce the groups --kv-heads {own} as well" in out
        out = printed(capsys, "decoalesce", small, up, f"--heads {heads} --kv-heads {own}")
        assert checkpoints.load(up)[0] == config
        assert "note" not in out


# --- half precision ---


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float16", 3)])
def test_half_precision_is_exact_for_powers_of_two_or_noted(tmp_path, dtype, times, capsys):
    """The reference is float32 with the same half-precision numbers."""
    half, grown = saved(tmp_path / "half", dtype=dtype), tmp_path / "b"
    target = [f"--{axis} {times * SIZES[axis]}" for axis in ("embed", "heads", "mlp")]
    grow = ("grow", half, grown, "--method hypercloning --overwrite", *target)
    about = called(capsys, *grow)
    error = difference(capsys, half, grown)
    assert about["keeps"] and {str(x.dtype) for x in tensors(grown).values()} == {dtype}
    if times == 2:
        assert error < 1e-5 and about["notes"] == []
    else:
        assert error > 1e-4
        (note,) = about["notes"]
        assert f"{dtype} rounds parameters whose factor is not a power of two" in note
        assert "--dtype float32" in note
    about = called(capsys, *grow, "--dtype float32")
    assert difference(capsys, half, grown) < 1e-5 and about["notes"] == []
    assert {str(x.dtype) for x in tensors(grown).values()} == {"float32"}


GEMMA = {
    **{"model_type": "gemma", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 4, "max_position_embeddings": 16},
}


@pytest.mark.parametrize("times", [2, pytest.param(4, marks=pytest.mark.extra)])
def test_stored_forms_that_half_precision_rounds_are_noted(tmp_path, times, capsys):
    """Gemma stores the embedding divided by the root of the width, and norm scales minus one."""
    gemma = checkpoints.FAMILIES["GemmaForCausalLM"].from_hf(GEMMA)
    a, b = tmp_path / "a", tmp_path / "b"
    checkpoints.save(a, gemma, tiny.params(gemma, dtype="bfloat16"))
    axes = ("embed", "heads", "kv_heads", "mlp")
    wide = [f"--{axis.replace('_', '-')} {times * gemma.sizes()[axis]}" for axis in axes]
    grow = ("grow", a, b, "--method hypercloning --overwrite", *wide)
    (note,) = called(capsys, *grow)["notes"]
    leaves = "token_embedding, final_norm/scale" if times == 2 else "final_norm/scale"
    assert f"bfloat16 rounds {leaves}, because" in note and "--dtype float32" in note
    assert difference(capsys, a, b) > 1e-4
    assert called(capsys, *grow, "--dtype float32")["notes"] == []
    assert difference(capsys, a, b) < 1e-4
    # New layers do not change the width, so nothing is rounded.
    deep = ("grow", a, tmp_path / "c", "--method llama_pro --layers 4")
    assert called(capsys, *deep)["notes"] == []


def test_a_dtype_that_cannot_hold_the_values_is_refused(tmp_path, capsys):
    params = tiny.params(CONFIG, dtype="float32")
    params["token_embedding"][3, 0] = -1e5
    params["blocks"]["mlp"]["up"]["kernel"][2, 0, 0] = 2e5
    checkpoints.save(tmp_path / "a", CONFIG, params)
    error = refused(capsys, "convert", tmp_path / "a", tmp_path / "b", "--dtype float16")
    assert "has values up to 100000, but the largest number of float16 is 65504" in error
    assert "token_embedding" in error and not (tmp_path / "b").exists()
    params["token_embedding"][3, 0] = np.nan
    checkpoints.save(tmp_path / "a", CONFIG, params, overwrite=True)
    grow = ("grow", tmp_path / "a", tmp_path / "b", "--method stack --layers 8 --dtype float16")
    assert "layer 2 of blocks/mlp/up/kernel has values up to 200000" in refused(capsys, *grow)
    run("convert", tmp_path / "a", tmp_path / "b", "--dtype bfloat16")
    params["blocks"]["mlp"]["up"]["kernel"][2, 0, 0] = np.inf
    checkpoints.save(tmp_path / "a", CONFIG, params, overwrite=True)
    run("convert", tmp_path / "a", tmp_path / "c", "--dtype float16")


def test_half_precision_results_are_rounded_once_at_the_end(tmp_path, folder, capsys):
    a, b, wide, mix = (tmp_path / name for name in ("a", "b", "wide", "mix"))
    options = "--method hypercloning --embed 36 --heads 12 --mlp 60"
    out = printed(capsys, "grow", folder, a, options, "--dtype bfloat16")
    assert "the function is preserved up to rounding\nnote: every parameter is rounded to" in out
    out = printed(capsys, "grow", folder, wide, options)
    assert "the function is preserved\n" in out and "note" not in out
    run("convert", wide, b, "--dtype bfloat16")
    chex.assert_trees_all_equal(checkpoints.load(a)[1], checkpoints.load(b)[1])
    run("interpolate", b, a, mix, "--alpha 0.3 --dtype float32")
    for _, x, y in tiny.pairs(checkpoints.load(mix)[1], checkpoints.load(b)[1]):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y.astype(np.float32), rtol=1e-6)


# --- file sizes, streams, python -m ---


def test_sizes_of_files():
    sizes = {"500MB": 500_000_000, "1.5GB": 1_500_000_000, "5GiB": 5 << 30, "0.5 kib": 512}
    for text, size in sizes.items():
        parsed = jaxgrow_parser().parse_args(["convert", "a", "b", "--shard-size", text])
        assert parsed.shard_size == size


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path, folder, monkeypatch):
    """Names of files are bytes, and need not be UTF-8."""
    target = tmp_path / os.fsdecode(b"b\xff")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "utf-8"))
    run("convert", folder, target, "--to orbax --dry-run")
    assert b"b\\udcff: " in shown.getvalue()


def test_the_output_may_be_closed(folder, monkeypatch):
    """Python then has no stdout, as after `jaxgrow inspect DIR >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    run("inspect", folder)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_reader_that_ends_early_is_no_error(folder):
    """`python -m jaxgrow inspect DIR | head` ends silently, with the status that shells give SIGPIPE."""
    command = [sys.executable, "-m", "jaxgrow", "inspect", str(folder)]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        said = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (said.returncode, said.stderr) == (128 + signal.SIGPIPE, "")
