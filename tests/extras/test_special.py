"""Special tokens of published tokenizers match `transformers` and the lm-evaluation-harness.

Vocabularies are tiny. Names of special tokens, post-processors and the files next to the tokenizer
are the published ones.
"""

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxgrow import checkpoints
from jaxgrow.checkpoints import open_checkpoint, save
from jaxgrow.models import BERTConfig, GPT2Config
from train import pretrain
from train.common.errors import UserError
from train.extras.labelled.encoding import Encoder
from train.extras.pretrained import open_text_model
from train.extras.text.reading import read_tokens
from train.extras.tokenizers import loading as tokenizers
from train.extras.tokenizers.special import added_tokens, copy_special_files, special_tokens
from train.plan.methods import Continue

TEXTS = ("Once upon a time", "a", " b c", "the end.\n")
PAIRS = (
    ("", "Once upon"),
    ("", " a time"),
    ("Once upon", " a time"),
    ("Once upon ", "a time"),
    ("a\n\n", "b"),
)


@dataclass(frozen=True)
class Published:
    """Describe a tokenizer: its kind, special tokens, post-processor, and the files next to it.

    ``model`` contains token names, which are written to the file as numbers.
    """

    special: tuple[str, ...]
    settings: dict[str, Any]  # tokenizer_config.json
    model: dict[str, Any]  # generation_config.json
    begin: str | None = None  # token that the post-processor adds before a text
    pieces: bool = False  # a vocabulary of SentencePiece, not of bytes
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    as_files: bool = False  # vocab.json and merges.txt, not tokenizer.json


LLAMA2 = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
LLAMA2 |= {"add_bos_token": True, "add_eos_token": False, "legacy": False}
LLAMA3 = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>"}
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "add_bos_token": False}
QWEN |= {"pad_token": "<|endoftext|>"}
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}
GEMMA |= {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
GPT2 = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
GPT2 |= {"tokenizer_class": "GPT2Tokenizer"}
PUBLISHED = {
    "gpt2": Published(("<|endoftext|>",), {"model_max_length": 1024, "tokenizer_class": "GPT2Tokenizer"},
        {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"},
        config={"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"}),
    "pythia": Published(("<|endoftext|>", "<|padding|>"), {**GPT2, "tokenizer_class": "GPTNeoXTokenizer"},
        {"eos_token_id": "<|endoftext|>"}),
    "llama 2": Published(("<unk>", "<s>", "</s>"), LLAMA2, {"eos_token_id": "</s>"}, "<s>", pieces=True),
    "llama 3 instruct": Published(LLAMA3_TOKENS, {**LLAMA3, "eos_token": "<|eot_id|>"}, {"eos_token_id": [*LLAMA3_TOKENS[1:]]},
        LLAMA3_TOKENS[0]),
    "qwen 2.5 instruct": Published(QWEN_TOKENS, {**QWEN, "eos_token": "<|im_end|>"},
        {"eos_token_id": ["<|im_end|>", "<|endoftext|>"]}),
    "gemma 2": Published(("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"), GEMMA,
        {"eos_token_id": ["<eos>", "<end_of_turn>"]}, "<bos>", pieces=True),
    "phi 3": Published(("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>"),
        {**LLAMA2, "add_bos_token": False, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        {"eos_token_id": ["<|endoftext|>", "<|assistant|>", "<|end|>"]}, pieces=True),
    "olmo 2": Published(("<|endoftext|>", "<|pad|>"), {**GPT2, "pad_token": "<|pad|>"}, {"eos_token_id": "<|endoftext|>"}),
    "smollm 2 instruct": Published(QWEN_TOKENS,
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        {"eos_token_id": "<|im_end|>"}),
    "gpt2 with a begin": Published(("<|endoftext|>", "</s>"),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True},
        {"eos_token_id": "</s>"}, as_files=True),
}  # fmt: skip


def made(published: Published) -> Tokenizer:
    """Make a tokenizer of single letters with a few merges."""
    gemma = "Gemma" in published.settings["tokenizer_class"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if published.pieces:
        letters = [*(chr(i) for i in range(33, 127)), "\n", "▁"]
    blank = "▁" if published.pieces else "Ġ"
    merges = [(blank, "a"), ("o", "n")]
    names = [*published.special, *letters, *map("".join, merges)]
    vocab = {token: i for i, token in enumerate(names)}
    if published.pieces:
        how = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        out = Tokenizer(models.BPE(vocab, merges, **how))
        if gemma:
            out.normalizer = normalizers.Replace(" ", "▁")
            out.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        else:
            out.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        out.decoder = decoders.Sequence(parts if gemma else [*parts, decoders.Strip(" ", 1, 0)])
    else:
        out = Tokenizer(models.BPE(vocab, merges))
        out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        out.decoder = decoders.ByteLevel()
        out.post_processor = processors.ByteLevel(trim_offsets=False)
    special = (AddedToken(name, special=True, normalized=False) for name in published.special)
    out.add_special_tokens([*special])
    if published.begin is not None or published.pieces:
        before = [] if published.begin is None else [published.begin]
        out.post_processor = processors.TemplateProcessing(
            single=[*before, "$A"],
            special_tokens=[(name, out.token_to_id(name)) for name in before],
        )
    return out


def numbered(tokenizer: Tokenizer, settings: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of tokens by numbers."""

    def number(name):
        return [*map(number, name)] if isinstance(name, list) else tokenizer.token_to_id(name)

    return {key: number(value) for key, value in settings.items()}


def written(folder, published: Published):
    """Write the folder of a small model with this tokenizer."""
    tokenizer = made(published)
    sizes = dict(context=64, layers=1, embed=8, heads=1, head_dim=8, mlp=8)
    config = GPT2Config(vocab=tokenizer.get_vocab_size(), **sizes)
    save(folder, config, runs.fresh(config))
    if published.as_files:
        tokenizer.model.save(str(folder))
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(published.settings))
    (folder / "generation_config.json").write_text(json.dumps(numbered(tokenizer, published.model)))
    file = folder / "config.json"
    about = {"bos_token_id": None, "eos_token_id": None} | numbered(tokenizer, published.config)
    file.write_text(json.dumps(json.loads(file.read_text()) | about))
    return folder


@pytest.mark.interop
@pytest.mark.parametrize("name", PUBLISHED)
def test_of_published_tokenizers_as_transformers_reads_them(name, tmp_path):
    hf = pytest.importorskip("transformers")
    folder = written(tmp_path / "model", PUBLISHED[name])
    model, theirs = open_text_model(folder), hf.AutoTokenizer.from_pretrained(folder)
    for each in TEXTS:
        ids = theirs(each)["input_ids"]
        assert model.tokenizer.encode(each).ids == ids
        assert model.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    special, begin, end = model.special, theirs.bos_token_id, theirs.eos_token_id
    assert (special.begin, special.end) == (end if begin is None else begin, end)
    ends = hf.GenerationConfig.from_pretrained(folder).eos_token_id
    assert special.ends == tuple(ends if isinstance(ends, list) else [ends])
    ids = theirs("a")["input_ids"]
    assert added_tokens(model.tokenizer) == (ids[:1] if len(ids) > 1 else [], [])


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PUBLISHED)
def test_of_published_tokenizers_as_the_harness_reads_them(name, tmp_path, monkeypatch):
    """The same tokens are scored after the same contexts."""
    hf = pytest.importorskip("transformers")
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from train.extras.evaluation.harness import Harness

    folder = written(tmp_path / "model", PUBLISHED[name])
    ours, tokenizer = Harness(folder), hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    theirs = HFLM(model, tokenizer=tokenizer, device="cpu")
    asked = {}

    def keep(self, requests, **_):
        pairs = [(list(context), list(tokens)) for _, context, tokens in requests]
        # HFLM scores windows one after the other
        asked.setdefault(type(self).__name__, []).extend(pairs)
        return [(0.0, True)] * len(requests)

    long = [SimpleNamespace(args=("Once upon a time " * 9,))]
    for model in (ours, theirs):
        monkeypatch.setattr(type(model), "_loglikelihood_tokens", keep)
        model.loglikelihood([SimpleNamespace(args=pair) for pair in PAIRS], disable_tqdm=True)
        model.loglikelihood_rolling(long, disable_tqdm=True)
    assert asked["Harness"] == asked["HFLM"] and len(asked["HFLM"]) > len(PAIRS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_texts_of_a_fine_tuning_begin_and_end_as_the_files_say(name, tmp_path):
    folder = written(tmp_path / "model", PUBLISHED[name])
    model = open_text_model(folder)
    encoder = Encoder(tokenizers.name_of(folder), model.config)
    assert [*encoder.frame.begin] == added_tokens(model.tokenizer)[0]
    assert encoder.frame.end == (model.special.end,) != (encoder.frame.pad,)
    pad = model.special.names.get("pad_token")
    if pad not in (None, model.special.names.get("eos_token")):
        assert model.tokenizer.id_to_token(encoder.frame.pad) == pad


@pytest.mark.parametrize("adds", [True, False])
def test_texts_of_an_encoder_are_marked_as_its_tokenizer_marks_them(adds, tmp_path):
    """Without a post-processor, the names of BERT's tokens decide."""
    words = ["a", "b", "[START]", "[STOP]", "[EMPTY]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "a"))
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[START] $A [STOP]",
            pair="[START] $A [STOP] [STOP] $B [STOP]",
            special_tokens=[("[START]", 2), ("[STOP]", 3)],
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[EMPTY]"}')
    model = BERTConfig(vocab=8, context=8, layers=1, embed=4, heads=1, head_dim=4, mlp=4)
    found = Encoder(str(tmp_path / "tokenizer.json"), model).frame
    assert found == (((2,), (3, 3), (3,), 4) if adds else ((5,), (6,), (6,), 4))


def test_without_other_files_the_names_of_tokens_decide(tmp_path):
    tokenizer = made(PUBLISHED["llama 3 instruct"])
    special = special_tokens(tokenizer, None)
    ids = [tokenizer.token_to_id(name) for name in LLAMA3_TOKENS]
    assert (special.begin, special.end, special.ends) == (ids[0], ids[1], (ids[1],))
    assert special_tokens(tokenizer, tmp_path) == special


def test_unknown_token_numbers_end_nothing(tmp_path):
    folder = written(tmp_path / "model", PUBLISHED["gpt2"])
    (folder / "generation_config.json").write_text('{"eos_token_id": [50256, null, -1]}')
    assert open_text_model(folder).special.ends == (0,)  # of config.json


def test_a_masked_model_uses_the_post_processor(tmp_path):
    names = ("<s>", "</s>", "<pad>", "<mask>", "<unk>")
    tokenizer = made(replace(PUBLISHED["gpt2"], special=names))
    assert added_tokens(tokenizer) == ([], [])
    how = dict(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), **how)
    assert added_tokens(tokenizer) == ([0], [1])


# --- runs and exports ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run with a tokenizer from ``vocab.json`` and ``merges.txt``.

    Its documents end with ``</s>``, as ``tokenizer_config.json`` specifies.
    """
    home = tmp_path_factory.mktemp("special")
    source = written(home / "source", PUBLISHED["gpt2 with a begin"])
    data = replace(runs.experiment(home).data, tokenizer=str(source))
    model = replace(runs.MODEL, vocab=made(PUBLISHED["gpt2 with a begin"]).get_vocab_size())
    experiment = runs.experiment(home, steps=2, checkpoint_every=2, model=model, data=data)
    pretrain.run_experiment(experiment, home / "run")
    return experiment, home / "run"


def test_a_run_ends_documents_as_the_files_say_and_keeps_the_special_tokens(run):
    experiment, folder = run
    model = open_text_model(folder)
    end = model.tokenizer.token_to_id("</s>")
    found = read_tokens(experiment.data)
    assert end in found.train and 0 not in found.train
    assert (model.special.begin, model.special.end, model.special.ends) == (end, end, (end,))


@pytest.mark.interop
def test_an_export_has_the_special_tokens_and_a_decoder(run, tmp_path):
    hf, text = pytest.importorskip("transformers"), "Once upon a time"
    runs.export(run[1], tmp_path / "out")
    ours, theirs = (
        open_text_model(tmp_path / "out"),
        hf.AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    end = open_text_model(run[1]).special.end
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ours.special.end == config["eos_token_id"] == theirs.eos_token_id == end
    ids = ours.tokenizer.encode(text).ids
    assert theirs(text)["input_ids"] == ids
    assert ours.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_a_continued_model_keeps_all_tokens_that_end_texts(tmp_path):
    source = written(tmp_path / "instruct", PUBLISHED["llama 3 instruct"])
    expected = open_text_model(source).special.ends
    assert len(expected) == 2
    config = open_checkpoint(source).config
    data = replace(runs.experiment(tmp_path).data, tokenizer=str(source / "tokenizer.json"))
    how = dict(steps=1, batch=4, model=config, data=data)
    own = runs.experiment(tmp_path, method=Continue(str(source)), **how)
    pretrain.run_experiment(own, tmp_path / "run")
    runs.export(tmp_path / "run", tmp_path / "out")
    for name in ("run", "out"):
        assert open_text_model(tmp_path / name).special.ends == expected
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tuple(about["eos_token_id"]) == expected


def test_the_ids_of_config_json_belong_to_a_run_and_to_an_orbax_folder(tmp_path):
    """Folders of GPT-2 that older versions of `transformers` saved have the ids only there."""
    source = written(tmp_path / "gpt2", PUBLISHED["gpt2"])
    (source / "generation_config.json").unlink()
    expected = open_text_model(source).special
    assert expected.end is not None
    checkpoints.transform(source, checkpoints.Output(tmp_path / "orbax", "orbax"), {})
    assert open_text_model(tmp_path / "orbax").special == expected
    for folder in (source, tmp_path / "orbax"):
        run = tmp_path / f"run of {folder.name}"
        run.mkdir()
        copy_special_files(folder, run)
        assert special_tokens(tokenizers.tokenizer_of(source), run) == expected


@pytest.mark.interop
def test_a_chat_is_that_of_transformers(tmp_path):
    pytest.importorskip("jinja2")
    hf = pytest.importorskip("transformers")
    from train.extras.evaluation.chat import render_chat

    template = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}
<|user|>{{ m['content'] | trim }}{{ eos_token }}
{% else %}{% generation %}{{ m['content'] | tojson }}{% endgeneration %}{% break %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
    folder = written(tmp_path / "model", PUBLISHED["phi 3"])
    settings = PUBLISHED["phi 3"].settings | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, special = hf.AutoTokenizer.from_pretrained(folder), open_text_model(folder).special
    for said in ((" hi ",), ("a", "<b>ä", "c")):
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
        how = dict(tokenize=False, add_generation_prompt=True)
        assert render_chat(special, messages) == tokenizer.apply_chat_template(messages, **how)


def test_a_damaged_file_is_named(tmp_path):
    folder = written(tmp_path / "model", PUBLISHED["gpt2"])
    for content in ("{", "[]"):
        (folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(
            UserError, match=r"tokenizer_config.json is damaged: .*; download or copy it again"
        ):
            _ = open_text_model(folder).special
