"""Writes a finished run as a Hugging Face folder, which `transformers` loads: ``python -m train.export RUN DST [--overwrite]``

Weights, ``config.json``, the tokenizer, and a model card: data, plan, cost and losses, as the run has them.
"""

import json
from pathlib import Path
from typing import Any

from jaxgrow import __version__
from jaxgrow.interop import CheckpointError, huggingface, open_checkpoint
from jaxgrow.interop.files import RECORD, write_json
from jaxgrow.interop.folders import appearing
from jaxgrow.interop.labels import named
from jaxgrow.models import Config, EncoderConfig, TextConfig
from train.commands import Parser
from train.data.labelled.task import Labelled, task
from train.data.special import special_tokens
from train.data.text import tokenizer_of
from train.errors import UserError, exits_cleanly
from train.run.workdir import Workdir

# The roles of special tokens, by the names that tokens of the role may have.
_ROLES = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_LINE = "\n"
_OF_MASKED = ("cls_token", "sep_token", "mask_token")


def export(run: Path, folder: Path, overwrite: bool = False) -> None:
    """Writes the last model of a finished run.

    Raises:
      UserError: the run has not ended, no architecture stores its model, or the folder may not be written.
    """
    workdir = Workdir(run)
    if not workdir.finished:
        raise UserError(f"there is no finished run in {run}; jaxgrow convert writes other checkpoints")
    try:
        source = open_checkpoint(workdir.folder)
        family, foreign = huggingface.family_for(source.config, None)
        with appearing(folder, [workdir.folder], overwrite) as part:
            if isinstance(source.config, TextConfig):
                foreign |= _tokenizer(workdir.folder, source.config, part)
                if source.config.predicts != "tokens":
                    foreign |= task(Labelled(**workdir.config["data"]["Labelled"]), source.config).settings
            foreign |= named(workdir.result.get("labels", ()))
            huggingface.write(source, family, foreign, part)
            about = {"version": __version__, "operator": "export", "sources": [source.fingerprint()]}
            write_json(part / RECORD, about | {"config": source.config.as_json(), "files": []})
            (part / "README.md").write_text(card(workdir, source.config, family.architecture))
    except CheckpointError as error:
        raise UserError(str(error)) from error


def _tokenizer(run: Path, config: TextConfig, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer as `transformers` reads it; returns what ``config.json`` says of it."""
    tokenizer = tokenizer_of(run)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = special_tokens(tokenizer, run)
    masked = isinstance(config, EncoderConfig)
    roles = {role for role in _ROLES if masked or role not in _OF_MASKED}
    named = {
        role: name
        for role, names in _ROLES.items()
        if role in roles and (name := next((n for n in names if tokenizer.token_to_id(n) is not None), None))
    }
    of_bert = {named.get("cls_token"), named.get("sep_token")} & {"[CLS]", "[SEP]"}  # such texts have other roles
    ends = {} if of_bert else {"bos_token_id": special.begin, "eos_token_id": special.end}
    named |= {role.removesuffix("_id"): tokenizer.id_to_token(i) for role, i in ends.items() if i is not None}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.length, **named, **special.names}
    about |= {} if special.template is None else {"chat_template": special.template}
    write_json(folder / "tokenizer_config.json", about | {"clean_up_tokenization_spaces": False})
    return {role: i for role, i in ends.items() if i is not None}


def card(run: Workdir, config: Config, architecture: str) -> str:
    """The model card: what the run knows of its model, as Markdown."""
    was, result, corpus = run.config, run.result, run.result["corpus"]
    kind, data = next(iter(was["data"].items()))
    hashes = ", ".join(f"{name} `{corpus[name][:12]}`" for name in ("train", "valid", "tokenizer") if name in corpus)
    about = {name: value for name, value in data.items() if name in ("source", "name", "task", "tokenizer")}
    phases = [
        f"| {p['phase']} | {p['parameters']:,} | {p['steps']:,} | {p['tokens']:,} | {p['flops']:.3g} |"
        for p in result["phases"]
    ]
    scores = {f"{metric}, {split}": x for split, of in (run.scores or {}).items() for metric, x in of.items()}
    judged = {"loss": result["val_loss"], "accuracy": result["val_accuracy"]} | scores
    return f"""---
library_name: transformers
tags: [jaxgrow]
---

# {result["name"]}

{architecture}, {result["phases"][-1]["parameters"]:,} parameters, trained by jaxgrow {__version__}
({next(iter(was["method"]))}).

## Data

{kind}: {corpus["name"]} ({hashes}); `{json.dumps(about)}`

## Plan and cost

| phase | parameters | steps | tokens | FLOPs |
| --- | --- | --- | --- | --- |
{_LINE.join(phases)}

In all {result["flops"]:.3g} FLOPs and {result["seconds"]:.0f} s. Batch {was["batch"]}, seed {was["seed"]}, optimizer:
`{json.dumps(was["optim"])}`.

## On held-out data

{_LINE.join(f"* {name.replace('_', ' ')}: {value:.4f}" for name, value in judged.items())}

## Model

```json
{json.dumps(config.as_json(), indent=1)}
```
"""


def main() -> None:
    parser = Parser("export", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("folder", type=Path, help="folder to be written")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in that folder")
    arguments = parser.parse_args()
    export(arguments.run, arguments.folder, arguments.overwrite)
    print(f"{arguments.folder}: {arguments.run} for transformers")


if __name__ == "__main__":
    exits_cleanly(main)
