"""``python -m train.generate``; full models generate the same text as `transformers`."""

import io
import json
import re
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import runs

from jaxgrow.checkpoints import load, save
from jaxgrow.checkpoints.orbax import export_model
from jaxgrow.extras.models.generation import generate
from jaxgrow.models import GPT2Config, ViTConfig
from jaxgrow.untrusted import escape_text
from train import generate as command
from train.common.errors import UserError, exits_cleanly
from train.extras.evaluation.stopping import Stopping
from train.extras.tokenizers.loading import load_tokenizer

SIZES = dict(vocab=256, context=48, layers=2, embed=16, heads=2, head_dim=8, mlp=32)


def written(folder, config):
    """Write a model with distinct predictions, and a byte tokenizer."""
    save(folder, config, jax.tree.map(lambda x: 8 * x, runs.fresh(config)))
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return written(tmp_path_factory.mktemp("generate") / "gpt", GPT2Config(**SIZES))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command and return its output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
        command.main()
        return capsys.readouterr().out

    return run


def test_it_prints_prompts_with_their_continuations(gpt, run):
    printed = run(gpt, "--prompt", "ab", "a word", "--max-new", 8, "--json")
    samples = [json.loads(line) for line in printed.splitlines()]
    assert [sample["prompt"] for sample in samples] == ["ab", "a word"]
    config, params = load(gpt)
    found = generate(config, params, [list(b"ab"), list(b"a word")], max_new=8, end=0)
    for sample, tokens in zip(samples, found, strict=True):
        text = bytes(tokens[tokens != 0].tolist()).decode(errors="replace")
        assert sample["text"] == sample["prompt"] + text
        assert sample["tokens"] == len(tokens) and sample["ended"] == (tokens[-1] == 0)
    assert run(gpt, "--prompt", "ab", "--prompt", "a word", "--max-new", 8) == escape_text(
        "".join(sample["text"] + "\n" for sample in samples)
    )


def test_the_kernel_of_the_training_is_not_needed(gpt, tmp_path, run):
    config, params = load(gpt)
    printed = []
    for by in ("auto", "splash"):
        folder = tmp_path / by
        folder.mkdir()
        export_model(folder, replace(config, attention=by), params)
        (folder / "tokenizer.json").write_bytes((gpt / "tokenizer.json").read_bytes())
        printed.append(run(folder, "--prompt", "ab", "--max-new", 8))
    assert printed[0] == printed[1]


def test_samples_differ_and_the_same_seed_repeats_them(gpt, run):
    draw = f"{gpt} --prompt ab --max-new 8 --samples 2 --json --temperature 3 --top-p 0.95".split()
    one, again, other = run(*draw), run(*draw), run(*draw, "--seed", 1)
    assert one == again != other
    first, second = map(json.loads, one.splitlines())
    assert first != second


def test_prompts_are_read_line_by_line(gpt, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\fwords\n"))
    printed = run(gpt, "--prompt", "-", "--json", "--max-new", 64)
    samples = [json.loads(line) for line in printed.splitlines()]
    assert [s["prompt"] for s in samples] == ["one", "two\fwords"]
    assert all(s["ended"] or s["tokens"] == 48 - len(s["prompt"]) for s in samples)


def test_a_finished_run_is_a_model(small_run, run):
    assert run(small_run, "--prompt", "ab", "--max-new", 3).startswith("ab")


@pytest.mark.parametrize(("given", "says"), [
    (["--prompt", ""], "prompt 0 is empty: give at least one token"),
    (["--prompt", "a" * 48], "context of 48: shorten it, or remove its beginning with --cut"),
])  # fmt: skip
def test_what_is_wrong_is_one_line_and_code_2(gpt, monkeypatch, capsys, given, says):
    monkeypatch.setattr(sys, "argv", ["generate", str(gpt), *given])
    with pytest.raises(SystemExit) as stop:
        exits_cleanly(command.main)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and re.search(says, lines[0])


def test_models_of_something_else_are_refused(tmp_path, run):
    image = ViTConfig(image=8, patch=4, classes=3, layers=1, embed=8, heads=1, head_dim=8, mlp=8)
    message = "contains a ViTConfig for images, but this command needs a model that predicts tokens"
    with pytest.raises(UserError, match=message):
        run(written(tmp_path / "vit", image), "--prompt", "a")
    with pytest.raises(UserError, match="there is no folder"):
        run(tmp_path / "none", "--prompt", "a")


def test_a_text_ends_before_a_stop_string(gpt, run):
    ask = (gpt, "--prompt", "ab", "--max-new", 20)
    whole = json.loads(run(*ask, "--json"))
    new = whole["text"][2:]
    stop = new[3:5]
    sample = json.loads(run(*ask, "--json", "--stop", "never there", stop))
    assert sample["text"] == "ab" + new[: new.index(stop)]
    assert sample["ended"] and sample["tokens"] < whole["tokens"]
    # A stop string in the prompt ends nothing.
    assert run(*ask, "--stop", "ab") == run(*ask)


@pytest.mark.parametrize("stop", [[], ["--stop", "q#"]])
def test_a_streamed_text_is_the_same(gpt, run, stop):
    arguments = (gpt, "--prompt", "ab", "--max-new", 30, *stop)
    assert run(*arguments, "--stream") == run(*arguments)


def test_parts_of_a_stream_come_as_the_text_grows(gpt):
    parts = []
    asked = command.Asked(stream=parts.append)
    [sample], timing = command.sample_texts(gpt, ["ab"], asked, max_new=30)
    assert "ab" + "".join(parts) == sample["text"]
    assert sum(bool(part) for part in parts) > 1
    assert timing.tokens == sample["tokens"]


def test_no_part_of_a_stop_string_is_streamed():
    stopping = Stopping(load_tokenizer("bytes"), ["END", "D!"])
    each = {"a EN": "a ", "a E": "a ", "a EM": "a EM", "a END of": "a ", "aD": "a", "aD!": "a"}
    for text, settled in each.items():
        assert stopping.settled(np.frombuffer(text.encode(), np.uint8)) == settled
    # half of a character
    assert stopping.settled(np.frombuffer("aä".encode()[:-1], np.uint8)) == "a"


def test_a_prompt_that_does_not_fit_is_cut_if_asked(gpt, run):
    long = "".join(chr(ord("a") + i % 26) for i in range(60))
    message = "a prompt has 60 tokens, which leaves no room in the model's context of 48"
    with pytest.raises(UserError, match=message):
        run(gpt, "--prompt", long)
    cut = json.loads(run(gpt, "--prompt", long, "--cut", "--max-new", 8, "--json"))
    assert escape_text(cut["text"]) == run(gpt, "--prompt", long[-40:], "--max-new", 8)[:-1]
    short = (gpt, "--prompt", "ab", "--max-new", 8)
    assert run(*short, "--cut") == run(*short)
    # New tokens get half of the context.
    half = json.loads(run(gpt, "--prompt", long, "--cut", "--max-new", 400, "--json"))
    assert half["text"].startswith(long[-24:]) and (half["ended"] or half["tokens"] == 24)


def test_a_chat_is_the_template_of_the_model(gpt, tmp_path, run):
    pytest.importorskip("jinja2")
    model = written(tmp_path / "chat", GPT2Config(**SIZES))
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    end = "<|endoftext|>"
    settings = {"chat_template": template, "bos_token": end, "eos_token": end}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    answer = run(model, "--prompt", "hi", "--chat", "--max-new", 8)
    config, params = load(model)
    [tokens] = generate(config, params, [[0, *b"<user>hi<a>"]], max_new=8, end=0)
    assert answer == escape_text(load_tokenizer("bytes").decode(tokens.tolist()) + "\n")
    (model / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    with pytest.raises(UserError, match="the chat template of the model failed: no user"):
        run(model, "--prompt", "hi", "--chat")


COMMON = dict(
    vocab_size=61, num_hidden_layers=3, num_attention_heads=4, hidden_size=24, intermediate_size=40
)
COMMON |= dict(max_position_embeddings=40, num_key_value_heads=2)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 100.0}
ARCHITECTURES = {
    "GPT2": dict(vocab_size=61, n_positions=40, n_layer=3, n_head=4, n_embd=24, n_inner=40),
    "Llama": COMMON | {"rope_parameters": LLAMA3},
    "Qwen2": COMMON | {"tie_word_embeddings": True},
}


@pytest.mark.interop
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_likeliest_tokens_are_those_of_transformers(name, tmp_path):
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = ARCHITECTURES[name] | {"bos_token_id": None, "eos_token_id": None}
    architecture = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(hf, architecture)(getattr(hf, f"{name}Config")(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    # Weights larger than freshly initialised ones avoid repeating a single token.
    with torch.no_grad():
        for path, p in model.named_parameters():
            scale = p.ndim == 1 and "bias" not in path
            p.copy_(torch.randn(p.shape, generator=generator) / 3 + scale)
    model.save_pretrained(tmp_path / "model")

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n).tolist() for n in (3, 1, 12)]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])  # padding on the left
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    settings = dict(attention_mask=mask, do_sample=False, max_new_tokens=20, pad_token_id=0)
    with torch.no_grad():
        theirs = model.generate(padded, **settings)
    found = generate(*load(tmp_path / "model"), prompts, max_new=20)
    np.testing.assert_array_equal(np.stack(found), theirs[:, longest:].numpy())
    assert all(len(set(tokens.tolist())) > 3 for tokens in found)
