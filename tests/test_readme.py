"""The README's examples run, each by itself; then the commands on the checkpoint that one of them made."""

import re
import shlex
from functools import partial
from pathlib import Path

import jax
import runs

from jaxgrow import cli
from jaxgrow.models import Config

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init = Config.init  # on the host, where neither drawing nor algebra needs a compiler
    monkeypatch.setattr(Config, "init", lambda self, key: runs.alike(jax.eval_shape(partial(init, self), key)))
    text = README.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 2
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], README, "exec"), {"__name__": "readme"})  # errors point into the README
    assert "KL(a || b)" in capsys.readouterr().out
    commands = [
        c for line in re.findall(r"^    (jaxgrow .*)$", text, re.MULTILINE) for c in line.split("#")[0].split("&&")
    ]
    assert len({c.split()[1] for c in commands}) == 8  # all that there are
    Path("text.txt").write_text(text)
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0, command
