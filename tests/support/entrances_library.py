"""The entrances of `jaxgrow/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny
from checkpoints import CONFIG, lora_folder, saved
from entrances import ATTACKS as ALL
from entrances import Row, Subject, attacked, largest, ours
from foreign_runs import (
    D,
    drawn,
    easydel_run,
    levanter_params,
    levanter_step,
    maxtext_params,
    titan_shapes,
)
from orbax.checkpoint import v1 as ocp

from jaxgrow import checkpoints
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.checkpoints.io.checksums import seal
from jaxgrow.cli.program import main
from jaxgrow.extras.commands import scores
from jaxgrow.models import ViTConfig

_DEEP = ("--method", "stack", "--layers", "8")


def command(*arguments: Any) -> None:
    """Run the command ``jaxgrow``, which prints an error as one line."""
    if main(list(map(str, arguments))) != 0:
        raise CheckpointError("jaxgrow printed an error")


def grow(folder: Path, *options: Any) -> None:
    command("grow", folder, folder.parent / "out", *_DEEP, *options)


def edited(name: str, change: Callable[[Any, str], None]) -> Callable[[Path, str], None]:
    """A function that changes the JSON file ``name`` of a folder with a given name."""

    def write(folder: Path, value: str) -> None:
        file = folder / name
        content = json.loads(file.read_text())
        change(content, value)
        file.write_text(json.dumps(content))

    return write


# --- models ---


def model(name: str, **options: Any) -> Callable[[Path], Path]:
    """Make a Hugging Face folder with files beside the weights, of which one is attacked."""

    def make(folder: Path) -> Path:
        saved(folder / "model", **options)
        (folder / "model" / "jaxgrow.json").write_text('{"operator": "save", "version": "0"}')
        (folder / "model" / "additional_chat_templates").mkdir()
        (folder / "model" / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
        return min((folder / "model").glob(name))

    return make


def card(folder: Path) -> Path:
    """Make a model with a model card."""
    file = model("config.json")(folder).with_name("README.md")
    file.write_text("---\nlicense: mit\n---\n")
    return file


def _in_every_shard(content: Any, value: str) -> None:
    content["weight_map"] = dict.fromkeys(content["weight_map"], value)


def snapshot(folder: Path) -> Path:
    """Make a model in the layout of the cache of Hugging Face, with two snapshots."""
    for name in ("one", "two"):
        saved(folder / "models--x" / "snapshots" / name)
    main = folder / "models--x" / "refs" / "main"
    main.parent.mkdir()
    main.write_text("one")
    return main


def run_folder(name: str) -> Callable[[Path], Path]:
    """Make an Orbax folder, as a finished run writes it."""

    def make(folder: Path) -> Path:
        source = open_checkpoint(saved(folder / "hf"))
        checkpoints.write(source, checkpoints.Output(folder / "run", "orbax"))
        return largest(folder / "run", name)

    return make


def unfinished_run(name: str) -> Callable[[Path], Path]:
    """Make the folder of a run that has saved a checkpoint."""

    def make(folder: Path) -> Path:
        run = folder / "run"
        run.mkdir()
        about = {"name": "x", "model": CONFIG.as_json(), "data": {}}
        (run / "config.json").write_text(json.dumps(about))
        params = jax.tree.map(jax.numpy.asarray, tiny.params(CONFIG, 0, np.float32))
        record = {"step": 3, "ledger": {"phases": [{"model": "large", "phase": "train"}]}}
        with ocp.training.Checkpointer(run / "checkpoints") as written:
            tree = {"models": {"large": {"params": params}}}
            written.save_checkpointables(3, tree, custom_metadata=record)
        seal(run / "checkpoints" / "3")
        (run / "transformers").mkdir()
        (run / "transformers" / "config.json").write_text('{"eos_token_id": 1}')
        (run / "transformers" / "tokenizer.json").write_text("{}")
        return largest(run, name)

    return make


def read_unfinished(folder: Path) -> None:
    open_checkpoint(folder / "run").params()


def write_unfinished(folder: Path) -> None:
    command("convert", folder / "run", folder.parent / "out")


def read_run(folder: Path) -> None:
    source = open_checkpoint(folder / "run")
    source.params()
    source.fingerprint()
    command("convert", folder / "run", folder.parent / "out", "--dtype", "bfloat16")


def overwritten(name: str) -> Callable[[Path], Path]:
    """Make a model, and another one that it replaces."""

    def make(folder: Path) -> Path:
        saved(folder / "model")
        source = open_checkpoint(folder / "model")
        checkpoints.write(source, folder / "old")
        return folder / "old" / name

    return make


def overwritten_download(folder: Path) -> Path:
    overwritten("config.json")(folder)
    (folder / "old" / "jaxgrow.json").unlink()
    (folder / "old" / "tokenizer.json").unlink()
    return folder / "old" / "config.json"


def replace_old(folder: Path) -> None:
    command("grow", folder / "model", folder / "old", *_DEEP, "--overwrite")


def unfinished(folder: Path) -> Path:
    """Make the remains of a process that was killed while it wrote ``out``."""
    saved(folder / "model")
    work = folder / ".jaxgrow-0123456789abcdef"
    work.mkdir()
    (work / "lock").write_text("")
    (work / "about.json").write_text('{"target": "new", "host": "another", "pid": 1}')
    return work / "about.json"


# --- adapters ---


def with_lora(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        saved(folder / "model")
        return lora_folder(folder / "lora") / name

    return make


def grow_lora(folder: Path) -> None:
    grow(folder / "model", "--lora", folder / "lora")


# --- inputs of models ---


def with_data(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        from tokenizers import Tokenizer, models

        saved(folder / "model")
        vocab = {c: i for i, c in enumerate("abcdefghijk")}
        Tokenizer(models.BPE(vocab, [])).save(str(folder / "model" / "tokenizer.json"))
        (folder / "text.txt").write_text("abcabcabc" * 9)
        np.save(folder / "ids.npy", np.arange(64) % 11)
        return folder / name

    return make


def two_tokenizers(folder: Path) -> Path:
    for name, first in (("model", "a"), ("other", "z")):
        saved(folder / name)
        vocab = {c: i for i, c in enumerate(f"{first}bcdefghijk")}
        (folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return folder / "other" / "tokenizer.json"


def report(name: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        command("report", folder / "model", folder / "model", "--data", folder / name)

    return use


def images(folder: Path) -> Path:
    sizes = dict(image=4, patch=2, channels=3, layers=1, embed=6, heads=2, head_dim=3, mlp=8)
    config = ViTConfig(**sizes, classes=3)
    model = checkpoints.Loaded(config, tiny.params(config, 0, np.float32))
    checkpoints.write(model, checkpoints.Output(folder / "model", "orbax"))
    np.save(folder / "images.npy", np.zeros((2, *config.example.shape[1:]), np.float32))
    return folder / "images.npy"


def changed_tokens(name: str) -> Callable[[Path], Path]:
    """Make a model, and the files of the commands that change its vocabulary or its sizes."""

    def make(folder: Path) -> Path:
        source = open_checkpoint(saved(folder / "model"))
        (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 1}')
        (folder / "like.json").write_text('{"a": [1, 2]}')
        (folder / "keep.json").write_text('{"keep": [0, 1, 2]}')
        ones = {n: np.ones(s, np.float32) for n, s in scores.expected_scores(source).items()}
        scores.save_scores(folder / "importance.safetensors", source, lambda: ones)
        return folder / name

    return make


def change_tokens(word: str, *options: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        given = [option.format(folder) for option in options]
        command(word, folder / "model", folder.parent / "out", *given)

    return use


# --- checkpoints of other trainers ---

_TRAINER = ("--method", "hypercloning", "--embed", "16", "--heads", "8", "--kv-heads", "4")
_TRAINER += ("--mlp", "20", "--head-dim", str(D))


def grow_trainer(folder: Path) -> None:
    command("inspect", folder / "run", "--head-dim", D)
    command("grow", folder / "run", folder.parent / "out", *_TRAINER, "--optimizer", "copy")


def easydel(name: str) -> Callable[[Path], Path]:
    """Make a checkpoint of EasyDeL, and another file in its folder."""

    def make(folder: Path) -> Path:
        run = easydel_run(folder / "run")
        (run / "beside").mkdir()
        (run / "beside" / "notes.txt").write_text("notes")
        return run / name

    return make


def _first_entry(content: Any, value: str) -> None:
    next(iter(content["prefixes"].values()))[0]["path"] = value


def levanter(name: str) -> Callable[[Path], Path]:
    """Make a checkpoint of levanter."""

    def make(folder: Path) -> Path:
        arrays = {f"model/{path}": x for path, x in levanter_params().items()}
        step = levanter_step(folder / "run" / "step-3", arrays)
        # Each array was written by one transaction, so only the newest nodes are read.
        return max(step.glob(name), key=lambda p: p.stat().st_mtime_ns)

    return make


def maxtext(name: str) -> Callable[[Path], Path]:
    """Make a checkpoint of MaxText with Orbax's own writer."""

    def make(folder: Path) -> Path:
        with ocp.training.Checkpointer(folder / "run") as written:
            tree = {"params": maxtext_params(1), "step": jax.numpy.int32(3)}
            written.save_checkpointables(3, {"items": tree})
        (folder / "names.json").write_text(json.dumps({"names": _NAMES}))
        return largest(folder, name)

    return make


_NAMES = {
    "token_embedder/embedding": ["vocab", "embed"],
    "decoder/decoder_norm/scale": ["embed"],
    "decoder/logits_dense/kernel": ["embed.in", "vocab"],
    "*/scale": ["embed", "layers"],
    "*/query/kernel": ["embed.in", "layers", "heads", "head_dim"],
    "*/key/kernel": ["embed.in", "layers", "kv_heads", "head_dim"],
    "*/value/kernel": ["embed.in", "layers", "kv_heads", "head_dim"],
    "*/out/kernel": ["heads.in", "layers", "head_dim.in", "embed"],
    "*/wi_?/kernel": ["embed.in", "layers", "mlp"],
    "*/wo/kernel": ["mlp.in", "layers", "embed"],
}


def use_names(folder: Path) -> None:
    given = ("--names", folder / "names.json")
    command("inspect", folder / "run", *given)
    command("grow", folder / "run", folder.parent / "out", *_TRAINER, *given)


def _first_key(content: Any, value: str) -> None:
    entry = next(iter(content["tree_metadata"].values()))
    entry["key_metadata"] = [{"key": value, "key_type": 2}]


def grow_maxtext(folder: Path) -> None:
    command("inspect", folder / "run")
    command("grow", folder / "run", folder.parent / "out", *_TRAINER[:-2])


# --- PyTorch ---


def titan(name: str) -> Callable[[Path], Path]:
    """Make a checkpoint of torchtitan."""

    def make(folder: Path) -> Path:
        import torch
        from torch.distributed import checkpoint

        content: dict[str, Any] = {"train_state.step": 3}
        for path, shape in titan_shapes().items():
            content[path.replace("/", ".")] = torch.from_numpy(drawn(*shape))
        step = folder / "run" / "step-3"
        checkpoint.save(content, checkpoint_id=step, no_dist=True)
        return next(step.glob(name))

    return make


def _relative_path(folder: Path, value: str) -> None:
    file = folder / "run" / "step-3" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_data = {
        key: replace(place, relative_path=value) for key, place in metadata.storage_data.items()
    }
    file.write_bytes(pickle.dumps(metadata))


def trained(name: str) -> Callable[[Path], Path]:
    """Make a model with the optimizer state of PyTorch and the files beside it."""

    def make(folder: Path) -> Path:
        import torch
        from safetensors.numpy import save_file

        from jaxgrow.extras.integrations import torch_optimizer

        model = folder / "model"
        saved(model)
        source: Any = open_checkpoint(model)
        (group,) = torch_optimizer.parameter_groups(source, 1)
        state = {
            i: {
                "step": torch.tensor(3.0),
                "exp_avg": torch.from_numpy(drawn(*source.tensors[n].shape)),
                "exp_avg_sq": torch.from_numpy(drawn(*source.tensors[n].shape) ** 2),
            }
            for i, n in enumerate(group)
        }
        groups = [{"lr": 1e-3, "params": list(range(len(group)))}]
        if name.endswith("safetensors"):
            moments = {
                f"state.{n}.exp_avg": state[i]["exp_avg"].numpy() for i, n in enumerate(group)
            }
            save_file(moments, model / "optimizer.safetensors")
        else:
            torch.save({"state": state, "param_groups": groups}, model / "optimizer.pt")
        (model / "trainer_state.json").write_text('{"global_step": 3}')
        return model / name

    return make


def grow_trained(folder: Path) -> None:
    grow(folder / "model", "--optimizer", "copy")


# --- the table ---

_NAMED = {"link of the parent": "the user named this folder"}
_COPIED = {
    attack: "the file is copied without being read"
    for attack in ("truncated", "wrong type", "nested", "pickle")
}
_OPTIONAL = {
    "missing": "the file is optional",
    "too large": "large files are not read, and above a limit not copied",
    "loop": "a link without a target is not copied",
    "FIFO": "a FIFO is not copied",
}
_BESIDE = _COPIED | _OPTIONAL | {"link": "a link that leads out is left out, with a note"}
_BESIDE |= {"link of the parent": "a link that leads out is left out, with a note"}

_CHOSEN = _NAMED | {"link": "the user named the link"}
_LONGER = {"too large": "bytes behind the content are not read"}
_METADATA = "run/3/items/_METADATA"

SUBJECTS: dict[str, Subject] = {
    "config": Subject(model("config.json"), lambda f: grow(f / "model"), skips=_NAMED),
    "record": Subject(model("jaxgrow.json"), lambda f: grow(f / "model"), harmless={"missing": _OPTIONAL["missing"]},
        skips=_NAMED | {"loop": "a record that is no file is no record", "FIFO": "the same"}),
    "weights": Subject(model("model.safetensors"), lambda f: grow(f / "model"), skips=_NAMED),
    "index": Subject(model("*.index.json", shard=2000), lambda f: grow(f / "model"),
        named=edited("model/model.safetensors.index.json", _in_every_shard), skips=_NAMED),
    "shard": Subject(model("model-*.safetensors", shard=2000), lambda f: grow(f / "model"), skips=_NAMED),
    "tokenizer beside": Subject(model("tokenizer.json"), lambda f: grow(f / "model"), harmless=_COPIED | _OPTIONAL,
        skips=_NAMED),
    "model card": Subject(card, lambda f: grow(f / "model"), harmless=_COPIED | _OPTIONAL, skips=_NAMED),
    "template": Subject(model("additional_chat_templates/*"), lambda f: grow(f / "model"), harmless=_COPIED | _OPTIONAL),
    "snapshot": Subject(snapshot, lambda f: command("inspect", f / "models--x"),
        skips={"truncated": "the name is one word", "loop": "no link is needed",
        "FIFO": "the same"} | {"missing": "the only snapshot is used"} | _NAMED),
    "run record": Subject(run_folder("jaxgrow.json"), read_run, skips=_NAMED),
    "run in the shell": Subject(run_folder("jaxgrow.json"), lambda f: command("inspect", f / "run"), skips=_NAMED),
    "run metadata": Subject(run_folder("params/**/_METADATA"), read_run),
    "run data": Subject(run_folder("params/**/d/*"), read_run),
    "run checksums": Subject(run_folder("params/SHA256SUMS"), read_run,
        harmless={"missing": "older versions wrote no checksums"}),
    "unfinished run": Subject(unfinished_run("config.json"), read_unfinished, skips=_NAMED),
    "run for transformers": Subject(unfinished_run("transformers/config.json"), write_unfinished, skips=_NAMED),
    "tokenizer of a run": Subject(unfinished_run("transformers/tokenizer.json"), write_unfinished,
        harmless=_COPIED | _OPTIONAL, skips=_NAMED),
    "unfinished data": Subject(unfinished_run("checkpoints/3/models/**/d/*"), read_unfinished),
    "replaced record": Subject(overwritten("jaxgrow.json"), replace_old,
        harmless=dict.fromkeys(("missing", "link", "truncated", "wrong type", "nested", "pickle", "too large"),
        "without a record, it is still a checkpoint of Hugging Face"), skips=_NAMED),
    "replaced config": Subject(overwritten_download, replace_old, skips=_NAMED),
    "unfinished": Subject(unfinished, lambda f: command("grow", f / "model", f / "new", *_DEEP),
        harmless=dict.fromkeys(ALL, "a folder that is not ours is left alone")),
    "LoRA config": Subject(with_lora("adapter_config.json"), grow_lora, skips=_NAMED),
    "LoRA weights": Subject(with_lora("adapter_model.safetensors"), grow_lora, skips=_NAMED),
    "tokenizer": Subject(with_data("model/tokenizer.json"), report("text.txt"), skips=_NAMED),
    "another tokenizer": Subject(two_tokenizers, lambda f: command("report", f / "model", f / "other"),
        harmless=dict.fromkeys(ALL, "without a tokenizer there is no note"), skips=_NAMED),
    "text": Subject(with_data("text.txt"), report("text.txt"),
        harmless=dict.fromkeys(("truncated", "wrong type", "nested", "pickle", "too large"), "every file is a text"),
        skips=_CHOSEN),
    "ids": Subject(with_data("ids.npy"), report("ids.npy"), skips=_CHOSEN, harmless=_LONGER),
    "scores": Subject(changed_tokens("importance.safetensors"),
        change_tokens("prune", "--mlp", "8", "--scores", "{}/importance.safetensors"), skips=_CHOSEN),
    "kept tokens": Subject(changed_tokens("keep.json"), change_tokens("prune", "--vocab", "{}/keep.json"), skips=_CHOSEN),
    "similar tokens": Subject(changed_tokens("like.json"), change_tokens("grow", "--like-tokens", "{}/like.json"),
        skips=_CHOSEN),
    "generation settings": Subject(changed_tokens("model/generation_config.json"), change_tokens("prune", "--vocab", "3"),
        harmless={"missing": "the file is optional"}, skips=_NAMED),
    "images": Subject(images, report("images.npy"), skips=_CHOSEN, harmless=_LONGER),
    "EasyDeL index": Subject(easydel("tensorstore_index.json"), grow_trainer,
        named=edited("run/tensorstore_index.json", _first_entry), skips=_NAMED),
    "EasyDeL chunk": Subject(easydel("model/lm_head/kernel/0.0"), grow_trainer),
    "EasyDeL array": Subject(easydel("model/lm_head/kernel/.zarray"), grow_trainer),
    "EasyDeL beside": Subject(easydel("beside/notes.txt"), grow_trainer, harmless=_BESIDE),
    "levanter database": Subject(levanter("manifest.ocdbt"), grow_trainer),
    "levanter data": Subject(levanter("d/*"), grow_trainer, harmless=_LONGER),
    "levanter manifest": Subject(levanter("manifest.json"), grow_trainer,
        harmless={"missing": "older versions wrote no manifest"}),
    "Orbax metadata": Subject(maxtext("run/*/items/_METADATA"), grow_maxtext,
        named=lambda f, value: edited(_METADATA, _first_key)(f, value)),
    "Orbax data": Subject(maxtext("run/*/items/**/d/*"), grow_maxtext, harmless=_LONGER),
    "Orbax array metadata": Subject(maxtext("run/*/items/array_metadatas/*"), grow_maxtext,
        harmless={"missing": "older versions wrote no such file"}),
    "Orbax sharding": Subject(maxtext("run/*/items/_sharding"), grow_maxtext,
        harmless={"missing": "older versions wrote no such file"}),
    "names": Subject(maxtext("names.json"), use_names, skips=_CHOSEN),
    "DCP metadata": Subject(titan(".metadata"), grow_trainer, named=_relative_path, needs="torch"),
    "DCP data": Subject(titan("*.distcp"), grow_trainer, harmless=_LONGER, needs="torch"),
    "optimizer": Subject(trained("optimizer.pt"), grow_trained, skips=_NAMED, needs="transformers"),
    "optimizer tensors": Subject(trained("optimizer.safetensors"), grow_trained, skips=_NAMED, needs="transformers"),
    "trainer state": Subject(trained("trainer_state.json"), grow_trained, harmless=_BESIDE, skips=_NAMED, needs="transformers"),
}  # fmt: skip

_NEW = "it writes into the new folder, which this process made, or checks what it wrote there"
_WORK = "the work folder has a random name and mode 0700, and this process made it"
_CALLER = "it gets a checked path; its callers are attacked"

ROWS: dict[str, dict[str, Row]] = {
    "jaxgrow/checkpoints/writing.py": {"_history": attacked("record"),
        "write": attacked("tokenizer beside", "template", "tokenizer of a run")},
    "jaxgrow/checkpoints/opening.py": {"_is_huggingface": attacked("config")},
    "jaxgrow/extras/hub_cache.py": {"find_snapshot": attacked("snapshot")},
    "jaxgrow/extras/hf_peft/reading.py": {"read_peft": attacked("LoRA config", "LoRA weights")},
    "jaxgrow/extras/hf_peft/peft_settings.py": {"PeftSettings.__init__": attacked("LoRA config")},
    "jaxgrow/checkpoints/hf/storage.py": {"HuggingFace.__init__": attacked("config")},
    "jaxgrow/checkpoints/io/checksums.py": {"damage": attacked("run checksums"), "seal": ours(_NEW),
        "sha256": attacked("run data")},
    "jaxgrow/checkpoints/io/files.py": {"files_to_copy": attacked("tokenizer beside", "template"),
        "inside": attacked("config", "index"), "read_json": attacked("config", "index", "names"),
        "write_json": ours(_NEW)},
    "jaxgrow/checkpoints/io/folders.py": {"lock_file _place _remove _locked": ours(_WORK),
        "atomic_file": ours("a new file with a random name"), "_no_others": attacked("unfinished"),
        "_to_sync sync_folder": ours(_NEW)},
    "jaxgrow/extras/other_content.py": {"_hugging_face": attacked("replaced config"), "_record": attacked("replaced record")},
    "jaxgrow/checkpoints/io/safetensors.py": {"Tensor._at": attacked("weights", "shard"),
        "read_header": attacked("weights", "shard", "scores"), "indexed_files": attacked("index", "shard"),
        "read_tensors": attacked("weights", "index", "shard"), "write_file": ours(_NEW)},
    "jaxgrow/checkpoints/orbax.py": {"Orbax.__init__": attacked("run record", "run metadata"),
        "Orbax._handed_over": attacked("run for transformers"), "Orbax._stored": attacked("run data"),
        "_delete_unfinished": ours("it deletes only folders with the prefix and the token of an export, no links"),
        "_move_export": ours("it moves what this process wrote and sealed"),
        "export_model": ours("it writes into the folder of a run"), "write_orbax": ours(_NEW)},
    "jaxgrow/extras/run_checkpoint.py": {"RunCheckpoint.__init__": attacked("unfinished run", "unfinished data"),
        "RunCheckpoint.accepts": attacked("unfinished run")},
    "jaxgrow/extras/commands/card.py": {"_front_matter": attacked("model card")},
    "jaxgrow/extras/commands/suggest.py": {"marked_measurements": ours("it reads a file of this package")},
    "jaxgrow/extras/commands/show.py": {"run_show": ours("it writes the picture that the user named")},
    "jaxgrow/extras/commands/model_inputs.py": {"_open_array": attacked("ids", "images"),
        "_tokenised_text": attacked("text", "tokenizer")},
    "jaxgrow/extras/commands/tokenizer_files.py": {"tokens_of": attacked("another tokenizer")},
    "jaxgrow/extras/commands/vocabulary.py": {"_read_chosen": attacked("kept tokens", "similar tokens"),
        "_renumber_special": attacked("generation settings")},
    "jaxgrow/cli/program.py": {"main": ours("it opens /dev/null")},
    "jaxgrow/extras/integrations/command.py": {"_is_ours": attacked("run in the shell"), "open_run": attacked("names"),
        "grow_folder": ours(_NEW)},
    "jaxgrow/extras/integrations/trees.py": {"EasydelTree.__init__ EasydelWriter._describe": attacked("EasyDeL index"),
        "LevanterTree.__init__ LevanterWriter._describe": attacked("levanter manifest")},
    "jaxgrow/extras/integrations/copying.py": {"_copy_inside": attacked("EasyDeL beside")},
    "jaxgrow/extras/integrations/formats.py": {"from_file": attacked("names")},
    "jaxgrow/extras/integrations/torch_optimizer.py": {"read_safetensors": attacked("optimizer tensors"),
        "find_optimizer read_optimizer": attacked("optimizer"),
        "parameter_groups": ours("transformers reads the config.json that was checked before, without its code"),
        "write_optimizer": ours(_NEW)},
    "jaxgrow/extras/integrations/orbax_tree.py": {"OrbaxTree.__init__": attacked("Orbax metadata"),
        "OrbaxTree._check_files": attacked("EasyDeL chunk"), "OrbaxTree._all_described": attacked("EasyDeL index"),
        "OrbaxTree._described": attacked("Orbax data", "EasyDeL array"),
        "OrbaxTree.file": attacked("Orbax metadata", "EasyDeL index"),
        "OrbaxTree.open": attacked("Orbax data", "EasyDeL array", "EasyDeL index", "levanter data"),
        "OrbaxTree.read": attacked("Orbax data", "EasyDeL chunk", "levanter data"),
        "Writer._describe_arrays": attacked("Orbax array metadata", "Orbax sharding"),
        "Writer.write _spec": attacked("EasyDeL index", "Orbax metadata"), "Writer._describe": ours(_NEW),
        "database": attacked("levanter database")},
    "jaxgrow/extras/integrations/torch_reader.py": {"load_entries": attacked("DCP data"),
        "open_reader read_metadata": attacked("DCP metadata"), "save_entries": ours(_NEW)},
    "jaxgrow/extras/integrations/torch_tree.py": {"TorchWriter._merge": ours(_NEW)},
    "jaxgrow/untrusted.py": {"CheckedPath.open": attacked("config"),
        "copy_file": attacked("tokenizer beside", "template", "EasyDeL beside", "trainer state"),
        "open_regular": ours(_CALLER)},
}  # fmt: skip
