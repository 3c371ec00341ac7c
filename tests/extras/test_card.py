"""A model that is made from others has a model card, into which no file can write its own text."""

import json
import os

import pytest
import yaml
from published import called, published

from jaxgrow.cli import program
from jaxgrow.extras.commands import card

DEEP = ("--method", "stack", "--layers", 8)
APACHE = "---\nlicense: apache-2.0  # as LICENSE says\ntags:\n- chat\nbase_model: org/first\n---\n# Scores: 99 %\n"


def parts(folder) -> tuple[dict, str, list]:
    """Return the front matter, the text and the steps of a card."""
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    text, steps = body.split("```json\n")
    return yaml.safe_load(front), text, json.loads(steps.removesuffix("```\n"))


def model(tmp_path, name="a", readme=APACHE, **keys):
    folder = published(tmp_path / name, "LlamaForCausalLM", **keys)
    if readme is not None:
        (folder / "README.md").write_text(readme)
    return folder


def test_a_grown_model_names_its_base_its_method_and_its_licence(tmp_path, capsys):
    source = model(tmp_path)
    called(capsys, "grow", source, tmp_path / "b", *DEEP)
    front, text, steps = parts(tmp_path / "b")
    assert front.pop("library_name") == "transformers" and front.pop("license") == "apache-2.0"
    assert front == {"tags": ["jaxgrow", "stack"], "base_model": "a"}
    assert "LlamaForCausalLM with" in text and "Scores" not in text
    assert steps[0]["arguments"] == {"method": "stack", "target": {"layers": 8}}
    assert steps[0]["new_layers"] == [4, 5, 6, 7]
    called(capsys, "grow", tmp_path / "b", tmp_path / "c", "--layers-from", "0-3", "--to", "orbax")
    called(capsys, "convert", tmp_path / "c", tmp_path / "d", "--to", "hf")
    front, _, steps = parts(tmp_path / "d")
    assert front["base_model"] == "a" and front["license"] == "apache-2.0"
    assert [step["arguments"]["method"] for step in steps] == ["stack", "passthrough"]


@pytest.mark.interop
def test_hugging_face_reads_the_card(tmp_path, capsys):
    hub = pytest.importorskip("huggingface_hub", reason="pip install -e '.[interop-test]'")
    called(capsys, "grow", model(tmp_path), tmp_path / "b", *DEEP)
    data = hub.ModelCard.load(tmp_path / "b/README.md").data
    assert (data.base_model, data.license, data.library_name) == ("a", "apache-2.0", "transformers")
    assert data.tags == ["jaxgrow", "stack"]


def test_the_same_model_keeps_its_card(tmp_path, capsys):
    called(capsys, "convert", model(tmp_path), tmp_path / "b", "--dtype", "bfloat16")
    assert (tmp_path / "b/README.md").read_text() == APACHE
    called(capsys, "convert", model(tmp_path, "c", None), tmp_path / "d", "--dtype", "bfloat16")
    assert not (tmp_path / "d/README.md").exists()


def test_several_models_are_a_merge_and_have_a_licence_only_if_it_is_the_same(tmp_path, capsys):
    one, other = model(tmp_path), model(tmp_path, "c", APACHE.replace("apache-2.0", "mit"), seed=1)
    same = model(tmp_path, "models--org--x/snapshots/1f", "", seed=2, license="apache-2.0")
    called(capsys, "interpolate", one, other, tmp_path / "m", "--alpha", 0.5)
    front, _, _ = parts(tmp_path / "m")
    assert front["base_model"] == ["a", "c"] and front["base_model_relation"] == "merge"
    assert "license" not in front
    called(capsys, "grow", one, tmp_path / "n", "--layers-from", f"0-1,{same}:2-3")
    front, _, steps = parts(tmp_path / "n")
    assert front["base_model"] == ["a", "org/x"] and front["license"] == "apache-2.0"
    assert steps[0]["arguments"]["sources"] == ["a:0", "a:1", "1f:2", "1f:3"]
    assert str(tmp_path) not in (tmp_path / "n/README.md").read_text()


HOSTILE = {
    "another key": "license: 'mit\\nfoo: bar'",
    "HTML": "license: <script>",
    "a tag of YAML": "license: !!python/object/apply:os.system [id]",
    "a reference": "a: &a [x]\nlicense: *a",
    "a bomb": "a: &a [x]\nb: &b [*a, *a]\n<<: *b\nlicense: {<<: *b}",
    "a list": "license:\n- mit",
    "no end of the line": f"license: {'x' * 70_000}",
    "bytes": "license: \x00\x7f",
}


@pytest.mark.parametrize("front", HOSTILE.values(), ids=HOSTILE)
def test_values_of_other_files_stay_values(tmp_path, front, capsys):
    source = model(tmp_path, readme=f"---\n{front}\n---\n", license="a\n---\n# text")
    step = {"operator": "```\n# text", "arguments": {"method": "<b>", "x": "/home/me/y\n```"}}
    (source / "jaxgrow.json").write_text(json.dumps({**step, "history": [7, step]}))
    called(capsys, "grow", source, tmp_path / "b", *DEEP)
    found, text, steps = parts(tmp_path / "b")
    assert found.keys() == {"library_name", "tags", "base_model"} and "# text" not in text
    assert [s["operator"] for s in steps] == ["```\n# text", "```\n# text", "grow"]
    assert steps[0]["arguments"]["x"] == "y\n```"
    lines = (tmp_path / "b/README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("```")] == ["```json", "```"]


def test_the_name_of_a_folder_is_a_value(tmp_path, capsys):
    name = 'x: "y" # z \N{OWL}'
    source = model(tmp_path, name)
    called(capsys, "grow", source, tmp_path / "b", *DEEP)
    assert parts(tmp_path / "b")[0]["base_model"] == name


def test_a_model_in_the_current_folder_has_the_name_of_the_folder(tmp_path, capsys, monkeypatch):
    source = model(tmp_path)
    (source / "inside").mkdir()
    for folder, path in ((source, "."), (source / "inside", "..")):
        monkeypatch.chdir(folder)
        called(capsys, "grow", path, tmp_path / "b", *DEEP, "--overwrite")
        assert parts(tmp_path / "b")[0]["base_model"] == "a"


def test_new_tokens_are_not_paths(tmp_path, capsys):
    like = {"</think>": [1, 2], 'a "/b': [3]}
    (tmp_path / "like.json").write_text(json.dumps(like))
    called(capsys, "grow", model(tmp_path), tmp_path / "b", "--like-tokens", tmp_path / "like.json")
    assert parts(tmp_path / "b")[2][0]["arguments"]["like_tokens"] == like


def test_links_are_not_followed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(card, "_LARGEST_README", 40)
    source = model(tmp_path, readme="---\nlicense: https://example.com/licence\n---\n")
    called(capsys, "grow", source, tmp_path / "b", *DEEP)
    assert "license" not in parts(tmp_path / "b")[0]  # its end is not read
    monkeypatch.undo()
    called(capsys, "grow", source, tmp_path / "c", *DEEP)
    assert parts(tmp_path / "c")[0]["license"] == "https://example.com/licence"
    (tmp_path / "secret").write_text(APACHE)
    (source / "README.md").unlink()
    os.symlink(tmp_path / "secret", source / "README.md")
    assert program.main([*map(str, ("grow", source, tmp_path / "d", *DEEP))]) == 1
    assert "outside the folder" in capsys.readouterr().err
