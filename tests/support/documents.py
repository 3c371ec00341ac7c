"""A corpus whose documents tokens must not attend across."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from train.data.text import Data
from train.state.model import TrainState

DOCUMENTS = ["ab", "c", "defghijklmnop", "q", "rstu"] * 9


def document_data(home: Path) -> Data:
    """Write documents of 1 to 13 letters, one in each line of a file."""
    folder = home / "lines"
    folder.mkdir()
    for name, texts in (("train", DOCUMENTS), ("valid", DOCUMENTS[:15])):
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return Data("text", str(folder), cache=str(home / "cache"), attend="document")


def documents_of(stream: np.ndarray, begins: Sequence[int]) -> list[bytes]:
    return [part.astype(np.uint8).tobytes() for part in np.split(stream, begins[1:])]


def loss_within_documents(model: TrainState, batch: Any) -> jax.Array:
    """The mean loss of all targets within documents, from logits of the complete batch."""
    inputs, targets = batch
    logits = model.config.module.apply({"params": model.params}, inputs)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (each * inputs["weights"]).sum() / inputs["weights"].sum()
