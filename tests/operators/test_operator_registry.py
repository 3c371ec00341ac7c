"""The registry is the only list of operators: the command line, the laws and the docs read it."""

import re
import subprocess
import sys
from pathlib import Path

import chex
import pytest

from jaxgrow import operators
from jaxgrow.growth.maps import all_terms, by_axes
from jaxgrow.growth.matrices import dense
from jaxgrow.operators import registry

DOCS = Path(__file__).parents[2] / "docs"
# A new operator is one function, as in a file of `jaxgrow/operators`.
NEW = '''
from jaxgrow.growth.maps import select
from jaxgrow.operators import operator


@operator(
    axes=("mlp",), preserves="yes", source="a test", policies=("exact",), example={"mlp": 12},
    sizes="at most twice the old size",
)
def first_again(sizes, target):
    """Copy the first hidden units of each MLP.

    Args:
      {arguments}
    """
    old, new = sizes["mlp"], target["mlp"]
    return {"mlp": select([*range(old), *range(new - old)], old)}
'''
USED = """
import sys

sys.path += ["docs", "tests/support"]
import growths
import tables
from jaxgrow.cli.program import main

row = growths.OPERATORS["first_again"]
assert row.keeps and row.inverts == growths.ROUNDED
assert "| `first_again` | Copy the first hidden units of each MLP. |" in tables.operators()
assert "sizes: the size of every axis" in first_again.__doc__
main(["grow", "--help"])
"""


def test_a_new_operator_needs_no_other_list():
    code = [sys.executable, "-c", NEW + USED]
    done = subprocess.run(code, cwd=DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("first_again ")]
    assert [" ".join(line.split()) for line in lines] == [
        "first_again mlp (at most twice the old size) yes"
    ]


def test_the_table_of_the_docs_comes_from_the_registry(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import tables

    page = (DOCS / "concepts" / "operators.md").read_text()
    assert tables.operators() in page, "python docs/tables.py writes it again"
    assert all(f"`{name}`" in tables.operators() for name in operators.OPERATORS)


def test_every_operator_is_exported_and_in_one_group():
    groups = [operators.DEPTH, operators.WIDTH, operators.EXPERTS, operators.FORMS]
    for name, found in operators.OPERATORS.items():
        assert getattr(operators, name) is found.function and name in dir(operators)
        assert [group.get(name) for group in groups].count(found.function) == 1


def test_net2net_is_another_name_of_fpi():
    assert operators.OPERATORS["net2net"] is operators.OPERATORS["fpi"]
    assert operators.net2net is operators.fpi


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="operator 'stack' is registered twice"):
        operators.operator(axes=(), preserves="", source="", policies=())(operators.stack)


def test_the_name_of_an_extra_is_refused_where_it_is_defined():
    """Otherwise the extra could not be imported any more."""
    code = NEW.replace("first_again", "staged") + "print('defined')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "operator 'staged' is registered twice" in done.stderr and not done.stdout


def test_a_definition_that_runs_again_replaces_the_operator(monkeypatch):
    """A config file runs once for each of its configs, and a notebook cell whenever it is edited."""
    for table in ("OPERATORS", "DEPTH", "WIDTH"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    for code in (NEW, NEW, NEW.replace('axes=("mlp",)', 'axes=("layers",)')):
        exec(code, {"__name__": "config mine.py"})
    assert registry.OPERATORS["first_again"].axes == ("layers",)
    assert "first_again" in registry.DEPTH and "first_again" not in registry.WIDTH
    with pytest.raises(ValueError, match="operator 'first_again' is registered twice"):
        exec(NEW, {"__name__": "config other.py"})


def test_the_operator_of_the_page_is_used_by_its_config():
    page = (DOCS / "howto" / "operator.md").read_text()
    (code,) = [text for text in re.findall(r"```text\n(.*?)```", page, re.S) if "@operator" in text]
    mine = {"__name__": "config mine.py"}
    exec(code, mine)
    try:
        e = mine["method"]()
        _, grows, _ = e.method.plan(e.model, e.optim, e.steps)
        assert grows.by == ("last_again",)
    finally:
        del registry.OPERATORS["last_again"], registry.WIDTH["last_again"]


# --- stages ---

SIZES = {"layers": 2, "embed": 8, "heads": 4, "kv_heads": 2, "mlp": 8}


def of_stage(sizes):
    return {f"{axis}.1": size for axis, size in sizes.items()}


def matrices(growth):
    """The matrices of a growth, by axis without the number of its stage."""
    return [
        {key[0].partition(".")[0]: (dense(m.write), dense(m.read)) for key, m in term.items()}
        for term in map(by_axes, all_terms(growth))
    ]


@pytest.mark.parametrize("name", operators.WIDTH)
@pytest.mark.parametrize("target", [
    {"heads": 8},
    {"kv_heads": 4},
    {"heads": 6, "kv_heads": 3},
    {"embed": 16, "heads": 8, "kv_heads": 4, "mlp": 16},
], ids=str)  # fmt: skip
def test_key_value_heads_of_a_stage_grow_with_the_query_heads_that_read_them(name, target):
    operator = operators.OPERATORS[name]
    try:
        expected = matrices(operator(SIZES, target))
    except ValueError as error:
        with pytest.raises(type(error)):
            operator(of_stage(SIZES), of_stage(target))
        return
    chex.assert_trees_all_equal(matrices(operator(of_stage(SIZES), of_stage(target))), expected)


@pytest.mark.parametrize(
    "groups",
    [{"heads": "far"}, {"kv_heads": "far"}, {"heads": ((0, 1), (2, 3))}],
    ids=str,
)
def test_key_value_heads_of_a_stage_are_merged_with_their_query_heads(groups):
    found = matrices(operators.decoalesce(of_stage(SIZES), **groups))
    chex.assert_trees_all_equal(found, matrices(operators.decoalesce(SIZES, **groups)))
