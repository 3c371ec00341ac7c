"""How does a model get more tokens, or fewer? The change is a map of the axis ``vocab``.

The map acts on everything that has the axis: the embedding, a head of its own, biases of the head,
the embeddings in a LoRA, and the optimizer state. To keep some tokens, use
`jaxgrow.operators.keep_units`. Special tokens have ids in ``config.json``, which follow by
`renumbered_ids`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.growth.maps import AxisMap, CopyMap
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.operators.targets import Sizes
from jaxgrow.typed import Json

VOCAB = "vocab"
# The number of old rows in a sampled row. Their sum is close to a normal distribution.
TERMS = 16
# The largest number of old rows whose mean is a new row. All rows of the map store this number of
# terms.
LARGEST_MEAN = 64
# The keys of ``config.json`` and ``generation_config.json`` that hold ids of tokens.
_ENDS = ("_token_id", "_token_ids", "_token_index")
_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids")


def new_tokens(
    sizes: Sizes, target: Sizes, like: Sequence[Sequence[int]] = (), seed: int = 0
) -> dict[str, CopyMap]:
    """Add tokens to a vocabulary. The rows of the old tokens do not change.

    The first new rows are means of given old rows. Each further row is sampled: with random old
    rows ``r_k``, drawn with replacement, and ``K = 16``, it is

    ``1/K sum_k r_k + s sum_k (-1)^k r_k,  s = sqrt((1 - 1/K) / K)``

    The weights add up to 1, and their squares as well. Therefore a sampled row has the mean and the
    covariance of the old rows, and so do the rows of embedding and head together. The mean of the
    old rows with noise of their covariance is the initialisation of Hewitt; `transformers` has the
    same mean, and noise whose variance is a billionth.

    New rows have no gradients before the growth: under the policy ``exact``, their moments are
    zero. Under ``copy``, they are the sums of the moments of the old rows.

    Args:
      sizes: the axis sizes of the model.
      target: the new size of ``vocab``.
      like: for each of the first new tokens, the old ids whose mean is its row.
      seed: random seed of the sampled rows.

    Returns:
      A map of ``vocab``.

    Raises:
      ValueError: the model has no axis ``vocab``, the new size is not larger than the old size or
        smaller than the number of rows, or an id does not exist.

    Example:
      >>> from jaxgrow.growth.matrices import dense
      >>> dense(new_tokens({"vocab": 2}, {"vocab": 3}, [[0, 1]])["vocab"].write).tolist()
      [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]

    References:
      Hewitt, `Initializing New Word Embeddings for Pretrained Language Models
      <https://nlp.stanford.edu/~johnhew/vocab-expansion.html>`_, 2021
    """
    old, new = _checked_target(sizes, target, like)
    sampled = new - old - len(like)
    terms = max(TERMS if sampled else 1, *map(len, like), 1)
    index = np.zeros((new, terms), np.int32)
    weight = np.zeros((new, terms))
    index[:old, 0] = np.arange(old)
    weight[:old, 0] = 1
    for row, ids in enumerate(like, old):
        index[row, : len(ids)] = ids
        weight[row, : len(ids)] = 1 / len(ids)
    if sampled:
        index[-sampled:, :TERMS] = np.random.default_rng(seed).integers(old, size=(sampled, TERMS))
        spread = ((1 - 1 / TERMS) / TERMS) ** 0.5
        weight[-sampled:, :TERMS] = 1 / TERMS + spread * (-1.0) ** np.arange(TERMS)
    stays = (np.arange(new) < old)[:, None].astype(float)
    read = SparseMap(index[:, :1], stays, old)
    return {VOCAB: AxisMap(SparseMap(index, weight, old), read)}


def _checked_target(sizes: Sizes, target: Sizes, like: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the old and the new size of the vocabulary."""
    if VOCAB not in sizes or target.keys() != {VOCAB}:
        raise ValueError(
            f"new_tokens grows the axis 'vocab', but the model has the axes {', '.join(sizes)}, and "
            f"the target has {', '.join(target)}. Use another operator for the other axes"
        )
    old, new = sizes[VOCAB], target[VOCAB]
    if new <= old or new < old + len(like):
        raise ValueError(
            f"the new vocabulary has {new} tokens, but the model has {old}, and {len(like)} new rows "
            f"are given: the new size must be at least {old + max(1, len(like))}"
        )
    for row, ids in enumerate(like, old):
        if not 0 < len(ids) <= LARGEST_MEAN or not all(0 <= i < old for i in ids):
            raise ValueError(
                f"the new token {row} is the mean of {len(ids)} old tokens, {str(list(ids))[:60]}: give "
                f"1 to {LARGEST_MEAN} ids from 0 to {old - 1}"
            )
    return old, new


def renumbered_ids(content: Json, where: str, new: Mapping[int, int], old: int) -> Json:
    """Return the settings of a model with the new ids of its special tokens.

    Args:
      content: the content of a ``config.json`` or ``generation_config.json``.
      where: its path, for the message.
      new: the new id of each token that stays.
      old: the size of the old vocabulary. Other numbers, such as -1, are not ids and stay.

    Raises:
      CheckpointError: a special token does not stay. The message names all of them.

    Example:
      >>> renumbered_ids({"eos_token_id": [7, 2], "layers": 7}, "config.json", {7: 1, 2: 0}, 8)
      {'eos_token_id': [1, 0], 'layers': 7}
    """
    lost: list[str] = []

    def renumbered(value: object, key: str) -> object:
        if isinstance(value, dict):
            return {k: renumbered(x, k) for k, x in value.items()}
        if not key.endswith(_ENDS) and key not in _LISTS:
            return value
        if isinstance(value, list):
            return [renumbered(x, key) for x in value]
        if type(value) is not int or not 0 <= value < old:
            return value
        if value not in new:
            lost.append(f"{key} {value}")
        return new.get(value, value)

    changed = {key: renumbered(value, key) for key, value in content.items()}
    if lost:
        raise CheckpointError(
            f"{where} has special tokens that are not among the {len(new)} kept ones: "
            f"{', '.join(lost)}. Keep these ids too, or set the keys in {where} to null"
        )
    return changed
