"""The messages of `jaxgrow` that advise something, and how their advice is followed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints as gpt2
import jax
import numpy as np
import runs
from advice import Case, Place, cli, command, last, part, parts, settings, without
from finetunings import FAMILIES
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from jaxgrow import checkpoints
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.extras.models.generation import generate
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.models import BERTConfig, LlamaConfig, ViTConfig
from train.extras.tokenizers.loading import load_tokenizer


def _model(config: Any, reads: bool = False):
    def make(folder: Path) -> Path:
        checkpoints.save(folder, config, runs.fresh(config))
        if reads:
            load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
        return folder

    return make


def _adapted(folder: Path) -> Path:
    gpt2.saved(folder)
    for file in gpt2.lora_folder(folder.with_name("lora of adapted")).glob("adapter_*"):
        shutil.copy(file, folder)
    return folder


def _prefix(folder: Path) -> Path:
    file = gpt2.lora_folder(folder) / "adapter_config.json"
    file.write_text(file.read_text().replace("LORA", "PREFIX_TUNING"))
    return folder


def _of_embedding(folder: Path) -> Path:
    """A LoRA of the queries, the values and the embedding."""
    file = gpt2.lora_folder(folder) / "adapter_model.safetensors"
    name = "base_model.model.transformer.wte.lora_embedding_A"
    save_file({**load_file(file), name: np.ones((2, gpt2.CONFIG.vocab), np.float32)}, file)
    return folder


def _orbax(folder: Path) -> Path:
    source = checkpoints.open_checkpoint(gpt2.saved(folder.with_name("source of orbax")))
    checkpoints.write(source, checkpoints.Output(folder, "orbax"))
    return folder


def _ids(path: Path) -> Path:
    np.save(path.with_suffix(".npy"), np.arange(200) % 11)
    return path.with_suffix(".npy")


def _trainer(moments: float):
    def make(folder: Path) -> Path:
        params = {"a": {"up": jax.numpy.ones((4, 6)), "down": jax.numpy.ones((6, 4))}}
        ocp.save(folder, {"weights": params, "mu": jax.tree.map(lambda x: x * moments, params)})
        return folder

    return make


MIXTURE = replace(FAMILIES["llama"], experts=4, active=2)
STATES = replace(FAMILIES["bert"], head="states")


def _untold(folder: Path) -> Path:
    (gpt2.saved(folder) / "tokenizer.json").unlink()
    return folder


def _ahead(folder: Path) -> Path:
    """A model whose tokenizer has one token more than the model has rows."""
    config = FAMILIES["gpt2"]
    vocab = {"model": {"vocab": {"a": 0, "b": config.vocab}}}
    (_model(config)(folder) / "tokenizer.json").write_text(json.dumps(vocab))
    return folder


def _similar(file: Path) -> Path:
    file.write_text(json.dumps({"x": [1]}))
    return file


def _changed(**keys: Any):
    def make(folder: Path) -> Path:
        gpt2.change(gpt2.saved(folder), **keys)
        return folder

    return make


def _names_of(**table: Any):
    def make(file: Path) -> Path:
        about = {f"a/{name}": row for name, row in table.items()}
        file.with_suffix(".json").write_text(json.dumps({"names": about, "params": "a/up"}))
        return file.with_suffix(".json")

    return make


def _saved_by_torch(content: Any):
    def make(file: Path) -> Path:
        import torch

        torch.save(content, file.with_suffix(".pt"))
        return file.with_suffix(".pt")

    return make


UP = ["embed.in", "mlp"]
HEADS = {"names": ["embed.in", "heads", "head_dim"], "axes": "embed (heads head_dim)"}
OUT = {"names": ["heads.in", "head_dim.in", "embed"], "axes": "(heads head_dim) embed"}
MAKERS = {
    "gpt": gpt2.saved,
    "untold": _untold,
    "ahead": _ahead,
    "similar": _similar,
    "quantised": _changed(quantization_config={"quant_method": "gptq", "bits": 4}),
    "unknown": _changed(architectures=["OtherForCausalLM"]),
    "modernbert": _model(replace(FAMILIES["modernbert"], layers=3)),
    "few_names": _names_of(up=UP),
    "wrong_names": _names_of(up=UP, down=UP),
    "flat_names": _names_of(up=HEADS, down=OUT),
    "names": _names_of(up=UP, down=["mlp.in", "embed"]),
    "no_state": _saved_by_torch([1]),
    "llama": _model(FAMILIES["llama"]),
    "other_base": _model(replace(FAMILIES["llama"], rope_theta=5e5)),
    "mixture": _model(MIXTURE),
    "states": _model(STATES),
    "reading": _model(FAMILIES["gpt2"], reads=True),
    "lora": gpt2.lora_folder,
    "prefix": _prefix,
    "of_embedding": _of_embedding,
    "old": _model(FAMILIES["gpt2"]),
    "bare": _model(FAMILIES["gpt2"]),
    "adapted": _adapted,
    "orbax": _orbax,
    "ids": _ids,
    "trainer": _trainer(1.0),
    "broken": _trainer(np.nan),
}


# --- models: the settings in a message are set ---


def _parsed(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def of_config(says: str, kind: type, **wrong: Any) -> Case:
    """A case of a config that is not valid; the message says how to set its fields."""

    def follows(place: Place, said: str) -> None:
        fields = kind.__dataclass_fields__
        found = {name: _parsed(value) for name, value in settings(said) if name in fields}
        assert found, said
        kind(**wrong | found)

    return Case(says, lambda place: kind(**wrong), follows)


PATCHES = dict(image=8, patch=4, channels=3, classes=7, layers=2, embed=8, heads=2, mlp=16)
LLAMA = dict(vocab=256, context=8, layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=16)
BERT = dict(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
SWIN = dict(
    image=32, patch=4, channels=3, classes=7, layers=(1, 1), embed=(4, 8), heads=(1, 2),
    mlp=(8, 16),
)  # fmt: skip


def of_experts(**wrong: Any) -> Case:
    """A case of settings that only a model with experts has."""

    def follows(place: Place, said: str) -> None:
        assert "set experts" in said, said
        LlamaConfig(**LLAMA, **wrong, experts=2, active=1)

    return Case("only experts use", lambda place: LlamaConfig(**LLAMA, **wrong), follows)


def generated(head: str, **options: Any) -> Any:
    config = replace(FAMILIES["gpt2"], head=head)
    return generate(config, runs.fresh(config), [[1, 2]], max_new=1, **options)


MODELS = [
    Case("leave it out to allow repetitions", lambda p: generated("tokens", repetition_penalty=0.0),
        lambda p, said: generated("tokens")),
    Case("leave it out to take the likeliest", lambda p: generated("tokens", temperature=0.0),
        lambda p, said: generated("tokens")),
    Case("leave it out to sample from all", lambda p: generated("tokens", temperature=1.0, top_k=0),
        lambda p, said: generated("tokens", temperature=1.0)),
    Case("rotary positions need an even", lambda p: LlamaConfig(**LLAMA, rotary=0.75),
        lambda p, said: LlamaConfig(**LLAMA, rotary=0.5)),
    of_experts(capacity=1.25),
    of_experts(shared=8),
    of_experts(clamp=7.0),
    Case("also set temperature", lambda p: generated("tokens", top_k=3),
        lambda p, said: generated("tokens", top_k=3, temperature=float(part(r"temperature, for example to (\S+)", said)))),
    of_config("is not a multiple of {merged}", SwinConfig, **(SWIN | {"image": 36})),
    of_config("a Swin's attention", SwinConfig, **SWIN, attention="cudnn"),
    Case("use a model with head=tokens", lambda p: generated("classes"), lambda p, said: generated(part(r"head=(\w+)", said))),
    of_config("a CaiT mixes", CaiTConfig, **PATCHES, head_dim=4, attention="cudnn"),
    of_config("head=spans needs", BERTConfig, head="spans", classes=3, **BERT),
    of_config("norm_scale=False needs", LlamaConfig, **LLAMA, norm_scale=False, bias=True),
    of_config("needs gated=True", LlamaConfig, **LLAMA, experts=2, gated=False, active=1),
    of_config("head='classes' reads", ViTConfig, **PATCHES, head_dim=4, class_token=False),
    of_config("mean_head does not", ViTConfig, **PATCHES, head_dim=4, mean_head=True, distillation="token"),
]  # fmt: skip


# --- the command ---


COMMANDS = [
    cli("contains an adapter in addition", "grow {adapted} {new} --method stack --layers 8",
        lambda words, said: [*words, *parts(r"pass (--lora) (\S+)", said)]),
    Case("that does not take a LoRA, merge it", lambda p: command(*p.words("grow {adapted} {new} --method untie")),
        lambda p, said: command(*p.words("grow {gpt} {new} --method untie"))),  # as if it were merged
    cli("no weight files whose size", "grow {gpt} {new} --method stack --layers 8 --to orbax --shard-size 1GB"),
    Case("after its head was separated",
        lambda p: command(*p.words("grow {gpt} {new} --method stack --layers 8 --lora {of_embedding}")),
        lambda p, said: command(*p.words("grow {gpt} {new}"), *parts(r"(--method) (\w+)", said))),
    Case("holds only an adapter", lambda p: command(*p.words("grow {lora} {new} --method stack --layers 8")),
        lambda p, said: command(*p.words("grow {gpt} {new} --method stack --layers 8"), *parts(r"(--lora) (\S+)", said))),
    cli("PEFT cannot merge it either", "grow {llama} {new} --method stack --layers 4 --lora {prefix}",
        lambda words, said: words[:-2] if "grow the model alone" in said else words),
    cli("--to orbax writes any", "grow {gpt} {new} --method hypercloning --embed 24", "--to orbax"),
    cli("--overwrite replaces it", "convert {gpt} {old} --to orbax", "--overwrite"),
    cli("convert needs at least one", "convert {gpt} {new}", "--to orbax"),
    cli("give only one of --to, --to-params and", "suggest {gpt} --to 2x --layers 8",
        lambda words, said: words[:2] + words[4:]),
    Case("run jaxgrow prune with --params", lambda place: command(*place.words("suggest {gpt} --to-params 4000")),
        lambda place, said: command(*place.words("prune {gpt} {new} --data {ids} --params"),
        part(r"--params (\d+)", said))),
    cli("For larger sizes, run jaxgrow suggest", "prune {gpt} {new} --params 9000 --data {ids}",
        lambda words, said: part(r"run jaxgrow (.*)", said).split()),
    cli("is not a choice of tokens", "prune {gpt} {new} --vocab 12", last(r"from 1 to (\d+)")),
    Case("the next token would get the id", lambda p: command(*p.words("grow {ahead} {new} --like-tokens {similar}")),
        lambda p, said: [command(*p.words("grow {ahead} {new}"), *parts(r"(--vocab) (\d+)", said)),
                         command(*p.words("grow {new} {newer} --like-tokens {similar}"))]),
    cli("--to is too close", "suggest {gpt} --to 1.0001x", lambda words, said: [*words[:2],
        *parts(r"such as (--layers) (\d+)", said)]),
    cli("not a number of decibels", "grow {gpt} {new} --method hypercloning --embed 24 --heads 8 --mlp 40 --noise nan",
        last(r"such as (\d+)")),
    cli("does not average layers", "grow {gpt} {new} --method stack --layers 8 --blend 1"),
    cli("does not use random numbers", "grow {gpt} {new} --method stack --layers 8 --seed 1"),
    cli("PEFT does not support LoRA on the experts",
        "grow {llama} {new} --method upcycle --experts 2 --lora {lora}",
        lambda words, said: words[:-2]),  # as if the LoRA were merged
    cli("requires the number of experts", "grow {llama} {new} --method upcycle"),
    cli("the routers of new experts are random", "grow {llama} {new} --method upcycle --experts 2 --noise 9"),
    cli("each token is routed to at", "grow {llama} {new} --method upcycle --experts 2 --active 3", last(r"at most (\d+)")),
    cli("choose the config of one", "interpolate {llama} {other_base} {new} --alpha .5", "--take-config A"),
    cli("no tokenizer.json in", "prune {untold} {new} --layers 1 --data {text}", "--data {ids}"),
    cli("is not a valid tokenizer", "prune {gpt} {new} --layers 1 --data {text}", "--data {ids}"),
    cli("nothing to", "grow {gpt} {new} --method stack"),
    cli("a seed must be", "grow {gpt} {new} --method net2net --mlp 40 --seed -1", "--seed 0"),
    cli("the list of layers", "grow {gpt} {new} --method passthrough",
        lambda words, said: [*words[:-2], *parts(r"(--layers-from) ([0-9-]+)", said)]),
    cli("passthrough makes the {", "grow {gpt} {new} --layers-from 0-1 --layers 8",
        lambda words, said: words[:-2] if "leave out the sizes" in said else words),
    cli("prune measures which layers", "prune {gpt} {new} --layers 1",
        lambda words, said: [*words[:-2], *parts(r"such as (--keep) ([0-9-]+)", said)]),
    cli("selects the layers to remove", "prune {gpt} {new} --mlp 8 --by angular --data {ids}", "--layers 2"),
    cli("outputs of a model without a head", "prune {states} {new} --embed 8 --data {ids} --layers 1", slow=True),
    cli("importance of the units of experts", "prune {mixture} {new} --mlp 16 --layers 1 --data {ids}", slow=True),
    cli("routes each token to", "prune {mixture} {new} --experts 1 --data {ids} --to orbax",
        lambda words, said: [*words[:3], *parts(r"least (--experts) (\d+)", said), *words[5:]]),
    cli("alike: the kinds of the layers", "decoalesce {llama} {new} --layers alike", last(r"such as --layers (\S+)")),
    cli("no groups: give", "coalesce {gpt} {new}"),
    cli("is not from 0 to 1", "interpolate {gpt} {gpt} {new} --alpha 2"),
    cli("by exact copies", "grow {gpt} {new} --method stack --layers 8 --noise 10"),
    cli("grows the optimizer state of", "grow {orbax} {new} --method stack --layers 8 --optimizer copy"),
    cli("--lora-only requires", "grow {gpt} {new} --method stack --layers 8 --lora-only", "--lora {lora}"),
    cli("has no names for these parameters", "inspect {trainer} --names {few_names}", "--names {names}"),
    cli("do not fit the sizes of the other", "inspect {trainer} --names {wrong_names}", "--names {names}"),
    cli("the checkpoint stores several axes as", "inspect {trainer} --names {flat_names}", "--head-dim 2"),
    cli("is not supported for checkpoints of other trainers",
        "grow {trainer} {new} --names {names} --method hypercloning --mlp 12 --optimizer asymmetric",
        last(r"choose from drop, (\w+)")),
    cli("has NaN or infinite values, or negative",
        "grow {broken} {new} --names {names} --method hypercloning --mlp 12 --optimizer exact"),
    cli("is quantised", "inspect {quantised}", lambda words, said: [words[0],
        str(Path(words[1]).with_name("gpt"))] if "before it was quantised" in said else words),
    cli("lists the supported ones", "inspect {unknown}", lambda words, said: [part("`jaxgrow ([a-z]+)` lists", said)]),
    cli("Write an Orbax checkpoint instead", "grow {modernbert} {new} --method virtual_groups --experts 4", "--to orbax"),
    cli("cannot be read by torch.load",
        "grow {gpt} {new} --method stack --layers 8 --optimizer copy --optimizer-state {text}", needs="torch"),
    cli("is not the state_dict of",
        "grow {gpt} {new} --method stack --layers 8 --optimizer copy --optimizer-state {no_state}",
        lambda words, said: without(without(words, "--optimizer-state"),
        "--optimizer") if "--optimizer-state" in said else words, needs="torch"),
    cli("is a checkpoint of an unknown format", "inspect {trainer}", "--names {names}"),
]  # fmt: skip

CASES = [*MODELS, *COMMANDS]
