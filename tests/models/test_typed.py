"""One validator for values from text and JSON."""

from dataclasses import dataclass
from typing import Literal

import pytest

from jaxgrow import typed
from jaxgrow.models import Adapter, GPT2Config, from_json


@dataclass(frozen=True)
class Inner:
    size: int
    at: tuple[str, ...] = ("mlp",)


@dataclass(frozen=True)
class Outer:
    rate: float = 0.5
    kind: Literal["a", "b", "c"] = "a"
    rows: tuple[tuple[float, ...], ...] = ()
    count: int | None = None
    inner: Inner | None = None

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate must be positive, but is {self.rate}")


def test_json_becomes_the_types_of_the_fields():
    content = {"rate": 1, "rows": [[1, 2.5], []], "count": 3, "inner": {"size": 2, "at": ["x"]}}
    assert typed.build_dataclass(Outer, content) == Outer(
        1, "a", ((1, 2.5), ()), 3, Inner(2, ("x",))
    )
    assert typed.build_dataclass(Outer, {"inner": None}) == Outer()


@pytest.mark.parametrize(("content", "says"), [
    ({"rate": "1"}, "Outer: rate: expected float, but got '1'"),
    ({"rate": True}, "Outer: rate: expected float, but got True"),
    ({"count": 2.0}, "Outer: count: expected int or None, but got 2.0"),
    ({"kind": "d"}, "Outer: kind: expected 'a' or 'b' or 'c', but got 'd'"),
    ({"kind": ["a"]}, "Outer: kind: expected 'a' or 'b' or 'c', but got ['a']"),
    ({"rows": [[1], ["x"]]}, "Outer: rows: expected tuple[tuple[float, ...], ...], but got [[1], ['x']]"),
    ({"inner": {"size": None}}, "Outer: inner: Inner: size: expected int, but got None"),
    ({"inner": {}}, "Outer: inner: Inner: size is missing"),
    ({"inner": 3}, "Outer: inner: expected Inner or None, but got 3"),
    ({"sice": 3}, "Outer has no field 'sice'; its fields are rate, kind, rows, count, inner"),
    ({"rate": -1.0}, "rate must be positive, but is -1.0"),
])  # fmt: skip
def test_wrong_json_is_explained_with_place_and_value(content, says):
    with pytest.raises(ValueError) as raised:
        typed.build_dataclass(Outer, content)
    assert str(raised.value) == says


def test_the_config_of_a_model_is_read_by_the_same_rules():
    config = GPT2Config(layers=3, adapter=Adapter(size=4, at=("mlp",)))
    assert from_json(config.as_json()) == config
    for key, value, says in (
        ("layers", "3", "GPT2Config: layers: expected int, but got '3'"),
        ("layers", True, "GPT2Config: layers: expected int, but got True"),
        ("dtype", "fp8", "dtype: expected 'float32' or 'bfloat16' or 'float64', but got 'fp8'"),
        ("adapter", {"sise": 4}, "adapter: Adapter has no field 'sise'"),
        ("adapter", 4, "adapter: expected Adapter or None, but got 4"),
        ("typo", 1, "GPT2Config has no field 'typo'"),
    ):
        with pytest.raises(ValueError, match=says):
            from_json(config.as_json() | {key: value})
