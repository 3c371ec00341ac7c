"""Every error message and every help text is collected in one file, in plain sentences."""

import re
import runpy
from pathlib import Path

from train.arguments import COMMANDS

ROOT = Path(__file__).parents[2]
COLLECT = runpy.run_path(str(ROOT / "docs/messages.py"))

EXAMPLE = """
def f(name, wrong):
    if not name:
        raise ValueError("a " f"name {name!r} " "is empty: give one")
    lines = [f"{x} does not fit" for x in wrong]
    lines.append("give " + name)
    raise TypeError("\\n".join(lines)) from None
"""


def test_messages_are_collected_with_placeholders():
    found = [(kind, text) for _, kind, text in sorted(COLLECT["messages"](EXAMPLE))]
    assert found == [
        ("ValueError", "a name {name} is empty: give one"),
        ("TypeError", "{x} does not fit"),
        ("TypeError", "give {name}"),
        ("TypeError", r"{'\n'.join(lines)}"),
    ]


def test_one_file_has_every_message_and_every_help_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    page = COLLECT["page"]()
    (tmp_path / "messages.md").write_text(page)
    assert "CheckpointError: there is no folder {folder}" in page
    helps = re.findall(r"^## (.*) --help\n\n```text\nusage: (.*?)(?: \[-h\]|\n)", page, re.M)
    assert all(usage.startswith(command) for command, usage in helps)
    assert {f"python -m train.{name}" for name in COMMANDS} < {command for command, _ in helps}
    assert {"jaxgrow", "jaxgrow grow"} < {command for command, _ in helps}


def test_messages_have_no_words_of_a_private_dialect():
    lines = list(COLLECT["all_messages"]())
    assert len(lines) > 700
    words = re.compile(r"\b(nobody|as at birth|held out|was born|none of its own|said to be)\b")
    assert [line for line in lines if words.search(line)] == []
