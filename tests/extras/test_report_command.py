"""The commands report and completion, and a LoRA that is not replaced by its growth."""

import json
import shutil
import subprocess
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from checkpoints import CONFIG, contents, saved
from published import called, refused

from jaxgrow import checkpoints, operators
from jaxgrow.cli.program import main
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.commands.model_outputs import outputs_of
from jaxgrow.extras.peft.lora import LoRA, init_lora


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def printed(capsys, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_report_on_tokens_of_a_file(tmp_path, folder, capsys):
    np.save(tmp_path / "ids.npy", np.arange(10, dtype=np.uint16).reshape(2, 5))
    out = printed(capsys, "report", folder, folder, "--data", tmp_path / "ids.npy")
    assert "the first 1 x 7 tokens" in out and "max |a - b| 0.00e+00" in out


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
    out = printed(capsys, "report", model, model, "--data", tmp_path / "text.txt")
    assert "the first 5 x 7 tokens" in out


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
    vocabularies = [{"<unk>": 0, "a": 1, "b": 2}, [["<unk>", 0.0], ["b", -1.0], ["a", -2.0]]]
    both = tmp_path / "ab", tmp_path / "ba"
    for path, vocab in zip(both, vocabularies, strict=True):
        names = {"model": {"vocab": vocab}, "added_tokens": [{"id": 0, "content": "<x>"}]}
        (saved(path) / "tokenizer.json").write_text(json.dumps(names))
    note = (
        f"the tokenizers in {both[0]} and {both[1]} differ, so 2 token ids mean different tokens: "
        '1, for example, means "a" in the first and "b" in the second'
    )
    assert f"note: {note}" in printed(capsys, "report", *both)
    assert note in called(capsys, "report", *both)["notes"][0]
    mix = ("interpolate", *both, tmp_path / "mix", "--alpha", "0.5")
    assert "3 rows of both models were matched by token" in printed(capsys, *mix)
    # Equal tokenizers, and a file that is not a tokenizer.
    for other in (both[0], folder):
        assert "note" not in printed(capsys, "report", both[0], other)


def test_inspect_requires_the_format_that_is_given(folder, capsys):
    error = refused(capsys, "inspect", folder, "--format", "maxtext")
    assert f"{folder} contains no Orbax checkpoint" in error
    error = refused(capsys, "inspect", folder / "model.safetensors")
    assert "model.safetensors, but a file: give its folder. jaxgrow" in error
    error = refused(capsys, "inspect", folder, "--head-dim", 4, status=2)
    assert "--head-dim: only checkpoints of other trainers need it" in error


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--lora-only",)], ids=str)
def test_the_lora_that_is_grown_is_not_replaced(tmp_path, folder, capsys, options):
    settings = LoRA(rank=2)
    factors = init_lora(settings, CONFIG.axes(), CONFIG.sizes(), jax.random.key(0))
    lora = tmp_path / "lora"
    peft.write_peft(lora, peft.PeftAdapter(CONFIG, settings, factors))
    before = contents(lora)
    grow = ("grow", folder, lora, "--method", "stack", "--layers", "8", "--lora", lora)
    message = f"{lora} is the source {lora}, contains it, or is inside it"
    assert message in refused(capsys, *grow, "--overwrite", *options)
    growth = operators.stack(CONFIG.sizes(), {"layers": 8})
    with pytest.raises(checkpoints.CheckpointError, match="is the source"):
        checkpoints.transform(folder, checkpoints.Output(lora, overwrite=True), growth, lora=lora)
    assert contents(lora) == before


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("typed", "completed"), [
    ("jaxgrow con", ["convert"]),
    ("jaxgrow grow --met", ["--method"]),
    ("jaxgrow grow a b --method ll", ["llama_pro"]),
    ("jaxgrow completion z", ["zsh"]),
    ("jaxgrow grow ./fol", []),  # the shell completes file names
])  # fmt: skip
def test_a_shell_completes_commands_options_and_choices(capsys, typed, completed):
    script = printed(capsys, "completion", "bash")
    words = typed.split()
    asked = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _jaxgrow; echo "${{COMPREPLY[@]}}"'
    command = ["bash", "-c", script + asked]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.split() == completed and said.stderr == ""
