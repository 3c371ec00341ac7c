"""Check which tokens are masked, how often and how, against counts and exact binomial bounds."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from train.common.errors import UserError
from train.data.windows import BYTES, MaskedWindows, Vocabulary
from train.extras.tokenizers.special import masking_vocabulary

MASK, SPECIAL = 4, frozenset({0, 1, 4})
WORDS = Vocabulary(50, MASK, SPECIAL)
PIECES = WORDS._replace(whole_word=np.arange(50) >= 30)  # tokens 30 to 49 continue a word


def text(length, seed=0, special=0.0):
    """Draw random tokens, some of which are special tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 50, length)
    return np.where(rng.random(length) < special, rng.choice([0, 1], length), tokens).astype(
        np.uint16
    )


def samples(windows, seed=0):
    return [windows.sample(i, np.random.default_rng([seed, i])) for i in range(len(windows))]


def bpe(*pieces):
    """Return the vocabulary for masking of a BPE tokenizer with these pieces."""
    return masking_vocabulary(Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [])))


def words(tokens):
    """Find the word of each token with a loop; None marks a special token."""
    out, word = [], 0
    for i, token in enumerate(tokens):
        if token in SPECIAL:
            out.append(None)
            continue
        word += not (i and out[-1] is not None and token >= 30)
        out.append(word)
    return out


@given(st.integers(1, 90), st.floats(0.01, 1), st.floats(0, 1), st.booleans(), st.integers(0, 99))
def test_every_window_masks_the_same_number_of_positions(length, masked, special, whole, seed):
    tokens = text(3 * length + length // 2, seed, special)
    windows = MaskedWindows(tokens, length, *(PIECES if whole else WORDS), masked=masked)
    assert len(windows) == 3
    for i, (inputs, targets) in enumerate(samples(windows, seed)):
        before = tokens[i * length : (i + 1) * length]
        now, positions = inputs["tokens"], inputs["positions"]
        assert now.dtype == positions.dtype == targets.dtype == np.int32
        assert len(positions) == len(targets) == max(1, round(masked * length))
        assert (np.diff(positions) > 0).all()
        np.testing.assert_array_equal(targets, before[positions])
        away = np.delete(np.arange(length), positions)
        np.testing.assert_array_equal(now[away], before[away])
        fixed = np.isin(before, [0, 1])
        np.testing.assert_array_equal(now[fixed], before[fixed])
        assert not np.isin(now[~fixed], [0, 1]).any()
        # Special tokens become targets only if all ordinary tokens are targets.
        assert not fixed[positions].any() or set(np.flatnonzero(~fixed)) <= set(positions)


def within(count, n, p, chance=1e-6):
    """Test whether both binomial tail probabilities of ``count`` of ``n`` exceed ``chance``."""
    density = [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    return sum(density[: count + 1]) > chance and sum(density[count:]) > chance


@pytest.mark.parametrize("ids", [WORDS, PIECES], ids=["pieces", "whole words"])
def test_eight_of_ten_are_masked_one_is_drawn_and_one_is_left(ids):
    windows = MaskedWindows(text(120 * 40), 40, *ids)
    found = [(i["tokens"][i["positions"]], t) for i, t in samples(windows)]
    now, was = (np.concatenate(part) for part in zip(*found, strict=True))
    n = len(now)
    assert n == 120 * 6
    ordinary = 50 - len(SPECIAL)  # a random token may equal the old one
    assert within(int((now == MASK).sum()), n, 0.8)
    assert within(int((now == was).sum()), n, 0.1 + 0.1 / ordinary)
    assert not within(int((now == MASK).sum()), n, 0.9)  # control: the bound rejects a wrong rate
    drawn = now[(now != MASK) & (now != was)]
    assert within(len(drawn), n, 0.1 * (1 - 1 / ordinary))
    assert not set(drawn.tolist()) & SPECIAL


def test_every_place_and_every_ordinary_token_may_be_chosen():
    windows = MaskedWindows(text(400 * 20), 20, *WORDS)
    found = [i for i, _ in samples(windows)]
    count = np.bincount(np.concatenate([i["positions"] for i in found]), minlength=20)
    assert all(within(int(c), 400, 3 / 20, 1e-7) for c in count)
    many = MaskedWindows(text(60 * 100), 100, *WORDS, masked=1.0)
    drawn = np.concatenate(
        [i["tokens"][(i["tokens"] != MASK) & (i["tokens"] != t)] for i, t in samples(many)]
    )
    assert set(drawn.tolist()) == set(range(50)) - SPECIAL


@given(st.integers(2, 60), st.floats(0.05, 0.6), st.integers(0, 99))
def test_words_are_whole_but_for_what_fills_up(length, masked, seed):
    """A word is partly masked only if no complete word fits.

    Every word that is not completely masked has more tokens than all partly masked words together
    have masked tokens.
    """
    windows = MaskedWindows(text(5 * length, seed, 0.1), length, *PIECES, masked=masked)
    for i, (inputs, _) in enumerate(samples(windows, seed)):
        of = words(windows.tokens[i * length : (i + 1) * length])
        size = {w: of.count(w) for w in of if w is not None}
        hidden = [of[p] for p in inputs["positions"] if of[p] is not None]
        parts = {w: hidden.count(w) for w in hidden if hidden.count(w) < size[w]}
        assert all(size[w] > sum(parts.values()) for w in size if w not in hidden or w in parts)


def test_a_sample_is_a_function_of_its_number_and_generator():
    windows = MaskedWindows(text(400, special=0.1), 40, *PIECES)
    one, two, other = (samples(windows, seed) for seed in (1, 1, 2))
    for (a, ta), (b, tb), (c, _) in zip(one, two, other, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        np.testing.assert_array_equal(a["positions"], b["positions"])
        np.testing.assert_array_equal(ta, tb)
        assert (a["positions"] != c["positions"]).any() or (a["tokens"] != c["tokens"]).any()
    # a memory-mapped corpus is not modified
    np.testing.assert_array_equal(windows.tokens, text(400, special=0.1))


# --- tokenizers ---


def test_of_wordpiece():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "walk", "##ing", "##s"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[EXTRA]"])
    found = masking_vocabulary(tokenizer)
    assert (found.vocab, found.mask_id, found.special) == (9, 4, {0, 1, 2, 3, 4, 8})
    assert found.whole_word is not None
    assert found.whole_word.tolist() == [False] * 6 + [True] * 2 + [False]


def test_of_byte_level_bpe():
    found = bpe("<s>", "<pad>", "</s>", "<unk>", "Ġwalk", "ing", ",", "Ċ", "<mask>")
    assert (found.vocab, found.mask_id, found.special) == (9, 8, {0, 1, 2, 3, 8})
    assert found.whole_word is not None
    assert found.whole_word.tolist() == [False] * 5 + [True, True, False, False]


def test_of_neither_pieces_are_hidden_one_by_one():
    assert bpe("a", "b", "<mask>") == Vocabulary(3, 2, frozenset({2}))


def test_without_a_mask_token():
    with pytest.raises(UserError, match=r"no \[MASK\] or <mask>: take the tokenizer of a BERT"):
        bpe("Ġa", "b")


def test_of_bytes_no_utf_8_text_holds_one_that_is_special():
    every = "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x110000)])).encode()
    assert set(every) == set(range(256)) - BYTES.special
    assert BYTES.mask_id in BYTES.special and BYTES.vocab == 256


def test_single_letters_are_ordinary_tokens():
    assert bpe("a", "e", "|", "<", "<mask>", "<|endoftext|>").special == {4, 5}
