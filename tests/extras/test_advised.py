"""The advice of messages that name a setting or a command works: a test follows it."""

import re
import runpy
from pathlib import Path

import advice_library
import advice_train
import pytest
from advice import Case, Place, refused

MODULES = [advice_library, advice_train]
ROOT = Path(__file__).parents[2]
# A message that matches names a setting, an option, a command or a package to install.
ADVISES = re.compile(
    r"--[a-z]|CONFIG:|pip install|python -m |\btrain\.[a-z]+\b"
    r"|\b(?:data|model|optim|mesh|method)\.[a-z_]+"
    r"|jaxgrow (?:grow|convert|inspect|interpolate|architectures|prune|report|suggest)\b"
    r"|\b(?i:set|leave out|use|give|raise|lower|choose|needs?)\b[^;.]*?\b[a-z_]+=[^,]"
    r"|: (?:also )?(?:set|raise|lower|leave|leave out) (?!both|the|one|them)[a-z_]{3,}"
    r"|[:;] leave it out to\b|RUN@STEP"
)
# The number of messages that match and have no case. A case is impossible where the advice is to
# install a package, or depends on the machine; other tests follow some others. It may only fall.
WITHOUT_CASE = 72
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


def test_a_new_message_that_advises_has_a_case():
    lines = runpy.run_path(str(ROOT / "docs/messages.py"))["all_messages"]()
    texts = dict.fromkeys(x.split(": ", 1)[1] for x in lines if x.startswith("- "))
    words = [case.says for module in MODULES for case in module.CASES]
    without = [
        text
        for text in texts
        if ADVISES.search(re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "{}", text))
        and not any(says in text for says in words)
    ]
    hint = "give the new one a case in tests/support/advice_*.py"
    assert len(without) <= WITHOUT_CASE, "\n".join([hint, *without])
