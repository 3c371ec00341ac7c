"""Collects every error message and every help text in one file: ``python docs/messages.py [FILE]``.

The file is meant to be read from top to bottom by a person. It is not part of the site.
"""

import ast
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def messages(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the type and the text of each error that a file creates.

    Expressions of f-strings appear in braces. If a message is a variable, or joins the lines of
    one, the texts that the function assigns or appends to this variable are also messages.

    Args:
      source: the text of the file.
    """
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and _name(node.func).endswith(("Error", "warn"))):
            continue
        within = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
        # that the message consists of
        names = {n.id for arg in node.args for n in ast.walk(arg) if isinstance(n, ast.Name)}
        for text in (_text(arg) for arg in node.args[:1]):
            yield node.lineno, _name(node.func), text
        if within:
            for part in _assigned(within[-1], names):
                yield part.lineno, _name(node.func), _text(part)


def _assigned(function: ast.FunctionDef, names: set[str]) -> Iterator[ast.expr]:
    """The texts of several words that a function assigns or appends to one of the names."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Call) and _name(node.func) in ("append", "extend") and node.args:
            of = node.func
            targets = [of.value] if isinstance(of, ast.Attribute) else []
            value = node.args[0]
        if value is None or not any(isinstance(t, ast.Name) and t.id in names for t in targets):
            continue
        yield from _outermost(value)


def _outermost(node: ast.AST) -> Iterator[ast.expr]:
    """The texts of several words in an expression, without the texts inside of them."""
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node]
    is_text = any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in parts
    )
    if is_text and " " in _text(node).strip():
        yield node
    elif not is_text:
        for child in ast.iter_child_nodes(node):
            yield from _outermost(child)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST) -> str:
    """The text of an expression, with placeholders for its parts that are not constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{" + ast.unparse(node) + "}"


def all_messages() -> Iterator[str]:
    """Yield the lines about the messages of both packages."""
    for file in sorted([*ROOT.glob("jaxgrow/**/*.py"), *ROOT.glob("train/**/*.py")]):
        found = sorted(set(messages(file.read_text())))
        if found:
            yield f"\n## {file.relative_to(ROOT)}\n"
        for line, kind, text in found:
            yield f"- {line}, {kind}: {text}"


def helps() -> Iterator[str]:
    """Yield the lines about the help of all commands."""
    from jaxgrow.cli.arguments import jaxgrow_parser
    from jaxgrow.cli.program import main as jaxgrow
    from train.arguments import COMMANDS

    os.environ["COLUMNS"] = "100"
    for name in (None, *jaxgrow_parser().get_default("commands")):
        words = ["--help"] if name is None else [name, "--help"]
        yield from _shown(" ".join(["jaxgrow", *words]), lambda words=words: jaxgrow(words))
    for name in COMMANDS:
        module = importlib.import_module(f"train.{name}")
        yield from _shown(f"python -m train.{name} --help", module.main)


def _shown(command: str, run) -> Iterator[str]:
    argv, out = sys.argv, io.StringIO()
    sys.argv = [argv[0], "--help"]
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            run()
    finally:
        sys.argv = argv
    yield f"\n## {command}\n\n```text\n{out.getvalue().rstrip()}\n```"


def page() -> str:
    """The text of the file."""
    return "\n".join(["# Messages", *all_messages(), "", "# Help", *helps(), ""])


if __name__ == "__main__":
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "messages.md")
    file.write_text(page())
    print(f"{file}: {len(file.read_text().split())} words")
