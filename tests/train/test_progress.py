"""The progress bar shows the position of a run and its speed without compilation."""

import io
import re
import sys
from contextlib import closing

import pytest
import runs

from train import pretrain
from train.plan.methods import GrowTo
from train.store import recorder
from train.store.recorder import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def last(screen: Screen) -> str:
    return screen.getvalue().split("\r")[-1].strip()


def spent(flops: float, tokens: int, seconds: float, compiling: float) -> dict[str, float]:
    times = {"seconds": seconds, "compile_seconds": compiling}
    return {"flops": flops, "tokens": tokens} | times


BEFORE = spent(20.0, 500, 90.0, 80.0)  # mostly compilation
LATER = spent(40.0, 2500, 110.0, 90.0)


def test_the_bar_shows_the_step_and_the_speed_without_compiling(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with closing(Progress(total=100.0, done=0.0)) as bar:
        bar.phase("tiny: train large")
        bar.show(5, spent(25.0, 500, 90.0, 80.0), 3.14159)
        assert last(screen).startswith("tiny: train large  25%|")
        assert last(screen).endswith(", step 5, loss 3.142")
        bar.show(15, spent(50.0, 1500, 99.0, 85.0), 2.0)
        assert last(screen).endswith(", step 15, loss 2.000, 250 tokens/s, 0:00:08 left")
        bar.phase("tiny: train coarse1")
        bar.show(5, spent(60.0, 1600, 194.0, 170.0), 2.5)  # another compilation
        assert last(screen).endswith(", step 5, loss 2.500")
        bar.show(25, spent(75.0, 61_600, 209.0, 175.0), 2.25)
        assert "  75%|" in last(screen)
        assert last(screen).endswith(", step 25, loss 2.250, 6,000 tokens/s, 0:00:17 left")
    assert ", ," not in screen.getvalue()


def test_an_imported_model_is_a_part_of_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with closing(Progress(total=100.0, done=0.0)) as bar:
        bar.phase("tiny: import small")
        bar.add(300.0)
        bar.phase("tiny: train large")
        bar.show(5, BEFORE | {"flops": 350.0}, 3.0)
        assert last(screen).startswith("tiny: train large  88%|")
        bar.show(10, BEFORE | {"flops": 401.0}, 3.0)  # growing costs FLOPs that no one expected
        assert last(screen).startswith("tiny: train large 100%|")


@pytest.mark.slow  # The test above checks the bar itself.
def test_a_run_that_starts_from_another_run_ends_at_100_percent(small_run, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    e = runs.growing(small_run.parent, GrowTo(by=runs.DOUBLED), checkpoint_every=2, log_every=1)
    runs.killed(e, small_run.parent / "shown", 8 + 2)
    pretrain.run_experiment(e, small_run.parent / "shown")
    shown = re.findall(r"tiny: training +(\d+)%", screen.getvalue())
    assert sorted(map(int, shown)) == [*map(int, shown)] and shown[-1] == "100"


def test_where_nobody_looks_there_is_none(capsys):
    with closing(Progress(100.0, 0.0)) as bar:
        bar.phase("tiny: train large")
        bar.show(5, BEFORE, 3.0)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_line_says_where_the_run_is(capsys, monkeypatch):
    """A line appears at each validation, and after a minute without a line."""
    now = [0.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    with closing(Progress(100.0, 0.0, {"run": "demo", "seed": 3})) as progress:
        progress.phase("full model", 400, compiles=True)
        progress.show(10, BEFORE, 3.14159)
        assert capsys.readouterr().err == "full model: compiling ..\n"
        progress.say(10, BEFORE, val_loss=3.5)
        progress.show(20, LATER, 2.0)  # no output: the last line is less than a minute old
        now[0] = 60.0
        progress.show(30, LATER, 2.25)
    first, second = capsys.readouterr().err.splitlines()
    head = 'run=demo seed=3 phase="full model"'
    assert first == f"{head} step=10/400 loss=3.1416 val_loss=3.5000 eta=-"
    assert second == f"{head} step=30/400 loss=2.2500 eta=0:00:30"


def test_a_terminal_shows_one_estimate(monkeypatch):
    """The bar has the remaining time without compilation, so the lines above it have none."""
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with closing(Progress(100.0, 0.0, {"run": "demo", "seed": 3})) as bar:
        bar.phase("training", 400, compiles=True)
        assert last(screen).endswith("compiling ..")
        bar.show(5, BEFORE, 3.0)
        bar.show(20, LATER, 2.0)
        bar.say(20, LATER, val_loss=2.5)
    shown = screen.getvalue()
    assert "0:00:30 left" in shown and "eta" not in shown
    assert "run=demo seed=3 phase=training step=20/400 loss=2.0000 val_loss=2.5000" in shown
