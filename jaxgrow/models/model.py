"""How do the parts of a model work together: embeddings, layers and head?

Shape suffixes: B batch, T positions, D embed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from jaxgrow.axes.names import BELOW, Params, Tree, named_init
from jaxgrow.layerdrop.execution import KeepMask
from jaxgrow.models.attention import CONTINUING
from jaxgrow.models.loss import last_tokens
from jaxgrow.models.stack import KeptTokens, Observe, loop_blocks, run_parts, stacked_blocks

INIT = nn.initializers.normal(0.02)


def tokens_at(values_BT: jax.Array | None, positions_BS: jax.Array | None) -> jax.Array | None:
    """Return the values of the tokens at some positions; None: at all of them."""
    if values_BT is None or positions_BS is None:
        return values_BT
    return jnp.take_along_axis(values_BT, positions_BS, 1)


class KVCache(Protocol):
    """The keys and values of the tokens that a model has read (`jaxgrow.extras.models.cache.Past`)."""

    @property
    def positions(self) -> int:
        """The number of positions in the cache."""
        ...

    def positions_BT(self, length: int) -> jax.Array:
        """Return the positions of the next ``length`` tokens."""
        ...


class Call(NamedTuple):
    """The arguments of one call of a model, as `Model` describes them."""

    inputs: Tree
    mask_BS: jax.Array | None = None
    observe: Observe | None = None
    targets: jax.Array | None = None
    each: bool = False
    keep_mask: KeepMask | None = None
    kept_tokens: KeptTokens | None = None
    frozen: int = 0
    past: "KVCache | None" = None

    def named(self, name: str) -> jax.Array | None:
        """Return the input ``name``; None if it is not there."""
        return self.inputs.get(name) if isinstance(self.inputs, Mapping) else None

    def given(self, *names: str) -> list[str]:
        """Return the arguments among ``names`` that the caller has set."""
        values = {name: getattr(self, name) for name in names}
        return [
            name
            for name, x in values.items()
            if x is not None and not (isinstance(x, int) and x == 0)
        ]


class Stack(NamedTuple):
    """The layers of a model: ``layer(w, x, *scale, positions=.., past=..)`` and stacked ``blocks``.

    ``positions`` [B, T] is set for tokens that are only some tokens of a sequence.
    ``past`` is described in `jaxgrow.extras.models.cache.run_after`.
    """

    layer: Callable
    blocks: Params


class Model(nn.Module):
    """The common part of all families: ``apply({"params": p}, inputs) -> outputs``, in float32.

    A family defines `embeddings`, `stack`, `embed` and `output`, which run in this order.

    The arguments of a call:

    - ``inputs``: tokens, images, or a mapping from names to arrays (``config.example``). Text
      models accept ``segments``, int [B, T]: the number of the document of each token, which
      differs from that of the document before. A token then sees only its document, and positions
      count from the begin of the document, so that each document is computed as in a row of its
      own. (The load balancing and the capacity of experts still depend on all tokens.)
    - ``mask_BS``: the visible tokens, bool [B, T]; None: all tokens.
    - ``observe``: function of each layer's input and output, for example
      ``jaxgrow.extras.preservation.output_rms``. Its results are also returned, stacked [L, ..].
    - ``targets``: int [B, T]. With an input ``weights``, float [B, T], a decoder returns weighted
      means: a weight of 0 leaves out a target. The output is then ``(mean cross-entropy, accuracy)``, and the logits
      of all positions never exist at the same time (`jaxgrow.models.loss.vocabulary_loss`).
    - ``each``: with ``targets``, return both values for every position, [B, T].
    - ``keep_mask``: the layers that run (`jaxgrow.layerdrop.KeepMask`); None: all of them, without
      scaling.
    - ``kept_tokens``: the tokens that pass through some of the layers (`KeptTokens`). Other tokens
      bypass these layers.
    - ``frozen``: the number of frozen layers at the bottom. If it is not 0, these layers and the
      embeddings have no gradient, and no backward pass runs through them. A tied head has no
      gradient either.
    - ``past``: the KV cache (`jaxgrow.extras.models.cache.Past`). The tokens follow the cached ones, and the output is
      ``(logits of the last token [B, vocab], the cache of only these tokens)``.

    A family supports ``observe``, ``keep_mask``, ``frozen`` and the arguments in ``supports``.
    """

    config: Any

    supports: ClassVar[tuple[str, ...]] = ()
    # The reason why the family does not support an argument.
    reasons: ClassVar[Mapping[str, str]] = {}

    @nn.compact
    def __call__(
        self,
        inputs,
        mask_BS: jax.Array | None = None,
        *,
        observe: Observe | None = None,
        targets: jax.Array | None = None,
        each: bool = False,
        keep_mask: KeepMask | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
        past: "KVCache | None" = None,
    ):
        call = Call(inputs, mask_BS, observe, targets, each, keep_mask, kept_tokens, frozen, past)
        self.check(call)
        embeddings = self.embeddings()
        if frozen:
            embeddings = jax.lax.stop_gradient(embeddings)
        stack = self.stack(embeddings, call)
        x_BTD = self.embed(embeddings, call)
        if frozen:
            x_BTD = jax.lax.stop_gradient(x_BTD)
        x_BTD, more = self.run(stack, x_BTD, call)
        out = self.output(x_BTD, embeddings, call)
        return (out, more) if observe or past is not None else out

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return jnp.dtype(self.config.dtype)

    def check(self, call: Call) -> None:
        """Raise an error if the family does not support the arguments or their combination."""
        family = type(self).__name__
        for name in call.given("mask_BS", "targets", "each", "kept_tokens", "past"):
            if name not in self.supports:
                why = f", because {self.reasons[name]}" if name in self.reasons else ""
                raise ValueError(f"a {family} does not support {name}{why}: leave it out")
        if call.given("targets", "each") and (
            call.targets is None or self.config.predicts != "tokens"
        ):
            raise ValueError(
                f"targets are for head=tokens, and each is for targets, but head={self.config.predicts} and targets "
                f"are {'missing' if call.targets is None else 'given'}: leave out targets and each"
            )
        if (
            call.targets is not None
            and not call.each
            and (call.mask_BS is not None or call.named("mask") is not None)
            and call.named("weights") is None
            and call.named("positions") is None
        ):
            raise ValueError(
                "the mean loss would count targets of tokens that the mask hides: choose the targets with the input "
                f"{'weights' if self.config.causal else 'positions'}, or pass each=True and average the values of the "
                "visible tokens"
            )
        if call.keep_mask is not None and call.given("kept_tokens", "frozen"):
            raise ValueError(
                "layer dropping (keep_mask) cannot be combined with token dropping (kept_tokens) "
                "or frozen layers: pass keep_mask alone"
            )
        if self.config.loop is not None and call.frozen > self.config.loop.begin:
            raise ValueError(
                f"the {call.frozen} frozen layers at the bottom include layers of {self.config.loop}, "
                "which run again above other layers: freeze fewer layers"
            )
        if call.mask_BS is not None and call.given("keep_mask", "kept_tokens"):
            raise ValueError(
                "mask_BS cannot be combined with layer dropping (keep_mask) or token dropping "
                "(kept_tokens): leave out mask_BS"
            )
        others = call.given("mask_BS", "observe", "targets", "keep_mask", "kept_tokens", "frozen")
        if call.past is not None and others:
            raise ValueError(
                "cached decoding (past) does not support observe, targets, keep_mask, kept_tokens, "
                "frozen or mask_BS: pass past alone"
            )

    # --- the parts that a family defines ---

    def embeddings(self) -> dict[str, jax.Array]:
        """Create the embeddings of the inputs and of their positions."""
        raise NotImplementedError

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Any:
        """Create the layers, as `run` takes them."""
        raise NotImplementedError

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        """Return the input of the first layer, [B, T, D]."""
        raise NotImplementedError

    def output(self, x_BTD: jax.Array, embeddings: dict[str, jax.Array], call: Call) -> Tree:
        """Return the output of the model from the output of the last layer."""
        raise NotImplementedError

    # --- steps that families share ---

    def embedding(self, name: str, rows: str, size: int, init: Initializer = INIT) -> jax.Array:
        """Create an embedding with ``size`` rows on the axis ``rows``."""
        axes = named_init(init, rows, "embed" + BELOW)
        return self.param(name, axes, (size, self.config.embed))

    def stack_of(
        self, block: nn.Module, segments_BT: jax.Array | None = None, **options: object
    ) -> Stack:
        """Create stacked blocks, each called as ``block(x, *scale, **options)``.

        The block is detached (``parent=None``): only its init and apply are used. With
        ``segments_BT``, it also gets the segment ids of its tokens.
        """
        one = jnp.zeros((1, 1, self.config.embed), self.dtype)
        blocks = stacked_blocks(self, "blocks", block, self.config.layers, one)

        def layer(w, x, *scale, positions=None, **reading):
            if segments_BT is not None:
                reading["segments_BT"] = tokens_at(segments_BT, positions)
            return block.apply({"params": w}, x, *scale, **options, **reading)

        return Stack(layer, loop_blocks(blocks, self.config.loop))

    def run(
        self, stack: Any, x_BTD: jax.Array, call: Call, **options: Any
    ) -> tuple[jax.Array, Tree]:
        """Run the layers.

        Args:
          stack: the layers.
          x_BTD: input of the first layer.
          call: the arguments of the call.
          options: arguments of `run_parts` that replace those of the call.

        Returns:
          ``(output, results of observe)``, or with a KV cache as `jaxgrow.extras.models.cache.run_after` returns them.
        """
        layer, blocks = stack
        if call.past is not None:
            tokens_BT, last_B = last_tokens(call.inputs)
            layer = partial(layer, positions=call.past.positions_BT(tokens_BT.shape[1]))
            scan = self.config.scan_layers
            return CONTINUING["layers"](layer, blocks, x_BTD, call.past, last_B, scan=scan)
        some = call.kept_tokens
        return run_parts(
            layer,
            blocks,
            x_BTD,
            kept_tokens=some,
            apply_kept_tokens=some and partial(layer, positions=some.positions_BS),
            remat=self.config.remat,
            scan=self.config.scan_layers,
            observe=call.observe,
            **{"frozen": call.frozen, "keep_mask": call.keep_mask} | options,
        )

    def wide(self, x: jax.Array) -> jax.Array:
        """Return ``x`` in float32 or better."""
        return x.astype(jnp.promote_types(self.dtype, jnp.float32))
