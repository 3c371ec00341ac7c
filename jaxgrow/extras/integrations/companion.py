"""How does the optimizer state of a PyTorch run grow together with its Hugging Face folder?"""

from collections.abc import Sequence
from pathlib import Path

from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import Checkpoint, Source
from jaxgrow.checkpoints.writing import COMPANIONS, Output
from jaxgrow.extras.integrations import torch_optimizer
from jaxgrow.growth.maps import Growth


class GrownOptimizer:
    """The optimizer state of a PyTorch run, grown by the growth of its model.

    Args:
      source: the model before the growth.
      growth: the growth.
      how: the policy, and the path of the state; None instead of the path: it is in the folder of
        the model.

    Raises:
      CheckpointError: the model is not in a Hugging Face folder.
    """

    folders: Sequence[Path] = ()
    notes: Sequence[str] = ()

    def __init__(
        self, source: Checkpoint, growth: Growth, how: tuple[torch_optimizer.Policy, Path | None]
    ):
        if not isinstance(source, HuggingFace):
            raise CheckpointError(
                f"--optimizer {how[0]} grows the optimizer state of a PyTorch run, but "
                f"{source.folder} is not a Hugging Face folder. Omit --optimizer"
            )
        self._source, self._growth, self._how = source, growth, how

    def write(self, part: Path, model: Source | None, output: Output) -> list[str]:
        """Grow the state into the folder of the grown model."""
        policy, path = self._how
        return torch_optimizer.write_beside(self._source, part, self._growth, policy, path)


COMPANIONS.add("optimizer", GrownOptimizer)
