"""How a model continues a text: the KV cache, and the layers that read it.

Shape suffixes: B batch, T new positions, S cached positions, D embed, G key/value heads, K
head_dim, L layers, H query heads.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxgrow.axes.names import Params, Tree
from jaxgrow.models.attention import CONTINUING, KEPT, PLAIN, ScoreForm, attention_by_xla
from jaxgrow.sharding import split_batch


@struct.dataclass
class Past:
    """The KV cache: keys and values of the tokens that a model has read.

    ``Past()`` is an empty cache.

    Attributes:
      keys: keys of every layer, [L, B, S, G, K], with G key/value heads.
      values: values of every layer, of the same shape.
      lengths_B: the number of valid positions of each row, int32. Entries at later positions are
        undefined.
    """

    keys: Tree = None
    values: Tree = None
    lengths_B: Tree = None

    def positions_BT(self, length: int) -> jax.Array:
        """Return the positions of the next ``length`` tokens; [1, T] if the cache is empty."""
        first = jnp.zeros(1, jnp.int32) if self.lengths_B is None else self.lengths_B
        return first[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    @property
    def positions(self) -> int:
        """The number of positions in the cache, S."""
        return 0 if self.keys is None else self.keys.shape[2]

    def with_room(self, positions: int) -> "Past":
        """Return the same cache, padded to ``positions`` positions."""
        more = [(0, positions - self.positions) if axis == 2 else (0, 0) for axis in range(5)]
        return Past(jnp.pad(self.keys, more), jnp.pad(self.values, more), self.lengths_B)

    def and_then(self, new: "Past") -> "Past":
        """Return the cache with the tokens of ``new`` appended. There must be room for them."""
        put = jax.vmap(put_at, (0, 0, None))  # over the layers
        keys, values = (
            put(a, b, self.lengths_B) for a, b in ((self.keys, new.keys), (self.values, new.values))
        )
        return Past(keys, values, self.lengths_B + new.lengths_B)


def run_after(
    apply: Callable,
    stacked: Params,
    x_BTD: jax.Array,
    past: Past,
    last_B: jax.Array,
    *,
    scan: bool = True,
) -> tuple[jax.Array, Past]:
    """Run ``x`` through the blocks after the tokens in a KV cache.

    Args:
      apply: the block: ``apply(w, x, past=.., mutable=..) -> (x, variables)``. ``past`` is
        ``((keys, values) of the layer, positions [B, T])``. For an empty cache it is None; then
        attention sees the full sequence and may use any kernel.
      stacked: parameters of the blocks, stacked.
      x_BTD: embeddings of the new tokens.
      past: the cache.
      last_B: index of each row's last token among the new ones.
      scan: whether the layers run in one scan.

    Returns:
      ``(output of each row's last token [B, 1, D], the cache of only the new tokens)``.
    """
    positions_BT = past.positions_BT(x_BTD.shape[1])

    def body(x, inputs):
        w, before = inputs
        y, left = apply(w, split_batch(x), past=before and (before, positions_BT), mutable=KEPT[0])
        (kept,) = left[KEPT[0]]["attention"][KEPT[1]]
        return y, kept

    before = (past.keys, past.values) if past.positions else None
    x_BTD, (keys, values) = jax.lax.scan(body, x_BTD, (stacked, before), unroll=not scan)
    return x_BTD[jnp.arange(len(x_BTD)), last_B][:, None], Past(keys, values, last_B + 1)


def attention_after(past, q_BTHK, k_BTGK, v_BTGK, form: ScoreForm = PLAIN):
    """Causal `attention` in XLA of tokens that follow a KV cache.

    The rows of a batch may be at different positions.

    Args:
      past: ``((keys, values), positions)``. Keys and values are [B, S, G, K] of the positions from
        0; entries from a row's first new position on are undefined. The positions of the new tokens
        are int32 [B, T], less than S and consecutive in each row.
      q_BTHK: queries of the tokens.
      k_BTGK: keys of the tokens.
      v_BTGK: values of the tokens.
      form: as in `attention`.
    """
    old, positions_BT = past
    k_BSGK, v_BSGK = (
        put_at(a, b, positions_BT[:, 0]) for a, b in zip(old, (k_BTGK, v_BTGK), strict=True)
    )
    seen_B1TS = jnp.arange(k_BSGK.shape[1])[None, None, None] <= positions_BT[:, None, :, None]
    if form.window is not None:
        seen_B1TS &= (
            positions_BT[:, None, :, None] - jnp.arange(k_BSGK.shape[1])[None, None, None]
            < form.window
        )
    return attention_by_xla(q_BTHK, k_BSGK, v_BSGK, seen_B1TS, form)


def put_at(old_BS, new_BT, first_B):
    """Write each row's ``new_BT`` into ``old_BS`` at the positions from ``first_B`` on.

    Both arrays may have further axes behind these two.
    """

    def row(old_S, new_T, first):
        return jax.lax.dynamic_update_slice_in_dim(old_S, new_T, first, 0)

    return jax.vmap(row)(old_BS, new_BT, first_B)


CONTINUING.add("attention", attention_after)
CONTINUING.add("layers", run_after)
