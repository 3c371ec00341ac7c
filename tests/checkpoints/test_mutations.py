"""Damaged files give a result or one message on the command line.

A command never ends with a traceback, leaves files behind or uses much memory.
"""

import functools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from checkpoints import CONFIG, change, saved
from random_changes import changed

from jaxgrow import checkpoints
from jaxgrow.checkpoints import CheckpointError, Loaded
from jaxgrow.cli.program import main
from jaxgrow.extras import preservation
from jaxgrow.models import GPT2Config, from_json

MEMORY = 500_000  # kB that all mutations together may add to the peak


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Skip the computation of models, which takes time and is not tested here."""
    monkeypatch.setattr(preservation, "measure_preservation", lambda *given: "the same")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def refused(capsys, *arguments: object, status: int = 1) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


# --- mutations ---


def several(rng: random.Random, content: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = changed(content, rng)
    return content


def of_numpy(rng: random.Random, content: bytes) -> bytes:
    """Damage the header, which is a Python literal."""
    shapes = f"(-1,) (2,-5) () (8796093022208,) (0,) ({10**30},) 'x' 10 (10.0,)".split()
    dtypes = ["<i8", "<f8", "|O", "<i9", "<U3", "<M8[s]", "", "x" * 200]
    new = content.replace(b"(10,)", rng.choice(shapes).encode(), rng.randrange(2))
    new = new.replace(b"<u2", rng.choice(dtypes).encode(), rng.randrange(2))
    return new if rng.random() < 0.7 else several(rng, new)


def opened(folder: Path, out: Path) -> list[str]:
    return ["convert", str(folder), str(out), "--to", "hf"]


def grown(folder: Path, out: Path) -> list[str]:
    return ["grow", str(folder), str(out), "--method", "stack", "--layers", "5"]


def replaced(folder: Path, out: Path) -> list[str]:
    """The damaged folder is the target."""
    return ["convert", str(folder.with_name("whole")), str(folder), "--to", "hf", "--overwrite"]


def compared(folder: Path, out: Path) -> list[str]:
    whole = str(folder.with_name("whole"))
    (file,) = folder.glob("ids.*")
    return ["report", whole, whole, "--data", str(file)]


def sharded(folder: Path) -> Path:
    return saved(folder, replace(CONFIG, layers=1), shard=4000)


def orbax(folder: Path) -> Path:
    source = checkpoints.open_checkpoint(folder.with_name("whole"))
    checkpoints.write(source, checkpoints.Output(folder, "orbax"))
    return folder


def numpy(folder: Path) -> Path:
    folder.mkdir()
    np.save(folder / "ids.npy", np.arange(10, dtype=np.uint16))
    return folder


# How the data are made, the damaged file, the damage, and the commands that read it.
CASES = {
    "header": (saved, "model.safetensors", several, (opened, grown)),
    "index": (sharded, "model.safetensors.index.json", several, (opened,)),
    "config": (saved, "config.json", several, (opened, grown, replaced)),
    "record": (orbax, "jaxgrow.json", several, (opened, grown, replaced)),
    "numpy": (numpy, "ids.npy", of_numpy, (compared,)),
}


@pytest.mark.parametrize("count", [25, pytest.param(1700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_what_is_damaged_is_read_or_refused_in_one_message(tmp_path, capsys, case, count):
    """The long run has 10,200 mutations: ``pytest -m slow tests/checkpoints/test_mutations.py``."""
    make, name, damage, commands = CASES[case]
    saved(tmp_path / "whole")
    make(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    file = tmp_path / "a" / name
    whole = file.read_bytes()
    ended: list[int] = []
    # Read undamaged data first, so that memory for compiling and importing is not counted below.
    for command in commands:
        assert main(command(tmp_path / "a", tmp_path / f"of_{command.__name__}")) == 0
    again(tmp_path)
    before, seen = peak(), sorted(os.listdir(tmp_path))
    for seed in range(count):
        rng = random.Random(f"{seed}, {case}")
        file.write_bytes(damage(rng, whole))
        command = commands[seed % len(commands)]
        capsys.readouterr()
        status = main(command(tmp_path / "a", tmp_path / "b"))
        said = capsys.readouterr()
        ended.append(status)
        assert status in (0, 1), seed
        if status == 1:
            assert said.err.startswith("error: "), seed
            assert len(said.err) < 20_000, seed
            assert all(c.isprintable() or c == "\n" for c in said.err), seed
            assert sorted(os.listdir(tmp_path)) == seen, seed
        else:
            _strict(tmp_path / "b")
            if command is replaced:
                again(tmp_path)
            elif command is not compared:
                shutil.rmtree(tmp_path / "b")
    assert {0, 1} == set(ended)  # both outcomes occur
    assert peak() - before < MEMORY


def again(home: Path) -> None:
    shutil.rmtree(home / "a")
    shutil.copytree(home / "kept", home / "a")


def _strict(folder: Path) -> None:
    """Assert that the written JSON files have no NaN or infinite numbers."""

    def refuse(text):
        raise AssertionError(f"{text} in {folder}")

    for file in folder.glob("*.json"):
        json.loads(file.read_text(), parse_constant=refuse)


def peak() -> int:
    """Return the peak memory of this process in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- one by one ---


@pytest.mark.parametrize(("values", "message"), [
    ({"architectures": [["GPT2LMHeadModel"]]}, 'architectures is [["GPT2LMHeadModel"]], which is not supported'),
    ({"architectures": [{}]}, "architectures is [{}], which is not supported"),
    ({"layer_norm_epsilon": float("nan")}, "NaN is not a number in JSON"),
    ({"layer_norm_epsilon": float("inf")}, "Infinity is not a number in JSON"),
    ({"their_own": [float("nan")]}, "NaN is not a number in JSON"),
    ({"layer_norm_epsilon": -1e-5}, "eps is -1e-05, but must be at least 0"),
    ({"layer_norm_epsilon": 10**400}, "layer_norm_epsilon is 1000"),
])  # fmt: skip
def test_configs_of_values_that_are_none(tmp_path, capsys, values, message):
    saved(tmp_path / "a")
    change(tmp_path / "a", **values)
    error = refused(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "hf")
    assert message in error
    assert "config.json" in error
    assert error.count("\n") == 1
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), 1e300, 10**400])
def test_no_config_has_an_eps_that_is_none(eps):
    with pytest.raises(ValueError, match=r"eps is .*, but must be at least 0"):
        GPT2Config(eps=eps)


def test_no_json_is_written_with_numbers_that_are_none(tmp_path, folder):
    source = checkpoints.open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"jaxgrow\.json cannot be written"):
        checkpoints.write(source, tmp_path / "b", {"alpha": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("field", "value"), [
    *(("layers", {}), ("layers", 4.0), ("layers", True), ("layers", [[]]), ("vocabulary", 3), ("family", {})),
    *(("eps", {}), ("eps", "1"), ("dtype", {}), ("dtype", "int8"), ("tied", 1), ("tied", {}), ("family", "T5")),
])  # fmt: skip
def test_a_record_of_values_of_another_type(tmp_path, folder, capsys, field, value):
    with pytest.raises(ValueError, match=field if field != "family" else "no model family"):
        from_json(CONFIG.as_json() | {field: value})
    orbax_of(folder, tmp_path / "o")
    record = json.loads((tmp_path / "o/jaxgrow.json").read_text())
    record["config"][field] = value
    (tmp_path / "o/jaxgrow.json").write_text(json.dumps(record))
    assert refused(capsys, "inspect", tmp_path / "o").count("\n") == 1


@pytest.mark.parametrize("field", ["config", "huggingface"])
@pytest.mark.parametrize("value", [3, [], {"architectures": [{}]}])
def test_a_record_whose_parts_are_something_else(tmp_path, folder, capsys, field, value):
    orbax_of(folder, tmp_path / "o")
    file = tmp_path / "o/jaxgrow.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    for command, *more in (("inspect",), ("convert", tmp_path / "b", "--to", "hf")):
        error = refused(capsys, command, tmp_path / "o", *more)
        assert "jaxgrow.json" in error and error.count("\n") == 1


@functools.cache
def orbax_files(folder: Path) -> dict[str, bytes]:
    out = folder.with_name("orbax")
    source = checkpoints.open_checkpoint(folder)
    checkpoints.write(source, checkpoints.Output(out, "orbax"))
    return {str(f.relative_to(out)): f.read_bytes() for f in out.rglob("*") if f.is_file()}


def orbax_of(folder: Path, out: Path) -> None:
    for name, content in orbax_files(folder).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)


@pytest.mark.parametrize(
    ("axis", "method", "size"), [("layers", "stack", 99999999999), ("mlp", "lemon", 10**30)]
)
def test_sizes_that_no_model_has(tmp_path, folder, capsys, axis, method, size):
    words = ("grow", folder, tmp_path / "b", "--method", method, f"--{axis}", size)
    error = refused(capsys, *words, status=2)
    assert f"--{axis} {size}: the maximum is 1,048,576" in error
    assert not list(tmp_path.iterdir())


def test_of_a_thousand_unknown_tensors_at_most_three_are_listed(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    file = saved(tmp_path / "a") / "model.safetensors"
    found = load_file(file)
    del found["transformer.wte.weight"]
    save_file(found | {f"x{i:04}": np.zeros(0, np.float32) for i in range(1000)}, file)
    lines = refused(capsys, "inspect", tmp_path / "a").splitlines()[1:]
    assert lines[0].strip() == "missing: transformer.wte.weight"
    assert [line.split()[1] for line in lines[1:4]] == ["x0000", "x0001", "x0002"]
    assert [line.strip() for line in lines[4:]] == ["and 997 more"]


def test_unknown_leaves_are_twenty_and_how_many_more():
    params = tiny.params(CONFIG) | {f"x{i:04}": np.zeros(1) for i in range(1000)}
    with pytest.raises(CheckpointError, match="and 980 more") as error:
        Loaded(replace(CONFIG, tied=False), params)
    assert "missing: head_kernel" in str(error.value)
    assert str(error.value).count("\n") == 22


def test_a_name_of_a_tensor_does_not_talk_to_the_terminal(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    file = saved(tmp_path / "a") / "model.safetensors"
    save_file(load_file(file) | {"\x1b[2J" + "x" * 5000: np.zeros(0, np.float32)}, file)
    error = refused(capsys, "inspect", tmp_path / "a")
    assert "unknown: \\x1b[2Jxxx" in error
    assert len(error) < 2500


WITHOUT = """
import sys
sys.modules.update(fcntl=None, resource=None)
from jaxgrow.cli.program import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_library_imports_without_unix_only_modules(tmp_path, folder):
    """This simulates Windows."""
    root = str(Path(checkpoints.__file__).parents[2])
    # JAX warns about the lock of its cache
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT]
    command += ["convert", str(folder), str(tmp_path / "b"), "--to", "hf"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "peak memory" not in done.stdout


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a file without an end")
def test_a_file_without_an_end_is_not_read_to_it(folder, capsys):
    assert "/dev/zero is not a regular file" in refused(
        capsys, "report", folder, folder, "--data", "/dev/zero"
    )
