"""Existing text models with their tokenizers, for evaluation and generation."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxgrow.axes import Params
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.models import Config
from train.common.errors import UserError
from train.common.output import say_notes
from train.extras.bounded import BoundedTokenizer
from train.extras.tokenizers import loading as tokenizers
from train.extras.tokenizers.special import Special, largest_vocab, special_tokens
from train.state.mesh import Mesh


@dataclass(frozen=True, eq=False)
class TextModel:
    """A text model and its tokenizer."""

    config: Config
    params: Params  # on the devices of the mesh
    tokenizer: Any  # a `tokenizers.Tokenizer`
    mesh: jax.sharding.Mesh
    # Folder with the files of the tokenizer; None if there is only the tokenizer itself.
    folder: Path | None = None

    @property
    def special(self) -> Special:
        """The special tokens of the model."""
        return special_tokens(self.tokenizer, self.folder)

    @cached_property
    def texts(self) -> BoundedTokenizer:
        """The tokenizer in a process with limits, for prompts and texts of any kind."""
        return BoundedTokenizer(self.tokenizer, str(self.folder or "bytes"))


def open_text_model(folder: str | Path, tokenizer: str | None = None) -> TextModel:
    """Open a text model on all devices: a run, or an Orbax or Hugging Face folder.

    Args:
      folder: folder of the model (`jaxgrow.checkpoints.open_checkpoint`).
      tokenizer: tokenizer (`train.data.text.Data`); None uses the tokenizer in the folder.

    Raises:
      UserError: the folder does not contain a model, the model does not predict tokens, or its
        tokenizer is missing or has too many tokens for the model.
    """
    source = opened_model(folder)
    config = source.config
    if config.predicts != "tokens":
        what = config.predicts if config.modality == "text" else config.modality
        raise UserError(
            f"{folder} contains a {type(config).__name__} for {what}, but this command needs a model that predicts tokens"
        )
    home, _ = at_step(Path(folder).expanduser())
    beside = tokenizers.folder_of(tokenizer) if tokenizer else home
    loaded = tokenizers.load_tokenizer(tokenizer) if tokenizer else tokenizers.tokenizer_of(home)
    check_vocab(loaded, config)
    devices = Mesh().over(jax.devices())
    return TextModel(portable_config(config), source.shard(devices), loaded, devices, beside)


def portable_config(config: Config) -> Config:
    """Return ``config`` without a kernel that was chosen for the devices and inputs of training."""
    return config if config.attention == "xla" else replace(config, attention="auto")


def config_of(folder: str | Path) -> Config:
    """Return the config of the model in ``folder``.

    Raises:
      UserError: the folder does not contain a model.
    """
    return opened_model(folder, notes=False).config


def check_vocab(tokenizer: Any, config: Config) -> None:
    """Check that the vocabulary of the model contains every token of the tokenizer.

    Raises:
      UserError: the tokenizer has more tokens than the model.
    """
    size = largest_vocab(tokenizer)
    vocab = config.integers()["vocab"]
    if size > vocab:
        raise UserError(
            f"the largest id of the tokenizer is {size - 1}, but the vocabulary of the model is {vocab}: "
            "use the tokenizer of the model"
        )


def opened_model(folder: str | Path, *, notes: bool = True) -> Checkpoint:
    """Open the checkpoint in ``folder``, and print its notes.

    Raises:
      UserError: the folder does not contain a model.
    """
    try:
        source = open_checkpoint(folder)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    if notes:
        say_notes(source)
    return source
