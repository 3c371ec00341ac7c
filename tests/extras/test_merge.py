"""Two fine-tunes of one model are merged although their configs or vocabularies differ."""

import json

import numpy as np
import pytest
from published import called, content, published, refused, stored

from jaxgrow.checkpoints import CheckpointError, Interpolated, open_checkpoint


def tokenizer(folder, tokens) -> None:
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def two(tmp_path, a=None, b=None, architecture="LlamaForCausalLM"):
    keys = {"tie_word_embeddings": False}
    return (
        published(tmp_path / "a", architecture, **{**keys, **(a or {})}),
        published(tmp_path / "b", architecture, seed=1, **{**keys, **(b or {})}),
    )


def merged(capsys, tmp_path, *words):
    about = called(capsys, "interpolate", *words, tmp_path / "m", "--alpha", 0.25)
    return about["notes"], content(tmp_path / "m"), stored(tmp_path / "m")


@pytest.mark.parametrize("order", [1, -1])
def test_the_longer_context_is_taken(tmp_path, order, capsys):
    folders = two(tmp_path, b={"max_position_embeddings": 32})[::order]
    notes, config, tensors = merged(capsys, tmp_path, *folders)
    assert notes == ["the context is 32 tokens, the longer one of the two"]
    assert config["max_position_embeddings"] == 32
    a, b = map(stored, folders)
    for name, x in tensors.items():
        np.testing.assert_allclose(x, 0.75 * a[name] + 0.25 * b[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_tied_and_an_untied_head_give_an_untied_one(tmp_path, order, architecture, capsys):
    folders = two(tmp_path, a={"tie_word_embeddings": True}, architecture=architecture)[::order]
    notes, config, _ = merged(capsys, tmp_path, *folders)
    assert notes[0].startswith(f"the head of {tmp_path / 'a'} is tied")
    assert config["tie_word_embeddings"] is False
    before, up, both = (open_checkpoint(f) for f in (*folders, tmp_path / "m"))

    def head(source):
        tied = source.config.tied
        return source.read("token_embedding").T if tied else source.read("head_kernel")

    expected = 0.75 * head(before) + 0.25 * head(up)
    np.testing.assert_allclose(both.read("head_kernel"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_vocabularies_are_matched_by_token(tmp_path, order, tied, capsys):
    keys = {"tie_word_embeddings": tied}
    small, large = folders = two(tmp_path, keys, keys | {"vocab_size": 13, "pad_token_id": 12})
    words = ["interpolate", *folders[::order], tmp_path / "m", "--alpha", 0.5]
    error = refused(capsys, *words)
    assert "vocabularies of" in error and "matched by token. Put the tokenizer.json" in error
    assert "De-coalesce" not in error
    tokenizer(small, [*"abcdefghij", "<small>"])
    tokenizer(large, ["<new>", *"jihgfedcba", "<pad>"])
    about = called(capsys, *words)
    assert "the result has the 13 of" in about["notes"][0]
    assert "10 rows of both models were matched by token" in about["notes"][0]
    assert about["notes"][1].endswith('are not in the result: "<small>"')
    a, b, mixed = stored(small), stored(large), stored(tmp_path / "m")
    for name in ["model.embed_tokens.weight", *["lm_head.weight"] * (not tied)]:
        expected = b[name].copy()
        expected[1:11] = 0.5 * b[name][1:11] + 0.5 * a[name][9::-1]
        np.testing.assert_allclose(mixed[name], expected, rtol=0, atol=1e-6)
    assert (tmp_path / "m/tokenizer.json").read_text() == (large / "tokenizer.json").read_text()
    assert content(tmp_path / "m")["pad_token_id"] == 12


def two_files(folder, tokens) -> None:
    """``vocab.json`` as GPT-2 has it, and tokens that were added later."""
    *first, last, end = tokens
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(first)}))
    (folder / "merges.txt").write_text("#version: 0.2")
    (folder / "added_tokens.json").write_text(json.dumps({last: len(first)}))
    added = {str(len(first) + 1): {"content": end, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def unigram(folder, tokens) -> None:
    model = {"vocab": [[token, -1.0] for token in tokens[:-1]]}
    added = [{"id": len(tokens) - 1, "content": tokens[-1]}]
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"model": model, "added_tokens": added}))


def chat(folder, tokens) -> None:
    """A token that only ``tokenizer_config.json`` has, because it was added for chats."""
    tokenizer(folder, tokens[:-1])
    added = {str(len(tokens) - 1): {"content": tokens[-1]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


@pytest.mark.parametrize(
    ("first", "second"),
    [(tokenizer, chat), (two_files, two_files), (unigram, two_files), (chat, chat)],
)
def test_every_file_of_a_tokenizer_is_read(tmp_path, first, second, capsys):
    small, large = folders = two(tmp_path, b={"vocab_size": 13})
    first(small, [*"abcdefghij", "<end>"])
    second(large, ["<new>", *"jihgfedcba", "<pad>", "<end>"])
    about = called(capsys, "interpolate", *folders, tmp_path / "m", "--alpha", 0.5)
    assert "11 rows of both models were matched by token" in about["notes"][0]
    a, b, mixed = (stored(x)["model.embed_tokens.weight"] for x in (small, large, tmp_path / "m"))
    expected = b.copy()
    expected[1:11] = (b[1:11] + a[9::-1]) / 2
    expected[12] = (b[12] + a[10]) / 2
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-6)
    kept = {file.name for file in large.glob("*.json")} - {"config.json"}
    assert kept <= {file.name for file in (tmp_path / "m").iterdir()}


@pytest.mark.parametrize(("take", "of"), [(None, 0), ("A", 0), ("B", 1)])
def test_vocabularies_of_one_size_are_matched_by_token(tmp_path, take, of, capsys):
    folders = two(tmp_path)
    orders = [*"abcdefghij", "<a>"], ["<b>", *"bacdefghij"]
    for folder, tokens in zip(folders, orders, strict=True):
        tokenizer(folder, tokens)
    words = ["interpolate", *folders, tmp_path / "m", "--alpha", 0.25]
    about = called(capsys, *words, *["--take-config", take] * bool(take))
    assert about["notes"] == [
        f"the two tokenizers give other ids to some tokens: the result has the tokenizer of {folders[of]}, and 10 rows of "
        "both models were matched by token",
        f'these tokens of {folders[1 - of]} are not in the result: "{"<a>" if of else "<b>"}"',
    ]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        a, b = (stored(folder)[name] for folder in folders)
        mixed = stored(tmp_path / "m")[name]
        for i, token in enumerate(orders[of]):
            expected = (a, b)[of][i]
            if token in orders[0] and token in orders[1]:
                expected = 0.75 * a[orders[0].index(token)] + 0.25 * b[orders[1].index(token)]
            np.testing.assert_allclose(mixed[i], expected, rtol=0, atol=1e-6)
    file = (tmp_path / "m/tokenizer.json").read_text()
    assert file == (folders[of] / "tokenizer.json").read_text()


def test_a_token_in_an_unused_row_is_kept(tmp_path, capsys):
    """Qwen has more rows than tokens, and a fine-tune uses one of them."""
    folders = two(tmp_path)
    tokenizer(folders[0], "abcdefgh")
    tokenizer(folders[1], [*"abcdefgh", "<tool>"])
    notes, _, tensors = merged(capsys, tmp_path, *folders)
    assert f"has the tokenizer of {folders[1]}, and 8 rows" in notes[0] and len(notes) == 1
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(tensors[name][8], stored(folders[1])[name][8])


def test_equal_tokenizers_need_no_note(tmp_path, capsys):
    folders = two(tmp_path)
    for folder in folders:
        two_files(folder, "abcdefghijk")
    assert merged(capsys, tmp_path, *folders)[0] == []
    folders = two(tmp_path / "other")
    tokenizer(folders[0], "abcdefghijk")
    tokenizer(folders[1], "ABCDEFGHIJK")
    error = refused(capsys, "interpolate", *folders, tmp_path / "n", "--alpha", 0.5)
    assert "have no token in common" in error


def test_settings_of_the_function_need_a_choice(tmp_path, capsys):
    key, values = "rope_theta", (1e4, 5e5)
    folders = two(tmp_path, *({key: value} for value in values))
    words = ["interpolate", *folders, tmp_path / "m", "--alpha", 0.5]
    error = refused(capsys, *words)
    assert f"cannot be merged: {key} is " in error and "--take-config A" in error
    assert "De-coalesce" not in error
    for choice, value in zip("AB", values, strict=True):
        called(capsys, *words, "--take-config", choice, "--overwrite")
        assert content(tmp_path / "m")[key] == value
    with pytest.raises(CheckpointError, match="To merge them, give both the same config"):
        Interpolated(*map(open_checkpoint, folders), 0.5)


def test_other_shapes_outside_of_the_layers_are_named(tmp_path, capsys):
    folders = two(tmp_path, b={"n_positions": 20}, architecture="GPT2LMHeadModel")
    error = refused(capsys, "interpolate", *folders, tmp_path / "m", "--alpha", 0.5)
    assert "cannot be merged: n_positions is 16 in A and 20 in B" in error
    folders = (folders[0], published(tmp_path / "c", "GPT2LMHeadModel", n_inner=20))
    error = refused(capsys, "interpolate", *folders, tmp_path / "m", "--alpha", 0.5)
    assert "De-coalesce the smaller model first" in error
