"""Which reader and which writer does the checkpoint of another trainer need?"""

from pathlib import Path
from typing import Any, TypeAlias

from jaxgrow.extras.integrations.easydel_tree import EasydelTree, EasydelWriter, is_easydel
from jaxgrow.extras.integrations.levanter_tree import LevanterTree, LevanterWriter, is_levanter
from jaxgrow.extras.integrations.orbax_tree import (
    ItemsWriter,
    OrbaxItems,
    OrbaxTree,
    Writer,
    has_items,
    is_orbax,
)
from jaxgrow.extras.integrations.torch_tree import TorchTree, TorchWriter, is_distributed

Tree: TypeAlias = OrbaxTree | OrbaxItems | TorchTree
AnyWriter: TypeAlias = Writer | ItemsWriter | TorchWriter
_WRITERS: dict[type, Any] = {
    OrbaxTree: Writer,
    OrbaxItems: ItemsWriter,
    LevanterTree: LevanterWriter,
    EasydelTree: EasydelWriter,
    TorchTree: TorchWriter,
}


def open_tree(folder: Path) -> Tree:
    """Open a checkpoint of another trainer.

    Raises:
      CheckpointError: the folder contains none, or it is damaged.
    """
    if not is_orbax(folder):
        if is_easydel(folder):
            return EasydelTree(folder)
        if is_levanter(folder):
            return LevanterTree(folder)
        if is_distributed(folder):
            return TorchTree(folder)
    return OrbaxItems(folder) if has_items(folder) else OrbaxTree(folder)


def writer(source: Tree, folder: Path, process: int) -> AnyWriter:
    """The writer for a checkpoint like ``source``."""
    return _WRITERS[type(source)](source, folder, process)
