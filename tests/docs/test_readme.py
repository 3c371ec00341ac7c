"""The examples and commands of the README and the site run, and the files that they name exist."""

import ast
import re
import shlex
from functools import partial
from pathlib import Path

import jax
import pytest
import runs

from jaxgrow.cli import program
from jaxgrow.cli.arguments import jaxgrow_parser
from jaxgrow.models import Config
from train.arguments import COMMANDS, command_parser
from train.config.experiment import load_experiment

ROOT = Path(__file__).parents[2]
PAGES = {
    str(p.relative_to(ROOT)): p.read_text()
    for p in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(
    r"python (?:-m (?P<module>(?:train|benchmarks)\.\w+)|(?P<file>benchmarks/\w+\.py))(?P<rest>(?:.*\\\n)*.*)"
)
CONFIG = re.compile(r"(\$c|configs/[\w/]+\.py):([a-z]\w*)(?![\w=.])")
FILE = re.compile(
    r"(?<![\w/.])(?:benchmarks|configs|docs|jaxgrow|tests|train)/[\w/-]+\.(?:py|jsonl?|md|png)\b"
)

# Options that a script defines by calling a function of another file.
SHARED = {
    " parser(__doc__": ["--json"],
    " parser(__doc__, rounds": ["--rounds"],
    "add_sizes(": ["--layers", "--embed", "--vocab", "--context"],
    "add_cores(": ["--cores"],
}


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each line that calls ``jaxgrow``."""
    lines = re.findall(r"^    (jaxgrow .*)$", text, re.MULTILINE)
    return [shlex.split(c)[1:] for line in lines for c in line.split("#")[0].split("&&")]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.extra] * (name != "README.md"))
        for name, text in PAGES.items()
        if BLOCK.search(text) or commands(text)
    ],
)
def test_the_examples_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init = Config.init  # on the host, which avoids compilation
    monkeypatch.setattr(
        Config, "init", lambda self, key: runs.alike(jax.eval_shape(partial(init, self), key))
    )
    text = PAGES[page]
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        # errors point to the page
        exec(compile("\n" * line + block[1], ROOT / page, "exec"), {"__name__": "page"})
    assert "KL(a || b)" in capsys.readouterr().out or "preservation(" not in text
    Path("text.txt").write_text(text)  # the text that commands evaluate
    for command in commands(text):
        assert program.main(command) == 0, command


def test_every_table_has_a_head():
    """An empty line within a table would end it, and the rest would be shown as text."""
    headless = []
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]:
        lines = ["", *page.read_text().splitlines(), ""]
        first = [i for i, line in enumerate(lines) if line[:1] == "|" != lines[i - 1][:1]]
        headless += [(page, i) for i in first if set(lines[i + 1]) - set("|-: ")]
    assert not headless


def test_the_runs_that_the_page_continues_reach_their_steps():
    """The commands with ``--from`` start at steps that a run of the config has kept and reaches."""
    page = (ROOT / "docs/howto/resume.md").read_text()
    found = re.findall(r"pretrain (\S+) --from runs/(\w+)@?(\d*) ", page)
    for config, name, step in found:
        run = load_experiment(f"{ROOT}/configs/demo.py:{name}")
        every = range(run.checkpoint_every, run.steps, run.checkpoint_every)
        kept = [*every, run.steps][-2:]
        start = int(step) if step else run.steps
        assert start in kept and start < load_experiment(f"{ROOT}/{config}").steps
    assert len(found) == 2


def test_every_command_of_jaxgrow_is_shown():
    assert len({command[0] for text in PAGES.values() for command in commands(text)}) == 10


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_and_terminals_have_right_arguments(page):
    """They do not run, because their folders are not there."""
    found = re.findall(r"(?:`|\$ )jaxgrow (\w+ [^-`\n](?:[^`\n]*\\\n)*[^`\n]*)", PAGES[page])
    for command in found:
        words = command.replace("\\\n", " ").removesuffix(" ..").split()
        if "--" in command and "…" not in words:
            jaxgrow_parser(words).parse_args(words)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    text = PAGES[page]
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    for found in SCRIPT.finditer(text):
        file = ROOT / (found["file"] or found["module"].replace(".", "/") + ".py")
        options = re.findall(r"--[a-z][\w-]*", found["rest"].split("#")[0].split("`")[0])
        source = file.read_text() if file.exists() else ""
        known = [o for call, options in SHARED.items() if call in source for o in options]
        if file.parent == ROOT / "train" and file.stem in COMMANDS:
            known += [o for a in command_parser(file.stem)._actions for o in a.option_strings]
        source += " ".join(f'"{option}"' for option in known)
        missing += [f"{file.name} {o}" for o in options or [""] if f'"{o}' not in source]
    short = re.search(r"^    c=(\S+)$|`c=(\S+)`", text, re.MULTILINE)
    for file, name in CONFIG.findall(text):
        file = (short[1] or short[2]) if file == "$c" and short else file
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing += [] if name in names else [f"{file}:{name}"]
    assert not missing
