"""Races compare several operators on one checkpoint, each with a few training steps."""

import json
from dataclasses import replace

import pytest
import runs
from advice import command, refused

from train import race
from train.analysis.runs import Run
from train.common.errors import Diverged, UserError
from train.extras import plots
from train.extras.advice import operator_ranking
from train.plan.methods import Scratch
from train.pretrain import run_experiment

SMALL, LARGE = runs.MODEL, runs.LARGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a finished small run (``small``) and the large config (``large.py``)."""
    here = tmp_path_factory.mktemp("race")
    run_experiment(runs.experiment(here, name="small", model=SMALL), here / "small")
    runs.script(here, runs.experiment(here, name="large", model=LARGE, method=Scratch()))
    return here


def raced(folder, *options, small="small"):
    options += ("--workdir", folder / "race")
    return command("train.race", folder / "large.py", folder / small, *options)


def test_a_race_grows_and_trains_with_each_operator(folder):
    options = "--by stack,llama_pro,interleave,hypercloning --steps 20 --seeds 0,1"
    said = raced(folder, *options.split())
    text = (folder / "race" / "race.md").read_text()
    assert text in said and "Rank correlation" in text
    everything = json.loads((folder / "race" / "race.json").read_text())
    found = everything["ranked"]
    assert {row["by"] for row in found} == {"stack", "llama_pro", "interleave"}
    ends = [sum(row["loss"][-1]) for row in found]
    assert ends == sorted(ends)  # best run first
    small = Run("small", 0, folder / "small")
    for row in found:
        assert row["flops"] == found[0]["flops"] and len(row["loss"]) == 1 + len(row["flops"])
        assert all(len(losses) == 2 for losses in row["loss"])
        # function-preserving, so the race starts at the final loss of the small model
        if row["by"] == "llama_pro":  # float32, different programs
            assert row["loss"][0] == pytest.approx([small.loss] * 2, abs=1e-5)
        finished = Run("", 0, folder / "race" / f"race_{row['by']}-seed0")
        assert finished.loss == pytest.approx(row["loss"][-1][0], rel=1e-3)
        # the growth itself costs almost nothing
        flops = finished.result["flops"] - small.result["flops"]
        assert flops == pytest.approx(row["flops"][-1], rel=1e-2)
    assert (folder / "race" / "race.png").stat().st_size > 1000
    # The race continues without the operators that cannot reach the target sizes.
    why = "axis 'layers': hypercloning grows embed, heads, mlp"
    assert why in everything["impossible"]["hypercloning"]
    (line,) = (line for line in text.splitlines() if line.startswith("| hypercloning"))
    assert f"impossible: {why}" in line


def test_the_steps_of_a_race_replace_the_seconds_of_its_config(folder):
    timed = runs.experiment(folder, model=LARGE, steps=0, seconds=9.0)
    found = race.operator_experiment(timed, folder / "small", "stack", 20)
    assert (found.steps, found.seconds) == (20, None)


@pytest.mark.slow
def test_the_race_continues_without_an_operator_that_diverges(folder, monkeypatch):
    stopped = {"race_stack": 1, "race_interleave": None}  # name of an experiment -> seed

    def trained(experiment, *_):
        if stopped.get(experiment.name) == experiment.seed:
            raise Diverged("the loss is nan")
        return run_experiment(experiment, *_)

    monkeypatch.setattr(race, "run_experiment", trained)
    options = ("--by", "stack,interleave", "--steps", "20", "--seeds", "0,1")
    said = raced(folder, *options)
    assert "| stack | diverged: the loss is nan |" in " ".join(said.split())
    everything = json.loads((folder / "race" / "race.json").read_text())
    assert everything["diverged"] == {"stack": "the loss is nan"}
    assert [row["by"] for row in everything["ranked"]] == ["interleave"]
    stopped["race_interleave"] = 0
    said = refused(lambda: raced(folder, *options))
    assert "all operators diverged; lower optim.peak_lr" in said


def made(folder, name: str, losses, costs, learning: float | None = None) -> Run:
    """Write a finished run that grew an imported model of 1000 FLOPs, with losses at further costs."""
    folder = folder / name
    folder.mkdir()
    lines = [("import small", 0, 0.0, 5.0)]
    lines += [("learn maps", 1, learning / 2, 9.0)] if learning else []
    lines += [("grow small", 0, learning or 0.0, losses[0])]
    both = enumerate(zip(costs, losses[1:], strict=True), 1)
    lines += [("train large", step, cost, loss) for step, (cost, loss) in both]
    keys = ("phase", "step", "flops", "val_loss")
    log = [dict(zip(keys, (p, s, 1000 + c, v), strict=True)) for p, s, c, v in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    result = {"phases": [{"phase": "import small", "model": "small", "flops": 1000}]}
    result |= {"val_loss": losses[-1], "model": LARGE.as_json(), "compile_seconds": 0.0}
    (folder / "result.json").write_text(json.dumps(result))
    return Run(name, 0, folder)


def test_losses_are_read_at_equal_flops_not_at_equal_steps(tmp_path, figures):
    """``dear`` ends with a lower loss than ``cheap``, but not at 80 FLOPs, where ``cheap`` ends."""
    finished = {
        "dear": [made(tmp_path, "dear", [6.0, 4.0, 2.0], [80.0, 160.0])],
        "late": [made(tmp_path, "late", [5.0, 1.0], [130.0], learning=90.0)],
        "cheap": [made(tmp_path, "cheap", [6.0, 5.0, 3.0], [40.0, 80.0])],
        "ligo": [made(tmp_path, "ligo", [5.0, 3.0], [130.0], learning=30.0)],
    }
    found = {row["by"]: row for row in operator_ranking.ranked_rows(finished)}
    assert list(found) == ["cheap", "dear", "ligo", "late"]
    assert found["cheap"]["flops"] == [20, 40, 80]
    assert found["cheap"]["loss"] == [[6.0], [5.5], [5.0], [3.0]]
    assert found["dear"]["loss"] == [[6.0], [5.5], [5.0], [4.0]]
    assert found["ligo"]["loss"] == [[5.0], [None], [4.8], [4.0]]
    assert found["late"]["loss"] == [[5.0], [None], [None], [None]]
    text = operator_ranking.ranking_table(list(found.values()), {}, {}, [0])
    assert "at 80 FLOPs" in text and text.count("not yet grown") == 4 and "Rank correlation" in text

    after = operator_ranking.after_growing
    curves = {by: [(r, after(r)) for r in some] for by, some in finished.items()}
    plots.plot_race(curves, tmp_path / "race.png")
    (axes,) = figures[0].axes
    assert axes.get_xscale() == "symlog" and axes.get_xlabel() and axes.get_ylabel()
    assert axes.lines[0].get_xdata().tolist() == [0, 80, 160]


WIDE, ODD = {"embed": 16, "heads": 4, "mlp": 32}, {"embed": 12, "heads": 3, "mlp": 24}
BOTH = ["fpi+stack", "fpi+interleave", "aki+stack", "aki+interleave"]


@pytest.mark.parametrize(("changes", "expected"), [
    ({"layers": 4}, ["stack", "interleave"]),
    (WIDE, ["fpi", "aki"]),
    ({"layers": 4} | ODD, BOTH),
])  # fmt: skip
def test_by_default_a_race_is_of_operators_that_reach_the_sizes(folder, changes, expected):
    base = runs.experiment(folder, name="large", model=replace(SMALL, **changes), method=Scratch())
    assert race.default_operators(base, folder / "small") == expected
    for by in expected:
        assert race.operator_experiment(base, folder / "small", by, 20).name == f"race_{by}"


def test_a_race_takes_operators_of_the_form(folder):
    model = replace(SMALL, layers=4, tied=False)
    base = runs.experiment(folder, name="large", model=model, method=Scratch())
    with pytest.raises(ValueError, match="use the operator untie"):
        race.operator_experiment(base, folder / "small", "stack", 20)
    grown = race.operator_experiment(base, folder / "small", "stack+untie", 20).plan[1]
    assert grown.config == model


@pytest.mark.parametrize(("first", "told"), [
    ([1.0, 2.0, 3.0], "1.00"),
    ([3.0, 2.0, 1.0], "-1.00"),
    ([1.0, 3.0, 2.0], "0.50"),
    ([1.0, 1.0, 2.0], "0.87"),  # equal losses share the mean rank
    ([1.0, 1.0 + 1e-7, 1.0 + 2e-7], None),  # function-preserving operators, up to rounding
])  # fmt: skip
def test_rank_correlation_by_hand(first, told):
    losses = [[[loss], [float(i)]] for i, loss in enumerate(first)]
    ranked = [{"by": f"{i}", "flops": [1.0], "loss": loss} for i, loss in enumerate(losses)]
    text = operator_ranking.ranking_table(ranked, {}, {}, [0])
    found = text.rpartition("and at the end: ")[2].strip()
    assert "Rank correlation" not in text if told is None else found == told


@pytest.mark.parametrize(("options", "says"), [
    (("--by", "stak"), "race: there is no operator 'stak'"),
    (("--by", "hypercloning"), "race: no operator reaches the sizes of the large model: hypercloning: axis 'layers': "),
    (("--by", ""), "--by names no operator"),
    (("--seeds", "9", "--set", "mesh.fsdp=3"), ": a mesh of data=any x fsdp=3 x tensor=1 does not fit 4 devices"),
    (("--seeds", "1,0,1"), "--seeds names 1 more than once"),
    (("--set", "steps=9"), "steps=9 has no effect on a race, which has its own --steps: leave it out"),
    (("--set", "seed=9"), "seed=9 has no effect on a race, which has its own --seeds: leave it out"),
    (("--set", "optim.decay=0.5"), "has no effect on a race, which has its own constant learning rate: leave it out"),
    (("--set", "method.drop.theta=0.5"), "has no effect on a race, which has its own method: leave it out"),
])  # fmt: skip
def test_bad_input(folder, options, says):
    assert says in refused(lambda: raced(folder, *options))


def test_a_race_needs_a_finished_run_of_the_small_model(folder):
    said = refused(lambda: raced(folder, small="nothing"))
    assert "give the folder of a finished run of the small model" in said


@pytest.mark.parametrize(("changes", "which"), [({}, "none"), ({"context": 16}, "context")])
def test_models_of_the_same_depth_and_width_have_no_default_operators(folder, changes, which):
    base = runs.experiment(folder, name="same", model=replace(SMALL, **changes))
    message = rf"no operator is the default \(sizes that differ: {which}\)"
    with pytest.raises(UserError, match=message):
        race.default_operators(base, folder / "small")
