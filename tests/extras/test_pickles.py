"""Pickles with every kind of object pass the check that runs before PyTorch loads them."""

import pickle
from collections import Counter, OrderedDict, defaultdict
from datetime import datetime
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from jaxgrow.extras.integrations.torch_reader import check_pickle
from jaxgrow.untrusted import chosen_file


class Level(Enum):
    HIGH = 1


class Items(list):
    """A list with attributes."""

    itself: Any


class Members(set):
    """A set that a pickle makes empty, and fills item by item."""


class Entries(OrderedDict):
    """A dict with attributes."""

    more: Any


class Named:
    """An object that is made with keyword arguments (NEWOBJ_EX)."""

    name: str

    def __new__(cls, *, name):
        made = super().__new__(cls)
        made.name = name
        return made

    def __getnewargs_ex__(self):
        return (), {"name": self.name}


class Slotted:
    __slots__ = ("value",)


def _fill(made, state):
    made.update(state)


class Made:
    """An object that a call of another object makes, and another function fills."""

    def __reduce__(self):
        return partial(dict, a=1), (), {"b": 2}, iter([3, 4]), iter([(5, 6)]), _fill


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_kind_of_object_are_checked(tmp_path, protocol):
    slotted, entries, items = Slotted(), Entries(a=Items([1, 2])), Items([b"a", bytearray(b"b")])
    slotted.value, entries.more, items.itself = np.float32(1), {1j}, items
    values = [Counter("ab"), defaultdict(list, a=[1]), frozenset({PurePosixPath("a")}), {1, 2}]
    values += [entries, items, Members("ab"), np.arange(3), datetime.now(), range(3), {Made: Level}]
    if protocol >= 2:
        values += [slotted, Made(), Named(name="a"), {Level.HIGH: Fraction(1, 3)}]
    file = tmp_path / "state"
    file.write_bytes(pickle.dumps(values, protocol))
    check_pickle(chosen_file(file))
