"""The model card of a model that was made from others: what it was made of, how, and its licence."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from jaxgrow._version import __version__
from jaxgrow.checkpoints.io.files import CARD, RECORD, inside
from jaxgrow.checkpoints.source import Checkpoint, Source
from jaxgrow.checkpoints.writing import MODEL_CARDS
from jaxgrow.typed import Json

# The part of a README that is read. A front matter has a few kB at most.
_LARGEST_README = 1 << 16
_LICENCE = ("license", "license_name", "license_link")
# An identifier, such as apache-2.0, a file, or an address. It is copied, and nothing opens it.
_VALUE = re.compile(r"\w[\w.:/#?=&%+-]{0,299}", re.ASCII)
# The folders of this machine, at the begin of a string in JSON. Keys, such as new tokens, stay.
_PATH = re.compile(r'"(?:[^"\\]|\\.)*/(?=(?:[^"\\]|\\.)*"(?!:))')
# The entries of a step in ``jaxgrow.json`` that the card repeats.
_STEP = ("operator", "arguments", "target", "new_layers")


def card_of_model(model: Source, record: Json, architecture: str) -> str:
    """Return the model card of a model that was made from others.

    The card holds the values from other files only as YAML and JSON, in which they cannot become
    another key, Markdown, or HTML.

    Args:
      model: the model.
      record: the content of its ``jaxgrow.json``.
      architecture: its architecture in `transformers`.
    """
    fronts = {root: _front_matter(root) for root in model.roots}
    bases = [*dict.fromkeys(_base(root, front) for root, front in fronts.items())]
    licences = [{key: of[key] for key in _LICENCE if key in of} for of in fronts.values()]
    arguments = record.get("arguments", {})
    method = arguments.get("method", record.get("operator"))
    about: Json = {
        "library_name": "transformers",
        "tags": ["jaxgrow", *[str(method)] * bool(method)],
    }
    about["base_model"] = bases[0] if len(bases) == 1 else bases
    if len(bases) > 1:
        about["base_model_relation"] = "merge"
    about |= licences[0] if licences.count(licences[0]) == len(licences) else {}
    steps = [step for step in (*record.get("history", ()), record) if isinstance(step, dict)]
    shown = json.dumps(
        [{key: step[key] for key in _STEP if key in step} for step in steps], indent=1
    )
    return f"""---
{yaml.safe_dump(about, sort_keys=False, default_flow_style=None).strip()}
---

# A model made by jaxgrow

This is a {architecture} with {model.parameters:,} parameters. jaxgrow {__version__} made it from the `base_model` above.
It was not trained after the last of these steps:

```json
{_PATH.sub('"', shown)}
```
"""


def _front_matter(root: Checkpoint) -> dict[str, str]:
    """The front matter in the card of a model, and the licence in its ``config.json``.

    Only keys with a value of one word are read: no lists, no nested keys, no references of YAML.
    """
    told = (root.hf_config or {}).get("license")
    found = {"license": told} if isinstance(told, str) and _VALUE.fullmatch(told) else {}
    if not (root.folder / CARD).is_file():
        return found
    with inside(root.folder, CARD).open() as file:
        text = file.read(_LARGEST_README).decode("utf-8", "replace")
    front = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\n---", text, re.DOTALL)
    for line in front[1].splitlines() if front else ():
        key, _, value = line.partition(":")
        value = value.partition(" #")[0].strip().strip("'\"")
        if _VALUE.fullmatch(key) and _VALUE.fullmatch(value):
            found[key] = value
    return found


def _base(root: Checkpoint, front: Mapping[str, str]) -> str:
    """The model that jaxgrow made a model of, or else its own name.

    The folder of a model in the cache of Hugging Face tells the name of its repository.
    """
    if (root.folder / RECORD).is_file() and "base_model" in front:
        return front["base_model"]
    folder = Path(os.path.abspath(root.folder))  # "." has no name
    cached = re.fullmatch(r"models--(.+?)--(.+)", folder.parent.parent.name)
    return f"{cached[1]}/{cached[2]}" if cached else folder.name


MODEL_CARDS.add("transformers", card_of_model)
