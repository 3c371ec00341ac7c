"""The README's examples run, from top to bottom, as one program."""

import re
from pathlib import Path

import runs

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run(capsys):
    text = README.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 2
    names: dict = {"__name__": "readme"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        with runs.quick():
            exec(compile("\n" * line + block[1], README, "exec"), names)  # errors point into the README
    assert "KL(a || b)" in capsys.readouterr().out
