"""Tokenizers and chat templates of an attacker end in one line, within the limits."""

import json
import time
from dataclasses import replace

import pytest
import runs
from limits import using_limits

from jaxgrow.checkpoints import save
from jaxgrow.models import GPT2Config
from train.common.errors import UserError
from train.data.text import Data
from train.extras.bounded import BoundedTokenizer, child
from train.extras.evaluation.chat import render_chat
from train.extras.evaluation.tasks import evaluate_tasks
from train.extras.text.reading import read_tokens
from train.extras.tokenizers.loading import _byte_tokenizer, load_tokenizer
from train.extras.tokenizers.special import Special, special_tokens
from train.generate import Asked, sample_texts

PLAIN = Special(0, 0, (0,), {"bos_token": "<s>"}, None)


def chat(template: str) -> str:
    return render_chat(replace(PLAIN, template=template), [{"role": "user", "content": "hi"}])


# --- templates ---


@pytest.mark.parametrize("template", [
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**8) ~ ('b' * 10**8) }}",
    "{{ [0] * 10**10 }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content.x.y }}",
    "{{ 'a' + 3 }}",
    "{% for %}",
    "{{ '%99999999999d' % 3 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include 'x' %}",
    "{{ strftime_now(3) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('a\x1b[31m\nb') }}",
    "{{" + "(" * 100_000,
])  # fmt: skip
def test_a_template_that_fails_is_one_line(template):
    with pytest.raises(UserError, match="the chat template of the model failed") as error:
        chat(template)
    assert "\n" not in str(error.value)
    assert chat("{{ bos_token }}{{ messages[0].content }}") == "<s>hi"


@pytest.mark.parametrize("template", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x = 10**(10**9) %}",
])  # fmt: skip
def test_a_template_that_does_not_end_is_stopped(template):
    began = time.monotonic()
    with using_limits(seconds=1), pytest.raises(UserError, match=r"more than 1 s.*--limits sec"):
        chat(template)
    assert time.monotonic() - began < 30
    assert chat("{{ messages[0].content }}") == "hi"


# --- tokenizers ---


@pytest.fixture
def about(tmp_path):
    """A valid tokenizer, to change, and a function that loads what it became."""
    _byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())

    def load(change):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
        return load_tokenizer(str(tmp_path / "tokenizer.json"))

    load({})
    return load


def doubling(times: int, name: str = "String") -> dict:
    each = {"type": "Replace", "pattern": {name: "q"}, "content": "qq"}
    return {"normalizer": {"type": "Sequence", "normalizers": [each] * times}}


def test_replacements_that_multiply_a_text_are_refused(about):
    about(doubling(3))
    for times, name in ((40, "String"), (40, "Regex"), (7, "String")):
        with pytest.raises(UserError, match=r"the normalizer of .* characters of one"):
            about(doubling(times, name))


def test_a_regular_expression_that_does_not_end_is_stopped(about):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"}
    with using_limits(seconds=2), pytest.raises(UserError, match=r"no tokenizer at .*tokenizer"):
        about({"pre_tokenizer": split | {"invert": False}})


def slow_on(letter: str) -> dict:
    """A tokenizer whose regular expression is slow for a text with this letter."""
    pattern = {"Regex": f"{letter}*" * 4 + "b"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, last]}}


def test_a_tokenizer_that_is_slow_only_on_the_name_of_its_token_is_stopped(about):
    """The main process encodes the names of special tokens."""
    token = {"id": 256, "content": "z" * 200 + " ab", "special": True, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    with using_limits(seconds=1), pytest.raises(UserError, match="no tokenizer at"):
        about(slow_on("z") | {"added_tokens": [token]})


def test_a_decoder_has_no_regular_expression(about):
    """The main process decodes the texts that a model generates."""
    slow = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}
    with pytest.raises(UserError, match=r"the decoder of .* has a regular expression"):
        about({"decoder": {"type": "Sequence", "decoders": [slow]}})
    for wrong in ({"type": "Replace", "pattern": 5}, {"type": "Sequence", "decoders": 5}):
        with pytest.raises(UserError, match="no tokenizer at"):
            about({"decoder": wrong})


@pytest.mark.parametrize("long", [False, True], ids=["encoding", "cutting"])
def test_a_tokenizer_that_is_slow_only_on_the_corpus_is_stopped(about, tmp_path, long):
    about(slow_on("z"))
    (tmp_path / "text").mkdir()
    for name in "ab":
        text = ("z" * 200 + " ab ") * (400 if long else 1)
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    data = Data(
        "text", str(tmp_path / "text"), cache=str(tmp_path), tokenizer=f"{tmp_path}/tokenizer.json"
    )
    with using_limits(seconds=1), pytest.raises(UserError, match="--limits seconds=") as error:
        read_tokens(data)
    assert "characters with the tokenizer" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate"])
def test_a_tokenizer_that_is_slow_only_on_a_prompt_or_text_is_stopped(about, tmp_path, command):
    config = GPT2Config(vocab=256, context=16, layers=1, embed=8, heads=1, head_dim=8, mlp=16)
    save(tmp_path / "model", config, runs.fresh(config))
    about(slow_on("z"))
    (tmp_path / "tokenizer.json").rename(tmp_path / "model" / "tokenizer.json")
    template = "{{ messages[0].content }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)

    def ask(text):
        if command == "evaluate":
            (tmp_path / "a.txt").write_text(text)
            return evaluate_tasks(tmp_path / "model", [str(tmp_path / "a.txt")], None)
        asked = Asked(chat=command == "chat")
        return sample_texts(tmp_path / "model", [text], asked, max_new=1)

    assert ask("ab")
    with using_limits(seconds=1), pytest.raises(UserError, match="--limits seconds=") as error:
        ask("z" * 200 + " ab ")
    assert f"characters with the tokenizer {tmp_path / 'model'}" in str(error.value)
    assert "\n" not in str(error.value)


def test_texts_are_encoded_in_the_process_as_the_tokenizer_encodes_them():
    loaded = _byte_tokenizer()
    apart = BoundedTokenizer(loaded, "a")
    [name] = loaded.get_added_tokens_decoder().values()
    text = f"a{name.content}b"
    assert apart.encode_one(text, control=True) == [97, 0, 98]
    assert apart.encode_one(text) == list(text.encode())
    assert apart.encode_one("", framed=True) == []


def test_a_tokenizer_that_makes_too_many_tokens_only_of_the_corpus_is_stopped(about):
    """Each document may have many tokens, but not more than a text of its length ever has."""
    plain = about({})
    loaded = BoundedTokenizer(plain, "a")
    assert [e.ids.tolist() for e in loaded.encode_batch_fast(["az", "", "ä"])] == [
        plain.encode(text, add_special_tokens=False).ids for text in ("az", "", "ä")
    ]
    more = {"type": "Replace", "pattern": {"String": "z"}, "content": "é" * 200}
    about({})
    content = json.loads(plain.to_str()) | {"normalizer": more}
    many = BoundedTokenizer(type(plain).from_str(json.dumps(content)), "a")
    with pytest.raises(UserError, match=r"it makes 40,000 tokens of 100 characters"):
        many.encode_batch_fast(["z" * 100])
    with using_limits(bytes=150 << 20), pytest.raises(UserError, match="--limits bytes="):
        many.encode_batch_fast(["z" * 1_000_000])
    assert many.encode_batch_fast(["a"])[0].ids.tolist() == [97]


@pytest.mark.parametrize("change", [
    {"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9}},
    {"model": {"type": "WordPiece", "vocab": {}, "unk_token": 3}},
    {"model": None},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Sequence", "normalizers": 3}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed"}},
    {"post_processor": {"type": "TemplateProcessing", "single": [{"x": 1}]}},
    {"added_tokens": [{"id": -1, "content": 3}]},
], ids=lambda change: json.dumps(change)[:40])  # fmt: skip
def test_a_damaged_tokenizer_is_one_line(about, change, capfd):
    with pytest.raises(UserError, match="no tokenizer at ") as error:
        about(change)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_panic_is_one_line(tmp_path, monkeypatch):
    class PanicException(BaseException):
        """Stands for the class of pyo3, which cannot be imported."""

    def panics(*_):
        raise PanicException("index out of bounds")

    _byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("train.extras.tokenizers.loading.check_tokenizer", panics)
    with pytest.raises(UserError, match="index out of bounds"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [
    '{"eos_token": 3}',
    '{"eos_token": {"content": [1]}}',
    '{"eos_token": {}}',
    '{"eos_token": ["a"]}',
    '{"added_tokens_decoder": [1], "add_bos_token": "x", "bos_token": {"content": 3}}',
    '{"chat_template": [3]}',
    "[]",
    '{"a": ' * 50_000,
    "\udcff",
])  # fmt: skip
def test_wrong_types_beside_a_tokenizer_are_one_line(tmp_path, name, content):
    _byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as error:
        loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
        special_tokens(loaded, tmp_path)
    assert "\n" not in str(error.value)


def test_modules_in_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    child.close()
    assert chat("{{ messages[0].content }}") == "hi"
    assert not (tmp_path / "executed").exists()
