"""Wrong input prints one clear line on stderr, sets an exit code and keeps existing files."""

import gzip
import io
import json
import sys
from dataclasses import replace

import jax
import pytest
import runs
from tokenizers import Tokenizer, models

from jaxgrow.checkpoints import CheckpointError
from jaxgrow.models.attention import Unsupported
from train import generate, pretrain
from train.common.errors import UserError, exits_cleanly, is_full_disk
from train.config.experiment import experiment_json
from train.store.checkpoint import Checkpoints
from train.store.workdir import Workdir


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run a script with arguments and return the last line of its error output."""

    def run(*arguments: str, script=pretrain, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            exits_cleanly(script.main)
        assert exit.value.code == code
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("error: ") and "Traceback" not in "".join(lines)
        return lines[-1].removeprefix("error: ")

    return run


# Faults of an otherwise valid run. ``{}`` stands for the folder of the run.
CASES = {
    "micro-batches too small": ("accumulate=4",
     "a micro-batch of 2 (batch=8, accumulate=4) is not divisible by 4 devices; use a batch that "
     "is a multiple of 16, or a smaller accumulate"),
    "no corpus": ("data.path={}/absent", "there is no corpus at {}/absent"),
    "nothing held out": ("data.valid_fraction=0.01",
     "data.valid_fraction selects one document in 100 for validation; give more text"),
    "a cut .gz": ("data.path={}/cut.gz", "cannot read {}/cut.gz: "),
    "a model without those tokens": ("data.tokenizer={}/vocabulary.json",
     "the largest id of the tokenizer is 1031, but model.vocab is 256; raise model.vocab to 1032"),
    "a short training text": ("model.context=1700", "the training data has 1 windows of 1700 tokens, less than one"),
    "a short validation text": ("batch=100", "the validation data has 75 windows of 8 tokens, less than one batch of"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(tmp_path, refused, case):
    option, says = (text.replace("{}", str(tmp_path)) for text in CASES[case])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"some text" * 100)[:-9])
    vocabulary = Tokenizer(models.BPE(vocab={chr(i): i for i in range(32, 1032)}, merges=[]))
    vocabulary.save(str(tmp_path / "vocabulary.json"))
    config = runs.script(tmp_path, runs.experiment(tmp_path, method=runs.VCYCLE))
    assert says in refused(config, "--workdir", str(tmp_path / "run"), "--set", option)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_object_store_is_not_a_folder_of_a_run(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    said = refused(config, "--workdir", "gs://bucket/run")
    assert "gs://bucket/run is the address of an object store: mount it" in said
    assert not (tmp_path / "gs:").exists()


def test_a_work_directory_of_another_config_stays_as_it_is(tmp_path, refused):
    """A folder with a line of a log, a checkpoint or a result belongs to its config."""
    experiment = runs.experiment(tmp_path)
    workdir, folder = Workdir(tmp_path / "run"), tmp_path / "run"
    workdir.claim(experiment)
    (folder / "config.json").write_text(json.dumps(experiment_json(experiment)))
    before = (folder / "config.json").read_bytes()
    other = replace(experiment, steps=9)
    workdir.claim(other)  # The folder is still unused.
    says = (
        r"contains a run of another config \(values there and here: steps: 8 and 9\); give another"
    )
    for kept in ("metrics.jsonl", "checkpoints/5", "result.json"):
        (folder / kept).parent.mkdir(exist_ok=True)
        (folder / kept).write_text("something")
        with pytest.raises(UserError, match=says):
            workdir.claim(other)
        workdir.claim(replace(experiment, log_every=1, parallel="mesh", checkpoint_every=9))
        (folder / kept).unlink()
    (folder / "metrics.jsonl").write_text("a line")
    options = ["--workdir", str(folder), "--set", "optim.peak_lr=0.5"]
    assert refused(runs.script(tmp_path, experiment), *options) == (
        f"{folder} contains a run of another config (values there and here: optim.peak_lr: 0.01 and 0.5); "
        "give another --workdir"
    )
    assert (folder / "config.json").read_bytes() == before


def test_a_work_directory_that_is_a_file(tmp_path, refused):
    (tmp_path / "run").write_text("mine")
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    assert str(tmp_path / "run") in refused(config, "--workdir", str(tmp_path / "run"))
    assert (tmp_path / "run").read_text() == "mine"


# --- a full disk ---

FULL = OSError(28, "No space left on device")


def test_a_full_disk_while_tokenising(tmp_path, refused, monkeypatch):
    def full(*_):
        raise FULL

    config = runs.script(tmp_path, runs.experiment(tmp_path))
    monkeypatch.setattr("train.extras.tokenizers.tokenizer._bytes", full)
    said = refused(config, "--workdir", str(tmp_path / "run"))
    assert said.startswith("the disk is full (")
    assert said.endswith("free some space, then the same command continues")


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, refused, monkeypatch):
    save = Checkpoints.save

    def full(self, step, *rest):
        if step == 4:
            raise RuntimeError("cannot write") from FULL
        save(self, step, *rest)

    experiment = runs.experiment(tmp_path, checkpoint_every=2)
    config = runs.script(tmp_path, experiment)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full)
        assert "the disk is full" in refused(config, "--workdir", str(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    pretrain.run_experiment(experiment, tmp_path / "run")
    pretrain.run_experiment(experiment, tmp_path / "whole")
    assert runs.log(tmp_path / "run") == runs.log(tmp_path / "whole")


def chained(error: Exception, *causes: Exception) -> Exception:
    for before, cause in zip((error, *causes), causes, strict=False):
        before.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "full"), [
    (FULL, True),
    (OSError(122, "Disk quota exceeded"), True),
    (RuntimeError("RESOURCE_EXHAUSTED: write failed: No space left on device [path=x]"), True),
    (chained(ValueError("save failed"), RuntimeError("commit failed"), FULL), True),
    (OSError(13, "Permission denied"), False),
    (chained(ValueError("save failed"), OSError(2, "No such file")), False),
])  # fmt: skip
def test_a_full_disk_is_recognised_however_it_is_wrapped(error, full):
    assert is_full_disk(error) == full


def test_other_errors_keep_traceback_and_exit_code(capsys):
    def raises(error):
        raise error

    with pytest.raises(ZeroDivisionError):
        exits_cleanly(lambda: raises(ZeroDivisionError))
    with pytest.raises(SystemExit) as stop:
        exits_cleanly(lambda: raises(KeyboardInterrupt))
    assert stop.value.code == 130
    assert capsys.readouterr().err == (
        "stopped by Ctrl-C; the same command continues from the last checkpoint, if there is one\n"
    )


GLOO = "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MemoryError("Unable to allocate 7 TiB"), 2, "this machine has no memory left"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
            2,
            "a text is not UTF-8",
        ),
        (CheckpointError("a tensor is missing"), 2, "a tensor is missing"),
        (PermissionError(13, "Permission denied", "runs"), 2, "runs: permission denied; check"),
        (UserError("one\n  two"), 2, "one two"),
        (Unsupported("attention=cudnn does not support"), 2, "attention=cudnn does not support"),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes\nmore"
            ),
            2,
            "a device has no memory left (RESOURCE_EXHAUSTED: Out of memory",
        ),
        (
            jax.errors.JaxRuntimeError(f"{GLOO}\n and more"),
            75,
            "the processes of this run waited for each other too long, or one of them has ended",
        ),
    ],
)
def test_errors_of_the_input_and_of_the_machine_are_one_line(
    monkeypatch, refused, error, code, says
):
    def broken():
        raise error

    monkeypatch.setattr(pretrain, "main", broken)
    said = refused(code=code)
    assert said.startswith(says) and (code == 2 or said.endswith(f"({GLOO})"))


def test_a_prompt_that_is_not_utf_8(tmp_path, refused, monkeypatch):
    arguments = [str(tmp_path), "--prompt"]
    said = refused(*arguments, b"f\xfcr".decode("utf-8", "surrogateescape"), script=generate)
    assert said == "--prompt 'f\\udcfcr' is not UTF-8; convert it, such as with iconv"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"f\xfcr\n"), "utf-8"))
    assert refused(*arguments, "-", script=generate).startswith(
        "--prompt -: the lines are not UTF-8 ("
    )
