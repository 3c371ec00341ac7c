"""Write a finished run as a Hugging Face folder, which `transformers` loads: ``python -m train.export RUN DST [--overwrite]``

The folder contains the weights, ``config.json``, the tokenizer, and a model card with the data, the
plan, the cost and the losses of the run.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrow import __version__
from jaxgrow.axes import axis
from jaxgrow.checkpoints import CheckpointError, Loaded, Source, open_checkpoint
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.hf.labels import named
from jaxgrow.checkpoints.io.files import RECORD, read_json, write_json
from jaxgrow.checkpoints.io.folders import appearing
from jaxgrow.checkpoints.source import flat, nested
from jaxgrow.models import Config
from jaxgrow.untrusted import one_line
from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say
from train.data.images import images_of
from train.data.labelled.encoding import PADS, Encoder, Frame
from train.data.labelled.task import Labelled, labelled_of
from train.data.processor import FILE, described
from train.data.special import special_tokens
from train.data.text import tokenizer_of
from train.engine.run.workdir import Workdir

# For each role of a special token, the spellings that identify it.
_ROLES = {
    "pad_token": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_LINE = "\n"
_OF_MASKED = ("cls_token", "sep_token", "mask_token")


def export(run: Path, folder: Path, overwrite: bool = False) -> None:
    """Write the last model of a finished run as a Hugging Face folder.

    Args:
      run: folder of the run.
      folder: folder to write.
      overwrite: whether to replace a checkpoint in ``folder``.

    Raises:
      UserError: the run has not finished, no Hugging Face architecture stores the model, or the
        folder may not be written.
    """
    workdir = Workdir(run)
    if not workdir.finished:
        raise UserError(
            f"there is no finished run in {run}; to write the newest checkpoint of a run that has not finished, or another "
            f"checkpoint, as a Hugging Face folder: jaxgrow convert {run} {folder} --to hf"
        )
    try:
        source = open_checkpoint(workdir.folder)
        written = in_colour(source)
        family, foreign = storage.family_for(written.config, None)
        with appearing(folder, [workdir.folder], overwrite) as part:
            foreign |= named(workdir.result.get("labels", ()))
            foreign |= source.head | _inputs(workdir, source.config, part)
            storage.write(written, family, foreign, part)
            about = {
                "version": __version__,
                "operator": "export",
                "sources": [source.fingerprint()],
            }
            write_json(part / RECORD, about | {"config": written.config.as_json(), "files": []})
            with one_line(UserError, f"the config.json or the result.json in {run} is damaged"):
                text = card(workdir, written.config, family.architecture)
            (part / "README.md").write_text(text)
    except CheckpointError as error:
        raise UserError(str(error)) from error


def in_colour(source: Source) -> Source:
    """Convert a model of gray images to a model of colour images.

    `transformers` converts every image to colours. The three channels are then equal, and the patch
    kernel of each channel is a third of the kernel for gray images.
    """
    config = source.config
    if config.sizes().get("channels") != 1:
        return source
    params = flat(source.params())
    axes = {path: leaf.names for path, leaf in source.leaves.items()}
    for path, names in axes.items():
        channels = [i for i, name in enumerate(names) if axis(name) == "channels"]
        for i in channels:
            params[path] = np.repeat(params[path] / 3, 3, i)
    return Loaded(config.with_sizes({"channels": 3}), nested(params))


def _inputs(run: Workdir, config: Config, folder: Path) -> dict[str, Any]:
    """Write the tokenizer or the image processor for `transformers`.

    Returns:
      The entries of ``config.json`` about the inputs.
    """
    kind, data = next(iter(run.config["data"].items()))
    if config.modality == "text":
        own = _tokenizer(run.folder, config, folder)
        return own | (_of_task(labelled_of(data), config, folder) if kind == "Labelled" else {})
    sizes = config.integers()
    write_json(folder / FILE, described(images_of(data), sizes["image"], sizes["channels"]))
    return {}


def _tokenizer(run: Path, config: Config, folder: Path) -> dict[str, Any]:
    """Write the tokenizer for `transformers`.

    Returns:
      The entries of ``config.json`` about the special tokens.
    """
    tokenizer = tokenizer_of(run)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = special_tokens(tokenizer, run)
    roles = {role for role in _ROLES if config.masked or role not in _OF_MASKED}
    named = {}
    for role, names in _ROLES.items():
        existing = (name for name in names if tokenizer.token_to_id(name) is not None)
        if role in roles and (name := next(existing, None)):
            named[role] = name
    # texts of decoders do not have these roles
    of_bert = {named.get("cls_token"), named.get("sep_token")} & {"[CLS]", "[SEP]"}
    ends = {} if of_bert else {"bos_token_id": special.begin, "eos_token_id": special.end}
    named |= {
        role.removesuffix("_id"): tokenizer.id_to_token(i)
        for role, i in ends.items()
        if i is not None
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.length,
        **named,
        **special.names,
    }
    about |= {} if special.template is None else {"chat_template": special.template}
    write_json(folder / "tokenizer_config.json", about | {"clean_up_tokenization_spaces": False})
    if "pad_token" in named and (config.causal or config.first_position == 0):
        ends["pad_token_id"] = tokenizer.token_to_id(named["pad_token"])
    found: dict[str, Any] = {role: i for role, i in ends.items() if i is not None}
    if "eos_token_id" in found and len(special.ends) > 1:  # several tokens end generated texts
        found["eos_token_id"] = list(special.ends)
    return found


def _of_task(data: Labelled, config: Config, folder: Path) -> dict[str, Any]:
    """Make the written tokenizer frame texts as in the fine-tuning of the model.

    Returns:
      The entry of ``config.json`` for the padding token.
    """
    encoder = Encoder(
        data.tokenizer if data.tokenizer == "bytes" else str(folder / "tokenizer.json"), config
    )
    loaded = tokenizer_of(folder)
    loaded.post_processor = _framing(loaded, encoder.frame)
    loaded.save(str(folder / "tokenizer.json"))
    about = read_json(folder / "tokenizer_config.json")
    pad = _padding(loaded, encoder.frame)
    ends = {"eos_token": encoder.frame.end[-1], "pad_token": pad}
    about |= {role: loaded.id_to_token(number) for role, number in ends.items()}
    about |= {
        "model_max_length": min(data.length, config.length),
        "padding_side": "right",
        "truncation_side": "right",
    }
    about |= {"model_input_names": _input_names(config)}
    write_json(folder / "tokenizer_config.json", about)
    return {"eos_token_id": encoder.frame.end[-1]} | (
        {} if encoder.own_pad else {"pad_token_id": pad}
    )


def _input_names(config: Config) -> list[str]:
    return ["input_ids", *(["token_type_ids"] if config.types > 1 else []), "attention_mask"]


def _framing(tokenizer: Any, frame: Frame) -> Any:
    """Return the post-processor of `tokenizers` that adds the tokens of a frame."""
    from tokenizers.processors import TemplateProcessing

    begin, between, end = (list(map(tokenizer.id_to_token, part)) for part in frame[:3])
    tokens = {name: tokenizer.token_to_id(name) for name in (*begin, *between, *end)}
    return TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *between, "$B:1", *(f"{name}:1" for name in end)],
        special_tokens=list(tokens.items()),
    )


def _padding(tokenizer: Any, frame: Frame) -> int:
    """Return a token for padding that is not at the end of any text.

    `transformers` also finds special tokens in raw text, by their spelling. For a tokenizer without
    a padding token, this function therefore chooses a token that begins with a mark of the
    tokenizer, such as the mark for a blank. Text rarely contains such a mark.
    """
    added = tokenizer.get_added_tokens_decoder().get(frame.pad)
    if tokenizer.id_to_token(frame.pad) in PADS or (added is not None and added.special):
        return frame.pad
    marked = [name for name in tokenizer.get_vocab() if name.startswith(("\u0120", "\u2581", "##"))]
    if marked:
        return tokenizer.token_to_id(max(marked, key=lambda name: (len(name), name)))
    return frame.pad


def card(run: Workdir, config: Config, architecture: str) -> str:
    """Return the model card of a finished run, as Markdown."""
    was = run.config
    result = run.result
    scores = [f"* {name.replace('_', ' ')}: {value:.4f}" for name, value in _scores(run).items()]
    return f"""---
library_name: transformers
tags: [jaxgrow]
{_base(was)}---

# {result["name"]}

{architecture}, {result["phases"][-1]["parameters"]:,} parameters, trained by jaxgrow {__version__}
({next(iter(was["method"]))}).

## Data

{_data(was, result["corpus"])}

## Plan and cost

{_plan(result["phases"])}

In all {result["flops"]:.3g} FLOPs and {result["seconds"]:.0f} s. Batch {was["batch"]}, seed {was["seed"]}, optimizer:
`{json.dumps(was["optim"])}`.

## Evaluation on validation data

{_LINE.join(scores)}

## Model

```json
{json.dumps(config.as_json(), indent=1)}
```
"""


def _plan(phases: list[dict[str, Any]]) -> str:
    """Return the table of the card with the size and the cost of each phase."""
    rows = [
        f"| {p['phase']} | {p['parameters']:,} | {p['steps']:,} | {p['tokens']:,} | {p['flops']:.3g} |"
        for p in phases
    ]
    head = ["| phase | parameters | steps | tokens | FLOPs |", "| --- | --- | --- | --- | --- |"]
    return _LINE.join([*head, *rows])


def _data(config: dict[str, Any], corpus: dict[str, str]) -> str:
    """Return the line of the card about the data: the name, hashes, and how they were read."""
    kind, data = next(iter(config["data"].items()))
    parts = [name for name in ("train", "valid", "tokenizer") if name in corpus]
    hashes = ", ".join(f"{name} `{corpus[name][:12]}`" for name in parts)
    shown = ("source", "name", "task", "tokenizer")
    about = {name: value for name, value in data.items() if name in shown}
    if "tokenizer" in about:
        # without the folder, which is specific to this machine
        about["tokenizer"] = Path(about["tokenizer"]).name
    return f"{kind}: {corpus['name']} ({hashes}); `{json.dumps(about)}`"


def _scores(run: Workdir) -> dict[str, float]:
    """Return the loss and the metrics on validation data."""
    scores = {}
    for split, of in (run.scores or {}).items():
        scores |= {f"{metric}, {split}": x for metric, x in of.items()}
    result = run.result
    return {"loss": result["val_loss"]} | (scores or {"accuracy": result["val_accuracy"]})


def _base(config: dict[str, Any]) -> str:
    """Return the line of the card that names the source model: its name, without its folder."""
    source = next(iter(config["method"].values())).get("source")
    if not isinstance(source, str):
        return ""
    name = Path(source.replace("{seed}", str(config["seed"]))).name
    return f"base_model: {json.dumps(name)}\n"


def main() -> None:
    parser = Parser("export", __doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint in that folder"
    )
    arguments = parser.parse_args()
    export(arguments.run, arguments.folder, arguments.overwrite)
    say(f"{arguments.folder}: the model of {arguments.run}, for transformers")


if __name__ == "__main__":
    exits_cleanly(main)
