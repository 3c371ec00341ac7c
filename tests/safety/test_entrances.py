"""Every function that opens a file is attacked, or a row says why it cannot be.

`tests/support/entrances.py` describes the table. Each attack changes one untrusted file of a valid
input. The command must then end with one of the errors that commands print in one line, nothing
outside the input and the output may change, no code may run, and nothing may block.
"""

import os
import random
import shutil
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import entrances
import entrances_data
import entrances_library
import entrances_runs
import pytest
import random_changes
from entrances import ATTACKS, NAMES, ROOT

from jaxgrow.checkpoints import CheckpointError
from jaxgrow.untrusted import UntrustedError
from train.common.errors import UserError, explained_error

# PyTorch warns that it reads and writes in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TABLES = {"library": entrances_library, "data": entrances_data, "runs": entrances_runs}
SUBJECTS = {(t, name): x for t, module in TABLES.items() for name, x in module.SUBJECTS.items()}
# The reason of each entrance, and its subjects.
ROWS = {
    f"{file}::{name}": (row.why, {(table, subject) for subject in row.subjects})
    for table, module in TABLES.items()
    for file, rows in module.ROWS.items()
    for names, row in rows.items()
    for name in names.split()
}
# The errors that the commands print in one line.
ERRORS = (CheckpointError, UntrustedError, UserError, OSError)
SECRET = b"-----the content of a file outside-----"
SECONDS = 120


# The fast tests run these attacks on all subjects, and all attacks on subjects that contain names.
FAST = {"link", "FIFO", "truncated", "missing", "pickle"}


def _marks(subject, attack=""):
    slow = bool(attack) and attack not in FAST and not subject.named
    others = [pytest.mark.interop] * bool(subject.needs) + [pytest.mark.slow] * slow
    return [pytest.mark.extra, *others]


def test_every_entrance_has_a_row_with_a_subject_or_a_reason():
    """A new function that opens a file needs a row in a table."""
    found = entrances.scanned().keys()
    assert sorted(found - ROWS.keys()) == [], "add a row for each of these entrances"
    assert sorted(ROWS.keys() - found) == [], "these functions open no file: delete their rows"
    assert all(why or subjects for why, subjects in ROWS.values())
    assert {name for _, subjects in ROWS.values() for name in subjects} == SUBJECTS.keys()
    for subject in SUBJECTS.values():
        assert subject.harmless.keys() | subject.skips.keys() <= ATTACKS.keys() | NAMES.keys()


@contextmanager
def called(names: set[str]):
    """Collect the entrances that are called within a block, by all threads."""

    def profile(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT)):
            where = frame.f_code.co_qualname.partition(".<locals>")[0]
            names.add(f"{file.removeprefix(f'{ROOT}/')}::{where}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Blocked(KeyboardInterrupt):
    """Nothing but an interrupt passes through the entrances unchanged."""


@contextmanager
def limited():
    """Fail if a block takes longer than `SECONDS`, such as for a FIFO without a writer."""

    def late(number, frame):
        raise Blocked(f"the attack blocked the process for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that copies the valid input of a subject, which is built only once."""
    built = {}

    def copy(key, folder: Path) -> Path:
        if SUBJECTS[key].needs:
            pytest.importorskip(SUBJECTS[key].needs)
        if key not in built:
            whole = tmp_path_factory.mktemp("subject") / "in"
            whole.mkdir()
            built[key] = (whole, SUBJECTS[key].make(whole).relative_to(whole))
        whole, file = built[key]
        shutil.copytree(whole, folder / "in", symlinks=True)
        return folder / "in" / file

    return copy


@pytest.mark.parametrize(
    "key", [pytest.param(key, id="-".join(key), marks=_marks(x)) for key, x in SUBJECTS.items()]
)
def test_a_subject_reaches_its_entrances(key, made, tmp_path):
    """Without an attack the input is valid, and it passes all entrances that name the subject."""
    made(key, tmp_path)
    names: set[str] = set()
    with called(names):
        SUBJECTS[key].use(tmp_path / "in")
    assert {entrance for entrance, (_, subjects) in ROWS.items() if key in subjects} <= names


def _state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(p): (p.lstat().st_mode, p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))
    }


CASES = [
    pytest.param(key, attack, id=f"{'-'.join(key)}-{attack}", marks=_marks(subject, attack))
    for key, subject in SUBJECTS.items()
    for attack in [*ATTACKS, *(NAMES if subject.named else ())]
    if attack not in subject.skips
]


@pytest.mark.parametrize(("key", "attack"), CASES)
def test_an_attack_ends_in_one_line(key, attack, made, tmp_path, monkeypatch):
    subject = SUBJECTS[key]
    mark = tmp_path / "executed"
    monkeypatch.setenv("ENTRANCES_MARK", str(mark))
    file = made(key, tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    if attack in ATTACKS:
        ATTACKS[attack](file, outside)
    else:
        subject.named(tmp_path / "in", NAMES[attack].format(outside))
    before = _state(outside)
    error = None
    with limited():
        try:
            subject.use(tmp_path / "in")
        except ERRORS as found:
            error = found
    assert not mark.exists(), "a pickle was executed"
    assert _state(outside) == before
    copied = [p for p in tmp_path.glob("out/**/*") if p.is_file() and SECRET in p.read_bytes()]
    assert copied == []
    beside = {p.name for p in tmp_path.iterdir()} - {"in", "out", "outside"}
    assert beside == set(), "something was written beside the output"
    assert error is not None or attack in subject.harmless, "the attack succeeded"


TIMES = int(os.environ.get("JAXGROW_MUTATIONS", "8"))
SEED = int(os.environ.get("JAXGROW_SEED", random.randrange(1 << 32)))


def _ends_in_one_line(table: str, error: BaseException) -> bool:
    if table == "library":
        return isinstance(error, (*ERRORS, MemoryError))
    return isinstance(error, Exception) and explained_error(error) is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # libraries warn about wrong values
@pytest.mark.parametrize("key", SUBJECTS, ids="-".join)
def test_random_changes_end_in_one_line(key, made, tmp_path):
    """Set ``JAXGROW_MUTATIONS`` for another number of changes, and ``JAXGROW_SEED`` to repeat one."""
    rng = random.Random(f"{SEED} {key}")
    wrong = []
    for i in range(TIMES):
        file = made(key, tmp_path / str(i))
        content = random_changes.changed(file.read_bytes(), rng)
        file.write_bytes(content)
        try:
            with limited():
                SUBJECTS[key].use(tmp_path / str(i) / "in")
        except BaseException as error:
            if not _ends_in_one_line(key[0], error):
                wrong.append(f"{type(error).__name__}: {error!s:.300} for {content!r:.300}")
        shutil.rmtree(tmp_path / str(i))
    assert wrong == [], f"seed {SEED}: " + "\n".join(wrong)
