"""Fits of savings over sizes and budgets."""

import json

import numpy as np
import pytest
from advice import command, refused
from scipy import stats

from train.common.errors import UserError
from train.extras.advice.fits import Measured, fit_savings
from train.scaling import read_savings


def plane(parameters, tokens):
    return 0.1 + 0.02 * np.log2(parameters / 1e5) + 0.03 * np.log2(tokens / 20)


def test_a_plane_is_found_and_continued():
    places = [(1e5, 20.0), (2e5, 20.0), (2e5, 50.0), (4e5, 20.0)]
    found = fit_savings([Measured(at, (plane(*at),) * 2, 0) for at in places])
    for axis, slope in (("parameters", 0.02), ("tokens per parameter", 0.03)):
        assert found.slope(axis) == pytest.approx((slope, 0), abs=1e-9)
    assert found.expected((1e9, 100.0)) == pytest.approx((plane(1e9, 100), 0), abs=1e-9)


def test_intervals_are_those_of_a_regression():
    rng = np.random.default_rng(0)
    sizes = [1e5, 2e5, 5e5]
    points = [Measured((size, 20.0), tuple(rng.normal(0.15, 0.02, 3)), 0) for size in sizes]
    x, y = np.repeat(np.log2(sizes), 3), np.concatenate([p.saved for p in points])
    oracle = stats.linregress(x, y)
    t = stats.t.ppf(0.975, len(y) - 2)
    found = fit_savings(points)
    assert found.slope("parameters") == pytest.approx((oracle.slope, t * oracle.stderr))
    value, half = found.expected((1.0, 20.0))  # log2 is 0, so this is the intercept
    assert (value, half) == pytest.approx((oracle.intercept, t * oracle.intercept_stderr))


@pytest.mark.parametrize("points", [
    [Measured((1e5, 20.0), (0.1, 0.2), 0), Measured((1e5, 20.01), (0.1, 0.2), 0)],
    # size and budget change together
    [Measured((1e5, 20.0), (0.1, 0.2), 0), Measured((2e5, 40.0), (0.1, 0.2), 0)],
    # two points always fit a line
    [Measured((1e5, 20.0), (0.1,), 0), Measured((2e5, 20.0), (0.2,), 0)],
])  # fmt: skip
def test_what_tells_nothing_is_refused(points):
    with pytest.raises(UserError, match="do not show how a saving changes"):
        fit_savings(points)


def compared(folder, name, parameters, saved, below):
    scratch = {"run": "scratch", "parameters": parameters, "tokens_per_parameter": 20.0}
    half = scratch | {"run": "half", "tokens_per_parameter": 15.0, "saved_frontier": saved}
    half |= {"below_frontier": [below] * len(saved)}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"rows": [scratch | {"below_frontier": [False]}, half]}))
    return f"half={path}"


def test_the_command(tmp_path):
    small = compared(tmp_path, "small", 100_000, [0.10, 0.12], below=False)
    large = compared(tmp_path, "large", 200_000, [0.13, 0.15], below=True)
    # tokens of the baseline, not of the run
    assert read_savings(large) == Measured((200_000, 20.0), (0.13, 0.15), 2)
    text = command("train.scaling", large, small, "--at", "400000:20")
    assert text.index("| 100,000 ") < text.index("| 200,000 ")
    assert "A doubling of parameters adds 3.0 % ± 6.1." in text
    assert "Expected at 4e+05 parameters, 20 tokens per parameter: 17.0 % ±" in text
    # Lower bounds are fitted as values, which the command says.
    assert "The fit uses the lower bounds as if they were values (2 of 4 seeds)." in text


@pytest.mark.parametrize(("between", "covered", "abs_"), [(0.0, 0.95, 0.025), (0.04, 0.84, 0.04)])
def test_intervals_are_too_narrow_if_sizes_vary_for_other_reasons(between, covered, abs_):
    """The numbers of docs/concepts/comparison.md, for sizes and seeds of docs/results/muon.md.

    The seeds of a size vary by 4 percentage points, the sizes by ``between`` around the line.
    """
    rng, hits, trials = np.random.default_rng(0), np.zeros(2), 400
    sizes = {24_832: 3, 44_512: 3, 94_416: 3, 162_752: 2, 354_720: 2}
    line = {size: 0.17 - 0.02 * np.log2(size / 94_416) for size in sizes}
    for _ in range(trials):
        points = []
        for size, seeds in sizes.items():
            saved = line[size] + rng.normal(0, between) + rng.normal(0, 0.04, seeds)
            points.append(Measured((size, 20.0), tuple(saved), 0))
        found = fit_savings(points)
        slope, expected = found.slope("parameters"), found.expected((size, 20.0))
        for i, ((value, half), true) in enumerate([(slope, -0.02), (expected, line[size])]):
            hits[i] += abs(value - true) <= half
    assert hits / trials == pytest.approx((covered, covered), abs=abs_)


@pytest.mark.parametrize(("text", "says"), [
    ("half=nowhere.json", "is not RUN=FILE with an existing file compare.json"),
    ("other={}", "has no run 'other'; its runs are scratch, half"),
    ("half={}", "does not have a saving against the frontier for each seed"),
    (f"half={__file__}", "is not a compare.json of python -m train.compare: JSONDecodeError"),
])  # fmt: skip
def test_bad_comparisons(tmp_path, text, says):
    path = compared(tmp_path, "one", 1000, [0.1, None], below=False).partition("=")[2]
    with pytest.raises(UserError, match=says):
        read_savings(text.format(path))


def test_one_comparison_does_not_count_twice(tmp_path):
    one = compared(tmp_path, "one", 1000, [0.1, 0.2], below=False)
    again = one.replace(str(tmp_path), f"{tmp_path}/../{tmp_path.name}")
    said = refused(lambda: command("train.scaling", one, again))
    assert "a comparison is given twice" in said


@pytest.mark.parametrize("at", ["1e9:-1", "large:20", "1e9:nan", "inf:20"])
def test_a_bad_place_is_refused(at):
    said = refused(lambda: command("train.scaling", "half=x.json", "--at", at))
    assert "--at takes parameters and tokens per parameter" in said
