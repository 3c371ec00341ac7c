"""How does a LoRA grow together with the checkpoint in whose folder it is written?"""

from collections.abc import Sequence
from pathlib import Path

from jaxgrow.checkpoints.io.files import ADAPTER
from jaxgrow.checkpoints.source import Checkpoint, Grown, Source
from jaxgrow.checkpoints.writing import COMPANIONS, Output
from jaxgrow.extras.hf_peft.reading import read_peft_beside
from jaxgrow.extras.hf_peft.saving import module_ranks, write_into
from jaxgrow.growth.maps import Growth

_DORA = (
    "transformers 5 loads a DoRA in the folder of its model without the magnitudes. Load it from a folder with only "
    f"{' and '.join(ADAPTER)}, with PeftModel.from_pretrained, or merge the DoRA into its model before growing"
)


class GrownLoRA:
    """A LoRA in the layout of PEFT, grown by the growth of its model.

    Args:
      source: the model before the growth.
      growth: the growth.
      folder: the folder of the LoRA.

    Raises:
      CheckpointError: as `read_peft_beside`.
      ValueError: the growth does not fit the LoRA.
    """

    def __init__(self, source: Checkpoint, growth: Growth, folder: str | Path):
        self.folders: Sequence[Path] = [Path(folder).expanduser()]
        self._source, self._growth = source, growth
        self._adapter = read_peft_beside(folder, source).grown(growth)
        ranks = sorted({*module_ranks(self._adapter).values()})
        modules = len(self._adapter.lora.targets)
        text = f"with LoRA: {modules} modules of rank {' and '.join(map(str, ranks))}"
        self.notes: Sequence[str] = [
            text,
            *self._adapter.notes,
            *[_DORA] * bool(self._adapter.gains),
        ]

    def write(self, part: Path, model: Source | None, output: Output) -> list[str]:
        """Write the LoRA, which records the folder as that of its model if it holds one."""
        if model is None:
            return write_into(part, self._adapter, Grown(self._source, self._growth))
        return write_into(part, self._adapter, model, str(output.dst))


COMPANIONS.add("lora", GrownLoRA)
