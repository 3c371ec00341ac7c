"""Are held-out files recognised by their names, as the Hugging Face Hub recognises them?"""

import json
from pathlib import Path

import pytest
from limits import using_limits

from jaxgrow.untrusted import UntrustedError
from train.common.errors import UserError
from train.data.text import Data
from train.extras.text.mixing import training_text
from train.extras.text.named_splits import listed_splits, split_of
from train.extras.text.reading import read_tokens


@pytest.fixture
def read(tmp_path):
    """Write files whose only document is their name; return the documents of both parts."""

    def made(*names: str, readme: str = "", folder: str = "corpus", **changes):
        home = tmp_path / folder
        for name in names:
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"text": name}) if file.suffix == ".jsonl" else name
            file.write_text(content)
        if readme:
            (home / "README.md").write_text(readme)
        cache = str(tmp_path / "cache")
        data = Data("text", str(home), cache=cache, valid_fraction=0.5, **changes)
        found = read_tokens(data)
        parts = (part.tobytes().decode().split("\0")[:-1] for part in (found.train, found.valid))
        return *map(sorted, parts), found.report[1:]

    return made


@pytest.mark.parametrize(("train", "valid", "test"), [
    ("train.jsonl", "dev.jsonl", "test.jsonl"),
    ("train/a.txt", "validation/a.txt", "eval/a.txt"),
    ("data/train-00000-of-1.jsonl", "data/validation-00000-of-1.jsonl", "data/test-0.jsonl"),
    ("other.txt", "my_val_2.txt", "a/TEST/train.txt"),
    ("en/train/dev.txt", "en/valid/train.txt", "testing-0.txt"),
    ("latest.txt", "x.valid.txt", "evaluation/developer.txt"),
])  # fmt: skip
def test_files_are_held_out_by_the_words_of_their_names(read, train, valid, test):
    found = read(train, valid, test)
    assert found[:2] == ([train], [valid])
    assert "1 training file, 1 validation file, 1 test file;" in found[2][0]
    everything = read(splits="ignore")
    assert sorted(everything[0] + everything[1]) == sorted([train, valid, test])
    assert everything[2] == []


def test_without_validation_files_a_part_of_the_training_files_is_held_out(read):
    train, valid, [line] = read("a.txt", "b.txt", "test.txt")
    assert (train, valid) == (["a.txt"], ["b.txt"])
    assert "2 training files, 1 test file; training files are trained on, and the others" in line


def test_an_own_validation_text_takes_precedence(read, tmp_path):
    (tmp_path / "own.txt").write_text("own")
    found = read("train.txt", "valid.txt", valid_path=str(tmp_path / "own.txt"))
    assert found[:2] == (["train.txt"], ["own"])


def test_words_of_the_folder_itself_have_no_meaning(read):
    assert read("a.txt", "b.txt", folder="test/dev")[:2] == (["a.txt"], ["b.txt"])


CONFIGS = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: "part/*.txt"
  - split: validation
    path: ["judge/**", "x.txt"]
- config_name: other
  data_dir: more
  data_files: "?.txt"
---
# A corpus
"""


def test_the_configs_of_a_readme_list_the_files(read):
    found = read(
        *("part/test.txt", "judge/a/b/train.txt", "x.txt", "more/c.txt", "more/dd.txt"),
        *("part/deeper/a.txt", "train.txt"),
        readme=CONFIGS,
    )
    assert found[:2] == (["more/c.txt", "part/test.txt"], ["judge/a/b/train.txt", "x.txt"])
    assert "2 training files, 2 validation files, 3 unlisted files" in found[2][0]


def test_a_readme_without_configs_changes_nothing(read):
    for readme in ("# text", "---\nlicense: mit\n---\n", "---\nconfigs: 3\n---\n"):
        assert read("train.txt", "dev.txt", readme=readme)[:2] == (["train.txt"], ["dev.txt"])


def test_a_damaged_readme_is_named(read):
    with pytest.raises(UserError, match=r"README.md: the YAML .* set data.splits=ignore"):
        read("train.txt", "dev.txt", readme="---\nconfigs: [\n---\n")


def test_a_readme_that_cannot_be_read_does_not_release_held_out_files(read, tmp_path):
    front = "---\nconfigs:\n- data_files: [{split: test, path: b.txt}]\n"
    with pytest.raises(UserError, match=r"its list has no end; .*data\.splits=ignore"):
        read("a.txt", "b.txt", readme=front)
    readme = tmp_path / "corpus" / "README.md"
    readme.unlink()
    readme.symlink_to("lost.md")
    with pytest.raises(UserError, match=r"a link without a target.*; .*data\.splits=ignore"):
        read("a.txt", "b.txt")
    assert read("a.txt", "b.txt", splits="ignore")[:2] == (["a.txt"], ["b.txt"])


def test_the_aliases_of_a_readme_are_limited(tmp_path):
    names, again = ",".join("ab" * 1000), ",".join(["*x"] * 1000)
    front = f"x: &x {{data_files: [{names}]}}\nconfigs: [{again}]"
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    with using_limits(entries=100_000), pytest.raises(UntrustedError, match="entries"):
        listed_splits(tmp_path)


def test_a_snapshot_of_the_hub_is_read(tmp_path):
    """The files of a snapshot are links to blobs."""
    (tmp_path / "blobs").mkdir()
    home = tmp_path / "snapshots" / "a1"
    (home / "data").mkdir(parents=True)
    for name in ("data/train-0.jsonl", "data/test-0.jsonl", "README.md"):
        blob = tmp_path / "blobs" / name.replace("/", "-")
        blob.write_text('{"text": "train"}\n{"text": "held"}' if "train" in name else "# text")
        (home / name).symlink_to(blob)
    data = Data("text", str(home), cache=str(tmp_path / "cache"), valid_fraction=0.5)
    assert read_tokens(data).train.tobytes() == b"train\0"
    assert list(training_text(data)) == ["train"]


def test_many_stars_take_no_exponential_time():
    listed = (("train", "/".join(["**", "*a*"] * 40)),)
    assert split_of(Path("/a") / "/".join(["ab"] * 60), Path("/a"), listed) == "train"
    assert split_of(Path("/a") / "/".join(["b"] * 60), Path("/a"), listed) == "other"
    assert listed_splits(Path("/does/not/exist")) == ()
