"""The experiments of the papers have the settings that the papers state, or say that they do not."""

import re
from pathlib import Path

import pytest

from train import show
from train.common.errors import UserError
from train.config.experiment import Experiment, listed_experiments, load_as
from train.extras.labelled.downstream import FineTuning
from train.extras.stated import paper_statements, stated_report, stated_settings

ROOT = Path(__file__).parents[2]
ENTRIES = paper_statements()["stated"]
EXPERIMENTS = sorted({name for entry in ENTRIES for name in entry["experiments"]})
# The experiments of these files and these additions to the papers' have no published setting.
OWN = {
    "configs/papers/bert.py:small",
    "configs/papers/gpt.py:medium_stack",
    "configs/papers/roberta.py:small",
    "configs/papers/deit.py:ti",
    "configs/papers/cait.py:s_vcycle",
    *(f"configs/papers/swin.py:{n}" for n in ("t", "s", "b")),
    *(f"configs/papers/swin.py:l_384{n}" for n in ("_pld", "_sbld", "_20")),
}
DEVIATION = re.compile(r"# Deviation\(([^)]+)\): ([\w.]+): ")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def loaded(name):
    kind = FineTuning if name.startswith("configs/finetune.py") else Experiment
    return load_as(kind, name)[1]


def differing():
    """Return the settings that differ: ``{(paper, page, config file, setting)}``."""
    return {
        (s.paper, s.page, name.partition(":")[0], s.setting)
        for name in EXPERIMENTS
        for s in stated_settings(name, loaded(name))
        if s.differs
    }


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_the_settings_of_its_paper(name):
    """Each field is as stated, or the config has a line about it."""
    text = (ROOT / name.partition(":")[0]).read_text()
    explained = set(DEVIATION.findall(text))
    found = stated_settings(name, loaded(name))
    assert found
    for s in found:
        assert s.ours is not None or s.differs
        assert not s.differs or (s.paper, s.setting) in explained, s


def test_every_deviation_exists_and_has_a_row_on_its_page():
    found = differing()
    for file in sorted((ROOT / "configs" / "papers").glob("*.py")):
        path = str(file.relative_to(ROOT))
        written = set(DEVIATION.findall(file.read_text()))
        assert written == {(paper, setting) for paper, _, of, setting in found if of == path}
    for page in sorted({entry["page"] for entry in ENTRIES}):
        rows = re.findall(r"^\| `([\w.]+)` \| .* \| .* \| .* \|$", (ROOT / page).read_text(), re.M)
        assert set(rows) == {setting for _, of, _, setting in found if of == page}, page


def test_the_statements_are_those_of_the_four_papers():
    """Every experiment of the papers' configs is compared, or is an addition of ours."""
    assert {entry["paper"] for entry in ENTRIES} == {"multi-level", "LiGO", "PLD", "SBLD"}
    every = set()
    for file in sorted((ROOT / "configs" / "papers").glob("*.py")):
        path = str(file.relative_to(ROOT))
        every |= {f"{path}:{name}" for name in listed_experiments(path)}
    assert {n for n in every if "llama.py" not in n} - set(EXPERIMENTS) <= OWN
    assert {n for n in EXPERIMENTS if "finetune.py" not in n} <= every
    values = [entry.get("settings", {}) for entry in ENTRIES]
    assert [5e-6, 1e-5, 2e-5, 3e-5, 5e-5] in [v.get("learning_rates") for v in values]
    assert {v["method.drop.theta"] for v in values if "method.drop.theta" in v} == {0.5, 0.7, 0.9}


def test_a_changed_setting_is_found():
    name = "configs/papers/gpt.py:base_scratch"
    text = stated_report("base", stated_settings(name, load_as(Experiment, f"{name}:batch=128")[1]))
    assert "| batch" in text and "256 (multi-level, experiment setup)" in text and "128" in text
    name = "configs/finetune.py:cola"
    seeds = stated_settings(name, loaded(f"{name}:seeds=(0,1)"))
    assert [s.setting for s in seeds if s.differs] == ["seeds"]


def shown(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["show", *arguments])
    show.main()
    return capsys.readouterr().out


def test_show_prints_the_values_of_the_paper_beside_ours(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, "configs/papers/bert.py:base_pld")
    assert re.search(r"optim.schedule *\| times 0.99 every 1,000 steps \(PLD, .*\| linear", text)
    assert "train large" in text and "these differ" in text
    text = shown(monkeypatch, capsys, "configs/papers/bert.py:base")
    assert "bert_base: 6 of 6 settings are as stated (LiGO)" in text
    text = shown(monkeypatch, capsys, "configs/papers/bert.py:base_vcycle")
    assert "9 of 9" in text and "no costs" in text and ":steps=100_000" in text
    text = shown(monkeypatch, capsys, "configs/papers/bert.py:base_vcycle:steps=100_000")
    assert "epochs" in text and "train coarse1" in text
    text = shown(monkeypatch, capsys, "configs/finetune.py:sst2:batch=16")
    assert re.search(r"batch *\| 32 \(multi-level, experiment setup\) *\| 16", text)
    assert "no paper states its settings" in shown(monkeypatch, capsys, "configs/demo.py:scratch")
    with pytest.raises(UserError, match="has no experiment 'nothing'"):
        shown(monkeypatch, capsys, "configs/demo.py:nothing")
