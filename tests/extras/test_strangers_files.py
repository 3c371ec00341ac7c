"""Files of strangers cannot read, write, delete or execute anything that the user did not name.

Each test shows one attack on the library and its control. `test_entrances` runs a table of simple
attacks on every function that opens a file.
"""

import json
import os
import pickle
import stat
import subprocess
import sys
import time
from pathlib import Path

import entrances_library as valid
import numpy as np
import pytest
import tensorstore as ts
from checkpoints import CONFIG, saved
from limits import using_limits

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.checkpoints.io.files import inside
from jaxgrow.cli.program import main
from jaxgrow.extras.hf_peft.peft_settings import PeftSettings
from jaxgrow.untrusted import UntrustedError, checked_tree

DEEP = ("--method", "stack", "--layers", "8")


def failed(capsys, *arguments) -> str:
    """Run the command ``jaxgrow``, which must end with one line, and return the line."""
    assert main(list(map(str, arguments))) == 1
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("[transformers]")]
    assert len(lines) == 1 and lines[0].startswith("error: "), error
    return lines[0]


def trainer(folder: Path, *options) -> tuple:
    return ("grow", folder, folder.parent / "out", *valid._TRAINER, "--optimizer", "copy", *options)


# --- names ---


@pytest.mark.parametrize("other", ["model/lm_head/kernel", "model/lm_head"])
def test_arrays_that_would_be_written_over_each_other_are_an_error(tmp_path, capsys, other):
    valid.easydel("tensorstore_index.json")(tmp_path)
    index = tmp_path / "run" / "tensorstore_index.json"
    content = json.loads(index.read_text())
    content["prefixes"]["all"].append({"path": other})
    index.write_text(json.dumps(content))
    assert "at the same place" in failed(capsys, *trainer(tmp_path / "run"))


def test_links_to_one_file_do_not_make_a_folder_large(tmp_path):
    """The size of a folder limits how much its arrays may declare."""
    (tmp_path / "a").write_bytes(bytes(1000))
    size = checked_tree(tmp_path, tmp_path)
    for i in range(50):
        (tmp_path / f"link{i}").symlink_to("a")
        (tmp_path / f"hard{i}").hardlink_to(tmp_path / "a")
    assert checked_tree(tmp_path, tmp_path) < size + 5000


@pytest.mark.parametrize("target", ["other", "../other"])
def test_a_link_to_a_folder_hides_no_link_out_of_the_checkpoint(tmp_path, target):
    """`checked_tree` does not follow it, but the library that opens the folder would."""
    step = tmp_path / "home" / "step"
    for folder in (step, step.parent / "other", step / "other"):
        folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (step.parent / "other" / "chunk").symlink_to(tmp_path / "secret")
    checked_tree(step, step.parent)
    (step / "array").symlink_to(target)
    with pytest.raises(UntrustedError, match="link to a folder"):
        checked_tree(step, step.parent)
    (step / "array").unlink()
    (step / "other").rename(step / "array")
    checked_tree(step, step.parent)


# --- missing and declared data ---


def test_a_missing_chunk_is_an_error_that_names_it(tmp_path, capsys):
    chunk = valid.easydel("model/lm_head/kernel/0.0")(tmp_path)
    chunk.unlink()
    error = failed(capsys, *trainer(tmp_path / "run"))
    assert "array model/lm_head/kernel" in error and "chunk {0, 0}" in error


def test_a_missing_chunk_in_a_database_is_an_error_that_names_it(tmp_path, capsys):
    valid.levanter("manifest.json")(tmp_path)
    step = tmp_path / "run" / "step-3"
    base = {"driver": "ocdbt", "base": f"file://{step.resolve()}/"}
    store = ts.KvStore.open(base).result()
    chunk = next(key for key in store.list().result() if key.startswith(b"model/lm_head/weight/c/"))
    store.delete_range(ts.KvStore.KeyRange(chunk, chunk + b"\xff")).result()
    error = failed(capsys, *trainer(tmp_path / "run"))
    assert "array model/lm_head/weight" in error and "chunk {0, 0}" in error


def test_a_missing_chunk_of_our_own_format_is_an_error(tmp_path):
    """Orbax itself reads these folders, here without checksums and without a database."""
    valid.run_folder("jaxgrow.json")(tmp_path)
    params = tmp_path / "run" / "params"
    source = open_checkpoint(tmp_path / "run")
    arrays = {path: source.read(path) for path in source.leaves}
    (params / "SHA256SUMS").unlink()
    (metadata,) = params.rglob("_METADATA")
    item = metadata.parent
    content = json.loads(metadata.read_text())
    content["use_ocdbt"] = False
    for path in ("manifest.ocdbt", "d", "ocdbt.process_0"):
        found = item / path
        if found.is_dir():
            for file in sorted(found.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            found.rmdir()
        elif found.exists():
            found.unlink()
    driver = "zarr3" if content.get("use_zarr3") else "zarr"
    for path, x in arrays.items():
        kvstore = {"driver": "file", "path": f"{item.resolve()}/{path.replace('/', '.')}/"}
        spec = {"driver": driver, "kvstore": kvstore}
        ts.open(spec, create=True, shape=x.shape, dtype=x.dtype).result().write(x).result()
    metadata.write_text(json.dumps(content))
    np.testing.assert_array_equal(
        open_checkpoint(tmp_path / "run").read("token_embedding"), arrays["token_embedding"]
    )
    chunk = next(p for p in (item / "token_embedding").rglob("*") if p.name in ("0", "0.0"))
    chunk = next(iter(chunk.rglob("0"))) if chunk.is_dir() else chunk
    chunk.unlink()
    with pytest.raises(CheckpointError, match=r"chunk \{0, 0\}"):
        open_checkpoint(tmp_path / "run").params()


def test_an_array_without_its_declared_data_is_an_error_before_it_is_read(tmp_path, capsys):
    array = valid.easydel("model/lm_head/kernel/.zarray")(tmp_path)
    about = json.loads(array.read_text())
    for key in ("shape", "chunks"):
        array.write_text(json.dumps(about | {key: [1 << 16, 1 << 15]}))
        error = failed(capsys, *trainer(tmp_path / "run"))
        assert "8,589,934,592 bytes; the limit is 1,073,741,824" in error
        assert "--limits bytes=" in error


def database(run: Path) -> ts.KvStore:
    """The database of a folder of ours, without its checksums."""
    (run / "params" / "SHA256SUMS").unlink()
    (manifest,) = [p for p in (run / "params").rglob("manifest.ocdbt") if "process" not in str(p)]
    base = {"driver": "ocdbt", "base": f"file://{manifest.parent.resolve()}/"}
    return ts.KvStore.open(base).result()


@pytest.mark.parametrize("size", [1 << 16, -1], ids=["large", "negative"])
def test_a_chunk_of_our_own_format_has_a_limit(tmp_path, size):
    valid.run_folder("jaxgrow.json")(tmp_path)
    store = database(tmp_path / "run")
    (key,) = [k for k in store.list().result() if k.startswith(b"token_embedding/zarr.json")]
    about = json.loads(store.read(key).result().value)
    about["chunk_grid"]["configuration"]["chunk_shape"] = [size, 1 << 14]
    about["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    store.write(key, json.dumps(about).encode()).result()
    says = "a chunk of shape" if size > 0 else "an array cannot be opened"
    with pytest.raises((CheckpointError, UntrustedError), match=says):
        open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA"])
def test_metadata_of_our_own_format_have_a_limit(tmp_path, name):
    valid.run_folder("jaxgrow.json")(tmp_path)
    (tmp_path / "run" / "params" / "SHA256SUMS").unlink()
    os.truncate(next((tmp_path / "run" / "params").rglob(name)), 1 << 40)
    with pytest.raises(UntrustedError, match="at most 104,857,600 are read"):
        open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_head", "n_inner", "vocab_size"])
def test_a_config_larger_than_its_weights_is_an_error_at_once(tmp_path, key):
    folder = saved(tmp_path / "a")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {key: 10**9}))
    began = time.process_time()
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("key", ["layers", "head_dim", "embed", "mlp", "vocab"])
def test_a_record_larger_than_its_weights_is_an_error_at_once(tmp_path, key):
    record = valid.run_folder("jaxgrow.json")(tmp_path)
    content = json.loads(record.read_text())
    content["config"][key] = 10**9
    record.write_text(json.dumps(content))
    message = f"jaxgrow.json has {key} 1000000000, but the weights"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "run")


# --- links and permissions ---


def test_links_beside_a_run_are_not_followed(tmp_path, capsys):
    valid.easydel("tensorstore_index.json")(tmp_path)
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE KEY")
    secret.chmod(0o600)
    beside = tmp_path / "run" / "beside"
    (beside / "key").symlink_to(secret)
    (beside / "folder").symlink_to(tmp_path)
    (beside / "again").symlink_to(beside)
    (beside / "above").symlink_to("..")
    (beside / "same").symlink_to("notes.txt")
    assert main(list(map(str, trainer(tmp_path / "run")))) == 0
    out = capsys.readouterr().out
    assert "note: not copied, because they are links" in out
    assert all(f"beside/{name}" in out for name in ("key", "folder", "again", "above"))
    assert sorted(os.listdir(tmp_path / "out" / "beside")) == ["notes.txt", "same"]
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def modes(folder: Path) -> dict[str, str]:
    every = [folder, *folder.rglob("*")]
    return {p.name: f"{stat.S_IMODE(p.stat().st_mode):o}" for p in every}


def test_data_of_a_database_under_another_name_are_no_link_out_of_the_folder(tmp_path, capsys):
    valid.levanter("manifest.json")(tmp_path)
    step = tmp_path / "run" / "step-3"
    base = {"driver": "ocdbt", "base": f"file://{step.resolve()}/"}
    names = ("value_data_prefix", "btree_node_data_prefix", "version_tree_node_data_prefix")
    store = ts.KvStore.open({**base, **dict.fromkeys(names, "other/")}).result()
    for key in store.list().result():
        store.write(key, store.read(key).result().value).result()
    (step / "other").rename(tmp_path / "elsewhere")
    (step / "other").symlink_to(tmp_path / "elsewhere")
    assert "outside the folder" in failed(capsys, *trainer(tmp_path / "run"))


@pytest.mark.parametrize("link", ["snapshots/one", "snapshots"])
def test_a_snapshot_is_not_a_link_out_of_the_cache(tmp_path, capsys, link):
    saved(tmp_path / "private" / "one")
    target = tmp_path / "private" / link.removeprefix("snapshots").strip("/")
    (tmp_path / "models--x" / link).parent.mkdir(parents=True)
    (tmp_path / "models--x" / link).symlink_to(target)
    error = failed(capsys, "grow", tmp_path / "models--x", tmp_path / "out", *DEEP)
    assert "outside the folder" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_a_new_folder_is_no_more_open_than_its_source(tmp_path, to):
    folder = saved(tmp_path / "a")
    for file in folder.iterdir():
        file.chmod(0o640)
    (folder / "model.safetensors").chmod(0o400)
    folder.chmod(0o700)
    assert main(["grow", str(folder), str(tmp_path / "b"), *DEEP, "--to", to]) == 0
    found = modes(tmp_path / "b")
    assert found["b"] == "700"
    assert found["tokenizer.json"] == "640"
    if to == "hf":
        assert found["model.safetensors"] == "600" and found["config.json"] == "640"
    assert not any(int(mode, 8) & 0o037 for mode in found.values())


def test_a_replaced_folder_does_not_become_more_open(tmp_path):
    folder = saved(tmp_path / "a")
    assert main(["grow", str(folder), str(tmp_path / "b"), *DEEP]) == 0
    assert modes(tmp_path / "b")["b"] == modes(folder)["a"]  # the control
    (tmp_path / "b" / "model.safetensors").chmod(0o600)
    (tmp_path / "b").chmod(0o700)
    assert main(["grow", str(folder), str(tmp_path / "b"), *DEEP, "--overwrite"]) == 0
    found = modes(tmp_path / "b")
    assert (found["b"], found["model.safetensors"]) == ("700", "600")
    assert found["config.json"] == modes(folder)["config.json"]


# --- code ---


class Exploit:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def doubled(levels: int) -> tuple:
    """A tuple that contains itself twice at each level, so that hashing and printing never end."""
    value: tuple = (1,)
    for _ in range(levels):
        value = (value, value)
    return value


class Hashed(dict):
    """A dict with one key, which the process that pickles it need not hash."""

    def __init__(self, key=None):
        super().__init__()
        self.key = key

    def __reduce__(self):
        return dict, (), None, None, iter([(self.key, 1)])


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("as_key", [False, True], ids=["printed", "hashed"])
def test_values_that_never_end_in_a_pickle_are_an_error(tmp_path, capsys, as_key):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    value = Hashed(doubled(60)) if as_key else doubled(60)
    metadata = valid.titan(".metadata")(tmp_path)
    with using_limits(seconds=1, bytes=200 << 20):
        metadata.write_bytes(pickle.dumps(value))
        assert "metadata" in failed(capsys, "inspect", tmp_path / "run")
        file = valid.trained("optimizer.pt")(tmp_path / "trained")
        torch.save({"state": {}, "param_groups": value}, file)
        to = ("grow", file.parent, tmp_path / "out", *DEEP, "--optimizer", "copy")
        assert "optimizer.pt" in failed(capsys, *to)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
def test_entries_that_are_no_tensors_are_copied_unread(tmp_path):
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    valid.titan(".metadata")(tmp_path)
    folder = tmp_path / "run" / "step-3"
    content = {
        key: torch.empty(about.size) if hasattr(about, "size") else None
        for key, about in checkpoint.FileSystemReader(folder)
        .read_metadata()
        .state_dict_metadata.items()
    }
    checkpoint.load(content, checkpoint_id=folder, no_dist=True)
    content["dataloader"] = Exploit(tmp_path / "mark")
    checkpoint.save(content, checkpoint_id=folder, no_dist=True)
    assert main(list(map(str, trainer(tmp_path / "run")))) == 0
    assert not (tmp_path / "mark").exists()
    # The control: the copy still has the pickle.
    copied = {"train_state.step": None, "dataloader": None}
    checkpoint.load(copied, checkpoint_id=tmp_path / "out" / "step-3", no_dist=True)
    assert copied["train_state.step"] == 3 and (tmp_path / "mark").is_dir()


@pytest.mark.interop
@pytest.mark.parametrize("kind", ["sparse", "complex", "nan", "integers", "negative"])
def test_moments_that_are_no_real_numbers_are_an_error(tmp_path, capsys, kind):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    file = valid.trained("optimizer.pt")(tmp_path)
    content = torch.load(file, weights_only=True)
    entry = content["state"][0]
    change = {
        "sparse": lambda x: x.to_sparse(),
        "complex": lambda x: x.to(torch.complex64),
        "nan": lambda x: x * float("nan"),
        "integers": lambda x: x.to(torch.int32),
        "negative": lambda x: -x.abs() - 1,
    }[kind]
    entry["exp_avg_sq"] = change(entry["exp_avg_sq"])
    torch.save(content, file)
    policy = "exact" if kind == "negative" else "copy"
    error = failed(
        capsys, "grow", tmp_path / "model", tmp_path / "out", *DEEP, "--optimizer", policy
    )
    assert "Grow the model without its optimizer" in error
    assert not (tmp_path / "out").exists()


# --- time ---


def lora_settings(folder: Path, **settings) -> PeftSettings:
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["c_attn"]}
    (folder / "adapter_config.json").write_text(json.dumps(about | settings))
    return PeftSettings(inside(folder, "adapter_config.json"))


@pytest.mark.parametrize("settings", [
    {"target_modules": r"(.*)*(.*)*(.*)*\Zx"},
    {"exclude_modules": r"((a|b|[^x])+)+x$"},
    {"rank_pattern": {r"([^q]+)+x": 1}},
    {"layers_pattern": r"(?:[^q]+)+x", "layers_to_transform": [0]},
], ids=lambda settings: next(iter(settings)))  # fmt: skip
def test_an_expression_that_never_ends_is_an_error(tmp_path, settings):
    found = lora_settings(tmp_path, **settings)
    name = "model.layers.0." + "a" * 60
    with using_limits(seconds=1), pytest.raises(UntrustedError, match=r"more than 1 s.*--limits"):
        _ = found.targets(name), found.rank(name)


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save", "rank_pattern"])
def test_many_settings_for_many_modules_have_a_limit(tmp_path, key):
    names = [f"module{i}" for i in range(2000)]
    found = lora_settings(
        tmp_path, **{key: names if key != "rank_pattern" else dict.fromkeys(names, 1)}
    )
    modules = [f"model.layers.{i}.c_attn" for i in range(100)]
    found.learn(modules)
    found = PeftSettings(found.file)
    with using_limits(entries=10_000), pytest.raises(UntrustedError, match="--limits entries="):
        found.learn(modules)


def test_expressions_select_the_same_modules_as_pefts(tmp_path):
    modules = [f"model.h.{i}.attn.c_{name}" for i in range(12) for name in ("attn", "proj")]

    def targets(**settings) -> list[str]:
        found = lora_settings(tmp_path, **settings)
        found.learn(modules)
        return [name for name in modules if found.targets(name)]

    assert targets(target_modules=r".*\.c_attn") == modules[::2]
    assert targets(target_modules=r".*h\.1\..*|model\.h\.2\.attn\.c_proj") == [
        *modules[2:4],
        modules[5],
    ]
    assert targets(target_modules=r"(?i)MODEL\.H\.3\.ATTN\.C_ATTN") == [modules[6]]
    assert targets(target_modules="all-linear") == modules
    assert targets(layers_to_transform=[11]) == [modules[22]]
    assert targets(layers_to_transform=[1], layers_pattern="h") == [modules[2]]
    assert (
        targets(target_modules=r"model\.h\.(0|1)\.attn.*", exclude_modules=["c_proj"])
        == modules[:4:2]
    )
    ranks = lora_settings(tmp_path, rank_pattern={r"h\.[01]\.attn\.c_attn": 7, "c_proj": 5})
    assert [ranks.rank(name) for name in modules[:6]] == [7, 5, 7, 5, 2, 5]


def test_a_tokenizer_that_needs_too_much_memory_is_an_error(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    file = valid.with_data("model/tokenizer.json")(tmp_path)
    content = json.loads(file.read_text())
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * 12}
    file.write_text(json.dumps(content))
    model = tmp_path / "model"
    error = failed(capsys, "report", model, model, "--data", tmp_path / "text.txt")
    assert "is not a valid tokenizer" in error and "--limits" in error


# --- terminals ---


def test_names_in_files_cannot_control_the_terminal(tmp_path, capsys):
    escape = "\x1b]0;owned\x07"
    folder = saved(tmp_path / f"a{escape}")
    assert main(["grow", str(folder), str(tmp_path / "b"), *DEEP]) == 0
    assert main(["inspect", str(folder)]) == 0
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"architectures": [escape]}))
    assert main(["inspect", str(folder)]) == 1
    found = capsys.readouterr()
    assert "\x1b" not in found.out + found.err and r"\x1b]0;owned" in found.out + found.err


def test_warnings_and_logs_about_files_cannot_control_the_terminal(tmp_path):
    """Libraries warn about names in files."""
    code = "import logging, sys, warnings; from jaxgrow.cli import program; from jaxgrow.extras.commands import completion\n"
    code += "def run(a): warnings.warn(chr(27)); logging.getLogger('x').error('%s', chr(27))\n"
    code += "completion.run_completion = run; program.main(['completion', 'bash'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.count(r"\x1b") == 2 and "\x1b" not in ran.stderr


@pytest.mark.parametrize("size", [600, 4000])
def test_a_disk_that_takes_no_more_is_one_line(tmp_path, size):
    """Orbax and TensorStore write in threads of their own, which report errors as well."""
    saved(tmp_path / "a")
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    code += "import sys; from jaxgrow.cli.program import main; sys.exit(main(sys.argv[1:]))"
    command = ["grow", "a", "b", *DEEP, "--to", "orbax"]
    # Without -B, Python would write sources that it compiles only up to the limit, for all later runs.
    python = [sys.executable, "-B", "-c", code]
    ran = subprocess.run([*python, *command], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.startswith("error: "), ran.stderr
    assert ran.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_limits_of_the_command_apply(tmp_path, capsys):
    folder = saved(tmp_path / "a")
    assert CONFIG.layers == 4
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(folder), "--limits", "bytes=many"])
    assert ended.value.code == 2
    assert "the names are bytes" in capsys.readouterr().err
    with using_limits(seconds=10):  # which restores the limits
        assert main(["inspect", str(folder), "--limits", "seconds=60,bytes=8e9"]) == 0
