"""Models of text that somebody has, with their tokenizers: to be judged and used."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgrow.axes import Params
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.models import Config, TextConfig
from train.common.errors import UserError
from train.data import text
from train.data.special import Special, special_tokens
from train.engine.state.mesh import Mesh


class TextModel(NamedTuple):
    config: TextConfig
    params: Params  # on the devices of the mesh
    tokenizer: Any  # a `tokenizers.Tokenizer`
    mesh: jax.sharding.Mesh
    folder: Path | None = None  # of the tokenizer's files; None: there is only the tokenizer

    @property
    def special(self) -> Special:
        """The special tokens of the model."""
        return special_tokens(self.tokenizer, self.folder)


def opened(folder: str | Path, tokenizer: str | None = None, mesh: Mesh | None = None) -> TextModel:
    """The model of a finished run, or of an Orbax or Hugging Face folder, on all devices.

    Args:
      folder: as of `jaxgrow.checkpoints.open_checkpoint`.
      tokenizer: as of `train.data.text.Data`; None: the one that lies in the folder.
      mesh: how the devices share it; None: each has all of it.

    Raises:
      UserError: there is no such model, it is none that predicts tokens, or its tokenizer is
        missing or too large for it.
    """
    source = _source(folder)
    config = source.config
    if not isinstance(config, TextConfig) or config.predicts != "tokens":
        what = "images" if not isinstance(config, TextConfig) else config.predicts
        raise UserError(
            f"{folder} is a {type(config).__name__} of {what}: this is for models that predict tokens"
        )
    beside = text.folder_of(tokenizer) if tokenizer else Path(folder).expanduser()
    loaded = (
        text.tokenizer(tokenizer) if tokenizer else text.tokenizer_of(Path(folder).expanduser())
    )
    fits(loaded, config)
    devices = (mesh or Mesh()).over(jax.devices())
    return TextModel(config, source.shard(devices), loaded, devices, beside)


def config_of(folder: str | Path) -> Config:
    """
    Raises:
      UserError: there is no model.
    """
    return _source(folder).config


def fits(tokenizer: Any, config: TextConfig) -> None:
    """
    Raises:
      UserError: the tokenizer has tokens that the model has not.
    """
    if (size := tokenizer.get_vocab_size()) > config.vocab:
        raise UserError(
            f"the tokenizer has {size} tokens, but the model {config.vocab}: it is not the model's own"
        )


def _source(folder: str | Path) -> Any:
    try:
        return open_checkpoint(folder)
    except CheckpointError as error:
        raise UserError(str(error)) from error
