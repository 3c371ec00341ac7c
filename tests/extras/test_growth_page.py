"""The numbers of "Choose when to grow" in docs/howto/train.md are those of its command."""

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
        assert [*cells.values()][2:] == [
            *(f"{growth[key][0]:.4f}" for key in ("loss_before", "loss_after")),
            f"{growth['tokens_to_baseline'][0]:,} tokens",
            f"{row['loss'][0]:.4f}",
            f"{100 * row['saved_frontier'][0]:.1f} %",
        ]
    assert [*table] == [growth["run"] for growth in found["growths"]]
