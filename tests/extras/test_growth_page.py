"""The numbers of "Choose when to grow" in docs/howto/train.md are those of its command.

Other processors, and other numbers of cores, sum in another order. The differences grow during the training.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/train.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:3] != (3, 11, 7), reason="the corpus is the standard library of Python"
)
def test_the_command_of_the_page_gives_its_table(tmp_path):
    section = PAGE.partition("## Choose when to grow")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    name, _, config = lines[0].partition("=")
    command = " ".join(lines[1:]).replace("\\", "").replace(f"${name}", config)
    arguments = shlex.split(command.replace("runs/tau", str(tmp_path)))[1:]
    # The tests compile without optimizations, which changes the last digits of the losses.
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=plain, check=True)
    found = json.loads((tmp_path / "compare.json").read_text())
    rows = {row["run"]: row for row in found["rows"]}
    (table,) = tables(section)
    for growth in found["growths"]:
        row, cells = rows[growth["run"]], table[growth["run"]]
        before, after, caught_up, loss, saved = (
            float(cell.split()[0].replace(",", "")) for cell in [*cells.values()][2:]
        )
        assert growth["loss_before"][0] == pytest.approx(before, abs=0.005)
        assert growth["loss_after"][0] == pytest.approx(after, abs=0.05)
        assert growth["tokens_to_baseline"][0] == pytest.approx(caught_up, rel=0.5)
        assert row["loss"][0] == pytest.approx(loss, abs=0.005)
        assert 100 * row["saved_frontier"][0] == pytest.approx(saved, abs=1.5)
    assert [*table] == [growth["run"] for growth in found["growths"]]
