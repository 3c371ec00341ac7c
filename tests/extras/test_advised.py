"""The advice of messages that name a setting or a command works: a test follows it."""

import re
from pathlib import Path

import advice_library
import advice_train
import pytest
from advice import Case, Place, refused

MODULES = [advice_library, advice_train]
MAKERS = {name: make for module in MODULES for name, make in module.MAKERS.items()}
MADE: dict[str, Path] = {}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Leave out slow cases by default, and cases whose package is not installed."""
    return [pytest.mark.slow] * case.slow + [pytest.mark.interop] * bool(case.needs)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=marks(c), id=c.says) for module in MODULES for c in module.CASES],
)
def test_following_the_advice_succeeds(home, tmp_path, case: Case):
    if case.needs:
        pytest.importorskip(case.needs)
    place = Place(home, tmp_path, MAKERS, MADE)
    said = refused(lambda: case.fails(place))
    assert all(words in said for words in re.split(r"\{.*?\}|\{.*", case.says)), said
    case.follows(place, said)
