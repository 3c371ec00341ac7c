"""Every train command escapes what it prints, and takes ``--limits``."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from limits import using_limits

from jaxgrow.untrusted import Limits, UntrustedError, escape_text, file_limits
from train.common.commands import Parser
from train.common.output import say

ROOT = Path(__file__).parents[2]
EVIL = "\x1b]0;owned\x07\x9b31m\r\u202e"
SPEAKS = """
import logging, sys, warnings
from train.common.errors import exits_cleanly, UserError

def main():
    warnings.warn(f"a warning about {sys.argv[1]}")
    logging.getLogger("a library").warning("a log about %s", sys.argv[1])
    raise {UserError}(f"an error about {sys.argv[1]}")

exits_cleanly(main)
"""


def test_terminal_escapes_are_printed_as_text(capsys):
    say(f"a label {EVIL}")
    say(EVIL, file=sys.stderr, end="")
    shown = r"\x1b]0;owned\x07\x9b31m\r\u202e"
    assert capsys.readouterr() == (f"a label {shown}\n", shown)


def test_text_of_all_scripts_is_not_escaped():
    text = "naïve\u00a0«été»\n\t日本語\u3000می\u200cخواهم 👩\u200d💻"
    assert escape_text(text) == text


@pytest.mark.parametrize("error", ["UserError", "KeyError"])
def test_warnings_errors_and_tracebacks_are_escaped(error):
    """`KeyError` stands for an error in the program, which ends with a traceback."""
    said = python(SPEAKS.replace("{UserError}", error), "\x1b[31m").stderr
    assert "\x1b" not in said
    assert r"a warning about \x1b[31m" in said and r"a log about \x1b[31m" in said
    assert r"an error about \x1b[31m" in said.replace("\\\\", "\\")


def python(*arguments):
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


# These functions print no text from a file, or escape it.
PRINTS = {
    "jaxgrow/untrusted.py": "print(escape_text(str(text)), file=sys.stdout if file is None else file",
    "train/common/output.py": "print(escape_text(str(text)), file=stream",
    "train/extras/bounded_child.py": "print(",  # answers its parent, which escapes what it prints
    # names of options
    "jaxgrow/extras/commands/completion.py": "print(completion_script(",
    "jaxgrow/cli/program.py": "print(end='', flush=True)",
    "jaxgrow/signals.py": "os.write(2, b'interrupted; nothing was written",
    "train/common/endings.py": "os.write(2, f'stopped by {stop_reason(number)}; {CONTINUES}",
    "train/run/stop.py": "os.write(2, ",  # fixed texts
}


def test_no_command_prints_in_another_way():
    found = []
    for file in [*(ROOT / "jaxgrow").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _prints(ast.unparse(node.func), node):
                call = ast.unparse(node)
                if name not in PRINTS or not call.startswith(PRINTS[name]):
                    found.append(f"{name}:{node.lineno}: {call}")
    assert found == []


def _prints(function: str, node: ast.Call) -> bool:
    if function == "tqdm.write" or ".set_description" in function:
        return not ast.unparse(node.args[0]).startswith("escape_text(")
    if function == "tqdm":
        shown = [word.value for word in node.keywords if word.arg in ("desc", "postfix")]
        return not all(isinstance(value, ast.Constant) for value in shown)
    return function in ("print", "print_exc", "traceback.print_exc", "os.write") or (
        function.startswith(("sys.stdout.write", "sys.stderr.write", "pprint"))
    )


@pytest.fixture
def unchanged():
    with using_limits(seconds=file_limits().seconds):
        yield


@pytest.mark.usefixtures("unchanged")
def test_limits_of_a_command_hold_in_its_child_processes():
    Parser("generate", "A command.").parse_args(["--limits", "bytes=8e9,seconds=0.5"])
    assert file_limits() == replace(Limits(), bytes=8_000_000_000, seconds=0.5)
    ran = python("from jaxgrow.untrusted import file_limits; print(file_limits())")
    assert ran.stdout.strip() == str(file_limits())


@pytest.mark.parametrize("text", ["bytes", "bytes=-1", "bytes=x", "words=3", "seconds=nan", ""])
def test_a_wrong_limit_is_one_line(text, capsys):
    with pytest.raises(SystemExit) as stop:
        Parser("generate", "A command.").parse_args(["--limits", text])
    assert stop.value.code == 2
    assert "the names are bytes, record, entries, seconds" in capsys.readouterr().err


def test_limits_end_with_their_block():
    before = os.environ.get("JAXGROW_LIMITS")
    says = "such as with --limits record=22"
    with using_limits(record=10), pytest.raises(UntrustedError, match=says):
        file_limits().check("a line", record=11)
    assert (file_limits(), os.environ.get("JAXGROW_LIMITS")) == (Limits(), before)


def test_a_large_file_may_decompress_to_more_than_a_small_one():
    few = Limits(bytes=1000)
    few.check_expansion("a.gz", 1000, 10)
    few.check_expansion("a.gz", 10_000, 100)
    with pytest.raises(UntrustedError, match="--limits bytes=2002"):
        few.check_expansion("a.gz", 1001, 10)
