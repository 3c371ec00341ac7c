"""Every format of labelled rows gives the same examples; errors name the file and the row."""

import gzip
import io
import json
from csv import QUOTE_ALL, DictWriter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from finetunings import FAMILIES, checkpoint, tuning
from labelled import BERT, GPT2, saved
from pyarrow import parquet

from train import predict
from train.common.errors import UserError
from train.config.overrides import with_overrides
from train.extras.labelled import metrics, table
from train.extras.labelled.task import Labelled
from train.extras.labelled.tuning import tune_model

ROWS = [
    {"title": 'The "cat", sat', "kind": "good"},
    {"title": "a dög", "kind": "bad"},
    {"title": "nobody", "kind": "ugly"},
    {"title": "a cat", "kind": "good"},
]


def tsv(rows) -> str:
    lines = [rows[0].keys(), *(row.values() for row in rows)]
    return "".join("\t".join(map(str, line)) + "\n" for line in lines)


def csv(rows) -> str:
    out = io.StringIO(newline="")
    writer = DictWriter(out, rows[0].keys(), quoting=QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n\n" for row in rows)


TEXTS = {"tsv": tsv, "csv": csv, "jsonl": jsonl}


def dataset(folder: Path, rows, names: list[str] | None = None) -> Path:
    """Write rows as Hugging Face `datasets` saves them, perhaps with numbers of named classes."""
    folder.mkdir(parents=True)
    kinds = [names.index(row["kind"]) if names else row["kind"] for row in rows]
    data = pa.table({"title": [row["title"] for row in rows], "kind": kinds})
    file = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / file), "wb") as sink, pa.ipc.new_stream(sink, data.schema) as out:
        out.write_table(data)
    text = {"dtype": "string", "_type": "Value"}
    kind = {"names": names, "_type": "ClassLabel"} if names else text
    about = {"features": {"title": text, "kind": kind}}
    (folder / "dataset_info.json").write_text(json.dumps(about))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file}]}))
    return folder


def written(folder: Path, kind: str) -> Path:
    """Write the rows as the splits ``train`` and ``dev`` of a folder."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "dev"):
        if kind in TEXTS:
            (folder / f"{split}.{kind}").write_text(TEXTS[kind](ROWS))
        elif kind == "tsv.gz":
            (folder / f"{split}.tsv.gz").write_bytes(gzip.compress(tsv(ROWS).encode()))
        elif kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(ROWS), folder / f"{split}.parquet")
        else:
            dataset(folder / split, ROWS, ["bad", "good", "ugly"] if kind == "classes" else None)
            (folder / "dataset_dict.json").write_text('{"splits": ["train", "dev"]}')
    return folder


def data(path, **changes) -> Labelled:
    usual = {"text": ("title",), "label": "kind", "length": 32}
    return Labelled("table", str(path), **usual | changes)


def prepared(path, model=BERT, **changes):
    return Labelled.prepared(data(path, **changes), model)


@pytest.mark.parametrize("kind", [*TEXTS, "tsv.gz", "parquet", "datasets", "classes"])
def test_every_format_gives_the_same_examples(tmp_path, kind):
    made = prepared(written(tmp_path / kind, kind))
    assert (made.labels, made.classes, [*made.valid]) == (("bad", "good", "ugly"), 3, ["dev"])
    assert [int(made.train.sample(i, None)[1]) for i in range(4)] == [1, 0, 2, 1]
    tokens = made.train.sample(0, None)[0]["tokens"].astype(np.uint8)
    assert bytes(tokens)[1:15] == b'The "cat", sat'
    plain = prepared(written(tmp_path / "plain", "tsv"))
    assert {**made.identity, "name": ""} == {**plain.identity, "name": ""}


def test_scores_are_accuracy_and_macro_f1_or_correlations(tmp_path):
    made = prepared(written(tmp_path / "d", "tsv"))
    assert made.score("dev", np.eye(3)[[1, 0, 2, 1]]) == {"accuracy": 1.0, "macro_f1": 1.0}
    wrong = made.score("dev", np.eye(3)[[1, 1, 1, 1]])
    assert wrong == {"accuracy": 0.5, "macro_f1": pytest.approx((0 + 2 / 3 + 0) / 3)}
    rows = [{"a": f"text {i}", "b": "x", "score": i / 7} for i in range(20)]
    (tmp_path / "numbers.csv").write_text(csv(rows))
    of = {"text": ("a", "b"), "label": "score", "number": True}
    numbers = prepared(tmp_path / "numbers.csv", GPT2, **of)
    assert (numbers.classes, len(numbers.train), len(numbers.valid["valid"])) == (1, 18, 2)
    assert [*numbers.score("valid", np.array([[1.0], [2.0]]))] == ["pearson", "spearman"]


def test_macro_f1_is_that_of_scikit_learn():
    theirs = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    said, gold = rng.integers(0, 4, (2, 50))
    expected = theirs.f1_score(gold, said, average="macro")
    assert metrics.macro_f1(said, gold) == pytest.approx(expected)


def test_labels_of_any_kind(tmp_path):
    for name, values, expected in (
        ("numbers", [10, 9, 2], ("2", "9", "10")),
        ("truth", [True, False, True], ("false", "true")),
        ("mixed", ["b", "1", "a"], ("1", "a", "b")),
        ("signs and foreign digits", ["--1", "²", "-1"], ("--1", "-1", "²")),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(jsonl([{"title": "x", "kind": value} for value in values * 4]))
        assert prepared(file).labels == expected
    ordered = prepared(written(tmp_path / "d", "tsv"), labels=("ugly", "bad", "good"))
    assert ordered.train.targets.tolist() == [2, 1, 0, 2]


def test_rows_that_judge_are_a_split_a_file_or_held_out(tmp_path):
    other, many = tmp_path / "other.csv", tmp_path / "many.tsv"
    other.write_text(csv(ROWS[:2]))
    own = prepared(written(tmp_path / "d", "tsv"), valid_path=str(other))
    assert len(own.valid["valid"]) == 2
    many.write_text(tsv(ROWS * 25))
    held = prepared(many, valid_fraction=0.2)
    assert (len(held.train), len(held.valid["valid"])) == (80, 20)


MANY = "title\tkind\n" + "".join(f"x\t{i}.5\n" for i in range(50))


@pytest.mark.parametrize(("file", "content", "says"), [
    ("a.tsv", "title\tkind\nx\n", "line 2 has 1 cells, but the first line names 2 columns"),
    ("a.tsv", "titel\tkind\nx\ty\nz\tw\n", r"no column 'title', only 'titel', .* set data\.text"),
    ("a.csv", "title,label\nx,y\nz,w\n", r"no column 'kind', only 'title', .* set data\.label"),
    ("a.csv", "title,kind\nx,\n", r"line 2 has no label in column 'kind'; delete the row"),
    ("a.jsonl", '{"title": "x", "kind": "a"}\n[1]\n', "line 2 is a list, .* a JSON object"),
    ("a.jsonl", '{"title": 3, "kind": "a"}\n{"kind": "b"}\n', "line 1: column 'title' has 3"),
    ("a.jsonl", "{\n", r"line 1 is not JSON"),
    ("a.csv", "title,kind\nx,y\nz,y\n", "all rows of .* have the label y"),
    ("a.csv", 'kind,title\na,x\nb,"y\na,z\n', "line 3: unexpected end of data; correct the quotes"),
    ("a.csv", 'title,kind\nx,a\n"y" z,b\n', "line 3: ',' expected after '\"'"),
    ("a.txt", "x", "is not a table: it should be .tsv, .csv"),
    ("a.tsv", MANY, r"50 different labels.*data.number=true"),
])  # fmt: skip
def test_errors_name_the_place_in_the_file(tmp_path, file, content, says):
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=says) as error:
        prepared(tmp_path / file)
    assert "\n" not in str(error.value)


def test_folders_and_settings_that_mean_nothing(tmp_path):
    (tmp_path / "test.tsv").write_text(tsv(ROWS))
    with pytest.raises(UserError, match=r"has no split train .*, only test.tsv; name a file in"):
        prepared(tmp_path)
    with pytest.raises(UserError, match=r"the file or folder .*nowhere does not exist"):
        prepared(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="text must name one column or two"):
        data(tmp_path, text=())
    with pytest.raises(UserError, match="line 4: the label 'ugly' is not one of good, bad"):
        prepared(tmp_path / "test.tsv", labels=("good", "bad"))


def test_the_command_line_names_columns(tmp_path):
    said = with_overrides(data("x", text=("a",)), ["text=a,b", "label=c", "labels=yes,no"])
    assert (said.text, said.label, said.labels) == (("a", "b"), "c", ("yes", "no"))
    assert with_overrides(data("x"), ["text=premise"]).text == ("premise",)


def tuned(folder, kinds, count, epochs=1):
    """Fine-tune on texts whose letter is their kind, and return the scores and the folder."""
    checkpoint(folder / "gpt2", FAMILIES["gpt2"])
    each = [i % len(kinds) for i in range(count)]
    rows = [{"title": chr(ord("a") + i) * 4, "kind": kinds[i]} for i in each]
    (folder / "train.csv").write_text(csv(rows))
    own = tuning(folder, name="mine", data=data(folder / "train.csv", length=14), epochs=epochs)
    [scores] = tune_model(own, folder / "gpt2", folder / "runs")[1e-2]
    return scores["valid"], folder / "runs" / "mine-gpt2-lr0.01-seed0"


def test_unlabelled_rows_are_predicted_by_the_command(tmp_path, monkeypatch, capsys):
    scores, run = tuned(tmp_path, ("good", "bad"), 160, epochs=3)
    assert scores["accuracy"] == 1.0
    new, out = tmp_path / "new.jsonl", tmp_path / "new/out.tsv"
    rows = [("aaaa", None), ("bbbb", "bad"), ("bbbb", "Bad")]  # the last label is misspelt
    new.write_text(jsonl([{"title": a} | ({"kind": b} if b else {}) for a, b in rows]))
    monkeypatch.setattr("sys.argv", ["predict", str(run), str(new), "--out", str(out)])
    predict.main()
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    assert [line[0] for line in lines] == ["prediction", "good", "bad", "bad"]
    assert lines[0][1:] == ["bad", "good"] and float(lines[1][2]) > 0.5
    said = capsys.readouterr().err
    assert "accuracy: 1.0000" in said
    assert "a label that the model does not know: 1 of 3, such as 'Bad'; the metrics leave" in said
    with pytest.raises(UserError, match="is not the folder of a finished fine-tuning"):
        predict.predict_labels(tmp_path / "gpt2", new)


def test_classes_that_are_called_label_0_are_predicted_as_classes(tmp_path):
    names = [f"LABEL_{i}" for i in range(12)]  # LABEL_10 comes before LABEL_2
    scores, run = tuned(tmp_path, names, 240)
    text, metrics = predict.predict_labels(run, tmp_path / "train.csv")
    assert text.splitlines()[0].split("\t") == ["prediction", *sorted(names)]
    assert metrics.keys() == scores.keys()


def test_rows_whose_number_is_missing_are_not_part_of_the_metrics(tmp_path, capsys):
    kinds = [1.5, float("nan"), None, "n/a", 2.5]
    rows = [table.Row("", {"title": "a", "kind": kind}) for kind in kinds]
    given = [table.row_label(row, "kind") for row in rows]
    assert given == ["1.5", None, None, "n/a", "2.5"]
    found = np.array([[1.0], [9.0], [9.0], [9.0], [2.0]])
    assert predict._known_metrics(found, given, ()) == {"pearson": 1.0, "spearman": 1.0}
    assert "1 of 5, such as 'n/a'; the metrics leave them out" in capsys.readouterr().err


def test_a_label_that_is_not_a_number_is_missing(tmp_path):
    kinds = [0.0, 1.0, float("nan")] * 4
    rows = [{"title": "a", "kind": kind} for kind in kinds]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 3 has no label in column 'kind'; delete the row"):
        prepared(tmp_path / "a.parquet")


PUBLISHED = [
    # the columns of the published files and of tensorflow-datasets
    ("mnli", ("sentence1", "sentence2"), [], [None, None]),
    ("mrpc", ("#1 String", "#2 String"), [], [None, None]),
    ("mrpc", ("sentence1", "sentence2"), [], [None, None]),
    ("cola", ("sentence",), [], [None, None]),
    # in tensorflow-datasets, the label is in a column of this name, and the number of a class
    ("stsb", ("sentence1", "sentence2"), [2.5, 0.0], ["2.5", "0.0"]),
    ("qqp", ("question1", "question2"), [1, 0], ["duplicate", "not_duplicate"]),
    ("mnli", ("premise", "hypothesis"), [2, 0], ["contradiction", "entailment"]),
    ("rte", ("sentence1", "sentence2"), [1, -1], ["not_entailment", "-1"]),
    ("sst2", ("sentence",), [1, 2], ["positive", "2"]),
]


@pytest.mark.parametrize(("name", "texts", "labels", "expected"), PUBLISHED)
def test_rows_of_published_files_are_predicted(tmp_path, name, texts, labels, expected):
    file, task = tmp_path / "test.jsonl", Labelled(name, "none")
    rows = [dict.fromkeys(texts, "a b") | {"idx": i} for i in range(2)]
    rows = [row | {"label": label} for row, label in zip(rows, labels, strict=False)] or rows
    file.write_text(jsonl(rows))
    assert predict.labelled_rows(file, task) == ((["a b"] * 2,) * len(texts), expected)
    file.write_text(jsonl([{"text": "a", "label": 1}]))
    with pytest.raises(UserError, match=r"has no column .*; give the column the name that it has"):
        predict.labelled_rows(file, task)


def test_rows_of_cola_have_no_names(tmp_path):
    (tmp_path / "in_domain_dev.tsv").write_text("gj04\t1\t\tThe cat sat.\ngj04\t0\t*\tSat the.\n")
    texts, given = predict.labelled_rows(tmp_path / "in_domain_dev.tsv", Labelled("cola", "none"))
    assert texts == (["The cat sat.", "Sat the."],)
    assert given == ["acceptable", "unacceptable"]


@pytest.mark.parametrize("name", ["table", "sst2", "squad1"])
@pytest.mark.parametrize(("encoding", "says"), [
    ("latin-1", r"line \d is not UTF-8 \(byte 0xe4\); the file may be latin-1: convert it"),
    ("utf-16", "is UTF-16, not UTF-8; convert it"),
    ("utf-16-le", r"line \d has a NUL character; the file may be UTF-16"),
])  # fmt: skip
def test_files_of_another_encoding_are_refused_and_named(tmp_path, name, encoding, says):
    file = {"table": "a.tsv", "sst2": "train.tsv", "squad1": "train-v1.1.json"}[name]
    content = '{"data": ["ä"]}' if name == "squad1" else "sentence\tlabel\nä b\t1\nc\t0\n"
    for other in (file, "dev.tsv", "dev-v1.1.json"):
        (tmp_path / other).write_bytes(content.encode(encoding))
    path = tmp_path / file if name == "table" else tmp_path
    with pytest.raises(UserError, match=says) as error:
        Labelled.prepared(Labelled(name, str(path), text=("sentence",)), BERT)
    assert file in str(error.value)


def test_a_line_of_names_in_cola_is_explained(tmp_path):
    for header, says in (
        ("source\tlabel\toriginal\tsentence", "line 1: the label 'label' is not 0 or 1; the files"),
        ("sentence\tlabel", r"line 1 has 2 columns.*; its first line looks like column names, but"),
    ):
        folder = saved(tmp_path, "cola", [header, "gj04\t1\t\tThe cat sat."])
        with pytest.raises(UserError, match=rf"train\.tsv, {says}"):
            Labelled.prepared(Labelled("cola", folder), BERT)
