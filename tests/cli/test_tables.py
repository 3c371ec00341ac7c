"""One printer makes every table: plain columns or Markdown, the same in a terminal and in a file."""

from jaxgrow.tables import align_columns, markdown_table


def test_columns_have_the_width_of_their_longest_cell():
    text = align_columns(("name", "GB"), [("a", "1.5"), ("longer", "10.25")], right=[1])
    assert text.split("\n") == ["name       GB", "a         1.5", "longer  10.25"]


def test_a_table_without_titles_or_without_rows():
    assert align_columns((), [("a", "b"), ("longer", "c")]) == "a       b\nlonger  c"
    assert align_columns(("name", "GB"), []) == "name  GB"


def test_long_cells_are_neither_wrapped_nor_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert align_columns((), [("x" * 300, "y")]) == "x" * 300 + "  y"


def test_brackets_and_wide_characters_are_text():
    """Square brackets are markup elsewhere in rich, and some characters take two cells."""
    assert align_columns((), [("[red]", "a"), ("層層", "b")]) == "[red]  a\n層層   b"


def test_markdown():
    lines = markdown_table(("run", "loss"), [("a ± b", "1"), ("c", "2")]).split("\n")
    assert lines == ["| run   | loss |", "|-------|------|", "| a ± b | 1    |", "| c     | 2    |"]


def test_colours_are_off_in_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in align_columns(("name",), [("a",)]) + markdown_table(("name",), [("a",)])
