"""The model card of a finished run, for `transformers`: its data, plan, cost and losses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrow import __version__
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.io.files import CARD, TRANSFORMERS
from jaxgrow.models import Config
from train.common.files import write_text
from train.store.workdir import CARDS

_LINE = "\n"


def write_card(
    run: Path,
    was: Mapping[str, Any],
    result: Mapping[str, Any],
    config: Config,
    scores: Mapping[str, Mapping[str, float]] | None,
) -> None:
    """Write the model card of a run.

    Args:
      run: folder of the run.
      was: content of its ``config.json``.
      result: its result.
      config: config of its model.
      scores: its scores on its task, by split and metric, if they are known.
    """
    text = _card(was, result, config, _architecture(config), scores)
    (run / TRANSFORMERS).mkdir(exist_ok=True)
    write_text(run / TRANSFORMERS / CARD, text)


def _architecture(config: Config) -> str:
    try:
        return storage.family_for(config, None)[0].architecture
    except CheckpointError:  # only an Orbax folder stores such a model
        return type(config).__name__


def _card(
    was: Mapping[str, Any],
    result: Mapping[str, Any],
    config: Config,
    architecture: str,
    scores: Mapping[str, Mapping[str, float]] | None,
) -> str:
    of = {name.replace("_", " "): x for name, x in _card_scores(result, scores).items()}
    lines = [f"* {name}: {value:.4f}" for name, value in of.items()]
    return f"""---
library_name: transformers
tags: [jaxgrow]
{_base(was)}---

# {result["name"]}

{architecture}, {result["phases"][-1]["parameters"]:,} parameters, trained by jaxgrow {__version__}
({next(iter(was["method"]))}).

## Data

{_data_line(was, result["corpus"])}

## Plan and cost

{_plan(result["phases"])}

In all {result["flops"]:.3g} FLOPs and {result["seconds"]:.0f} s. Batch {was["batch"]}, seed {was["seed"]}, optimizer:
`{json.dumps(was["optim"])}`.

## Evaluation on validation data

{_LINE.join(lines)}

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


def _data_line(config: Mapping[str, Any], corpus: Mapping[str, str]) -> str:
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


def _card_scores(
    result: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]] | None
) -> dict[str, float]:
    """Return the loss and the metrics on validation data."""
    splits = (scores or {}).items()
    found = {f"{metric}, {split}": x for split, of in splits for metric, x in of.items()}
    return {"loss": result["val_loss"]} | (found or {"accuracy": result["val_accuracy"]})


def _base(config: Mapping[str, Any]) -> str:
    """Return the line of the card that names the source model: its name, without its folder."""
    source = next(iter(config["method"].values())).get("source")
    if not isinstance(source, str):
        return ""
    name = Path(source.replace("{seed}", str(config["seed"]))).name
    return f"base_model: {json.dumps(name)}\n"


CARDS.add("transformers", write_card)
