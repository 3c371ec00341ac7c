"""Swin Transformer V2 (Liu et al., CVPR 2022): attention in windows, with stages.

Each stage halves the resolution. Shape suffixes: B images, Y and X rows and columns of patches, G
windows, T patches of a window, D embed, H heads, K head_dim, N relative positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, VALUE, Tree, named_init
from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models.config import Cost, OperatorTraits
from jaxgrow.models.loss import class_logits
from jaxgrow.models.model import INIT, Call, Model, Stack
from jaxgrow.models.modules import MLP, Linear
from jaxgrow.models.norms import LayerNorm
from jaxgrow.models.patches import PatchConfig, embed_patches
from jaxgrow.models.stack import stacked_blocks

MAX_SCALE = math.log(100)  # the maximum logarithm of the factor of cosines
MAX_BIAS = 16  # the maximum bias that positions add to a score; the minimum is 0
_MERGED = 2  # the number of patches on a side that are merged into one


class Grid(NamedTuple):
    """The patches of a stage: ``side`` x ``side`` patches in windows of ``window`` x ``window``.

    Attributes:
      side: patches on a side of the image.
      window: patches on a side of a window.
      shift: shift of the windows in every other layer, in patches.
      trained: the window size that sets the scale of relative positions.
    """

    side: int
    window: int
    shift: int
    trained: int

    @property
    def padded(self) -> int:
        """The number of patches on a side, including the padding of the last window."""
        return -(-self.side // self.window) * self.window


@dataclass(frozen=True)
class SwinConfig(PatchConfig):
    """Config of a Swin V2. The defaults are Swin V2-T for images of 256 pixels.

    Tuples have one number for each stage.

    Layers alternate, counted from 0 in each stage: windows are not shifted in even layers, and are
    shifted by half a window in odd layers. Therefore a growth in depth changes the function of a
    layer if it moves the layer from an even to an odd index, or vice versa. `llama_pro` moves
    layers in this way, and its new layers still add the bias of the norm that follows, so it does
    not preserve the function. `jaxgrow.operators.prune` keeps even layers even and odd layers odd
    if it gets ``alternating``. If ``window`` is larger than the side of a stage, it is reduced to
    that side; the stage then has one window and no shift, as in `transformers` and timm.
    """

    layers: tuple[int, ...] = (2, 2, 6, 2)  # type: ignore[assignment]
    embed: tuple[int, ...] = (96, 192, 384, 768)  # type: ignore[assignment]
    heads: tuple[int, ...] = (3, 6, 12, 24)  # type: ignore[assignment]
    head_dim: int = 32
    mlp: tuple[int, ...] = (384, 768, 1536, 3072)  # type: ignore[assignment]
    image: int = 256
    patch: int = 4
    # The side of a window in patches.
    window: int = 8
    # The window sizes of the model that this model is fine-tuned from. They determine the scale of
    # relative positions. 0, or an empty tuple: the model's own windows.
    trained_windows: tuple[int, ...] = ()
    # The units of the MLP that maps relative positions to biases.
    position_mlp: int = 512

    no_axes: ClassVar = ("image", "patch", "window", "trained_windows")
    optional: ClassVar = ("trained_windows",)
    pre_norm = False

    def __post_init__(self):
        stages = {name: len(getattr(self, name)) for name in ("layers", "embed", "heads", "mlp")}
        if self.trained_windows:
            stages["trained_windows"] = len(self.trained_windows)
        if len(set(stages.values())) > 1 or not self.layers:
            raise ValueError(
                "SwinConfig: all fields must have one number for each stage, but the numbers of "
                f"values are {stages}"
            )
        super().__post_init__()
        merged = self.patch * _MERGED ** (len(self.layers) - 1)
        if self.image % merged:
            raise ValueError(
                f"SwinConfig: image={self.image} is not a multiple of {merged}, the pixels on a "
                "side of a patch in the last stage: set "
                f"image={self.image // merged * merged or merged}, for example"
            )
        if self.attention not in ("auto", "xla"):
            raise ValueError(
                "a Swin's attention uses cosines and biases, which no kernel supports: set "
                f"attention=auto, not {self.attention}"
            )
        if self.adapter is not None:
            raise ValueError(
                "adapters need equal widths in all layers, but a Swin's stages have different "
                "widths: leave out adapter"
            )

    @property
    def module(self) -> nn.Module:
        return Swin(self)

    @property
    def traits(self) -> OperatorTraits:
        shifted = tuple(f"layers.{s}" for s, grid in enumerate(self.grids) if grid.shift)
        return {**super().traits, "alternating": shifted, "period": 2 if shifted else 1}

    @property
    def length(self) -> int:
        """The number of patches of the first stage. Later stages merge them."""
        return self.patches

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grid of each stage."""
        sides = [self.image // self.patch // _MERGED**s for s in range(len(self.layers))]
        windows = [min(side, self.window) for side in sides]
        shifts = [
            self.window // 2 if side > w else 0 for side, w in zip(sides, windows, strict=True)
        ]
        trained = self.trained_windows or (0,) * len(sides)
        return tuple(
            map(
                Grid,
                sides,
                windows,
                shifts,
                [t or w for t, w in zip(trained, windows, strict=True)],
            )
        )

    def for_images(self, image: int, classes: int) -> Self:
        """Return the config for another image size and other classes.

        Windows grow with the image, and relative positions keep the scale of the trained windows.
        """
        trained = (
            tuple(grid.trained for grid in self.grids)
            if image != self.image
            else self.trained_windows
        )
        window = max(1, self.window * image // self.image)
        return replace(self, image=image, classes=classes, window=window, trained_windows=trained)

    def integers(self) -> dict[str, int]:
        merged = {"merged_rows": _MERGED, "merged_columns": _MERGED} if len(self.layers) > 1 else {}
        return {**super().integers(), "coordinates": 2, **merged}

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position. A position is a patch of the first stage.

        All costs per image are divided by the number of positions. In an image, a layer takes
        ``8 D HK`` and ``4 T HK`` for each patch of its windows, which have T patches each,
        including padding; and ``4 D F`` for each patch without padding. Merging takes
        ``2 * 4 D D'`` for each merged patch. The position biases are not counted: all images of a
        batch share them, and they take less than 1 % of one image.

        Args:
          length: positions of a sample.
        """
        layers = []
        between = []
        for s, grid in enumerate(self.grids):
            embed = self.embed[s]
            width = self.heads[s] * self.head_dim
            attention = grid.padded**2 * (8 * embed * width + 4 * grid.window**2 * width)
            layer = (attention + grid.side**2 * 4 * embed * self.mlp[s]) / length
            merging = (
                grid.side**2 * 2 * _MERGED**2 * self.embed[s - 1] * embed / length if s else 0.0
            )
            layers += [layer] * self.layers[s]
            between += [merging] + [0.0] * (self.layers[s] - 1)
        patches = 2.0 * self.patch**2 * self.channels * self.embed[0]
        head = 2 * self.embed[-1] * self.classes / length
        mean = sum(layers) / len(layers)
        return Cost(
            mean,
            patches + sum(between) + head,
            first=patches,
            layers=tuple(layers),
            between=tuple(between),
        )


def relative_positions(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return the relative positions in a window.

    The log-spaced relative positions of rows and columns are ``sign(d) log2(1 + |8 d / (W - 1)|) /
    3`` for a window of side W: -1.06 to 1.06 in the window that was trained.

    Returns:
      The relative positions [(2 W - 1)^2, 2], and the index of the relative position of each pair
      of patches [T, T].
    """
    w = grid.window
    steps = np.arange(1 - w, w) * 8.0 / max(grid.trained - 1, 1)
    steps = np.sign(steps) * np.log2(1 + np.abs(steps)) / 3
    table = np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2)
    rows, columns = np.divmod(np.arange(w * w), w)
    apart = [place[:, None] - place[None, :] + w - 1 for place in (rows, columns)]
    return table, apart[0] * (2 * w - 1) + apart[1]


def same_region(grid: Grid) -> np.ndarray:
    """Return which patches of a shifted window were neighbours before the shift, bool [G, T, T].

    The last windows of rows and columns contain patches that were rolled over from the other side
    of the image.
    """
    place = np.arange(grid.padded)
    region = 0 + (place >= grid.padded - grid.window) + (place >= grid.padded - grid.shift)
    regions_YX = 3 * region[:, None] + region[None, :]
    regions_GT = rearrange(regions_YX, "(y p) (x q) -> (y x) (p q)", p=grid.window, q=grid.window)
    return regions_GT[:, :, None] == regions_GT[:, None, :]


def into_windows(x_BYXD, grid: Grid, shifted):
    """Split patches into windows: ``[B, Y, X, D] -> [B, G, T, D]``.

    Padding with zeros fills the last windows. It comes before the shift, as in `transformers`; in
    timm it comes after the shift.

    Args:
      x_BYXD: patches.
      grid: the grid of the stage.
      shifted: whether the windows are shifted, bool.
    """
    fill = (0, grid.padded - grid.side)
    x_BYXD = jnp.pad(x_BYXD, ((0, 0), fill, fill, (0, 0)))
    if grid.shift:
        x_BYXD = jnp.where(shifted, jnp.roll(x_BYXD, (-grid.shift,) * 2, (1, 2)), x_BYXD)
    return rearrange(x_BYXD, "b (y p) (x q) d -> b (y x) (p q) d", p=grid.window, q=grid.window)


def out_of_windows(x_BGTD, grid: Grid, shifted):
    """Invert `into_windows`."""
    across = grid.padded // grid.window
    x_BYXD = rearrange(x_BGTD, "b (y x) (p q) d -> b (y p) (x q) d", p=grid.window, y=across)
    if grid.shift:
        x_BYXD = jnp.where(shifted, jnp.roll(x_BYXD, (grid.shift,) * 2, (1, 2)), x_BYXD)
    return x_BYXD[:, : grid.side, : grid.side]


class WindowAttention(nn.Module):
    """Attention in the windows of a stage.

    ``softmax(a cos(q, k) + 16 sigmoid(B)) v``, with ``a = exp(min(s_h, ln 100))``. An MLP computes
    ``B`` from the relative position of two patches, for each head. ``heads`` is an output axis of
    ``s`` and of the MLP's second kernel, so that copies of a head compute the same attention. Keys
    have no bias.

    Deviation: two patches that are in one window only because of the shift do not attend to each
    other. In the published code, their scores are reduced by 100 (by 200 in `transformers`).
    """

    config: SwinConfig
    stage: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BGTD, shifted):
        c = self.config
        s = f".{self.stage}"
        wide = jnp.promote_types(self.dtype, jnp.float32)
        embed = c.embed[self.stage]
        heads = c.heads[self.stage]
        grid = c.grids[self.stage]

        def project(name, *outputs, bias=True):
            axes = ("embed" + s + READ, "heads" + s, *outputs)
            shape = (embed, heads, c.head_dim)
            return Linear(axes, shape, 1, INIT, self.dtype, bias, name=name)(x_BGTD)

        q_BGTHK = _unit_length(project("query", "head_dim"))
        k_BGTHK = _unit_length(project("key", "head_dim" + READ, bias=False))
        v_BGTHK = project("value", "head_dim" + VALUE)
        log_scale_H = self.param(
            "log_scale",
            named_init(nn.initializers.constant(math.log(10)), "heads" + s, role="scale"),
            (heads,),
        )
        scale_H = jnp.exp(jnp.minimum(log_scale_H.astype(wide), MAX_SCALE))
        bias_GHTT = self.biases(grid, heads, s)[None]
        if grid.shift:
            seen_GTT = same_region(grid) | ~shifted
            bias_GHTT = jnp.where(seen_GTT[:, None], bias_GHTT, jnp.finfo(wide).min)
        scores_BGHTT = jnp.einsum(
            "bgthk,bgshk->bghts", q_BGTHK, k_BGTHK, preferred_element_type=wide
        )
        scores_BGHTT = scores_BGHTT * scale_H[None, None, :, None, None] + bias_GHTT[None]
        weights_BGHTT = jax.nn.softmax(scores_BGHTT).astype(self.dtype)
        y_BGTHK = jnp.einsum("bghts,bgshk->bgthk", weights_BGHTT, v_BGTHK)

        axes = ("heads" + s + READ, "head_dim" + READ, "embed" + s)
        shape = (heads, c.head_dim, embed)
        return Linear(axes, shape, 2, INIT, self.dtype, name="out")(y_BGTHK)

    def biases(self, grid: Grid, heads: int, s: str):
        """Return the biases of the scores, [H, T, T], in float32 or better."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        units = self.config.position_mlp
        table_N2, between_TT = relative_positions(grid)
        up = Linear(
            ("coordinates" + READ, "position_mlp"), (2, units), 1, INIT, wide, name="position_up"
        )
        down = Linear(
            ("position_mlp" + READ, "heads" + s),
            (units, heads),
            1,
            INIT,
            wide,
            bias=False,
            name="position_down",
        )
        bias_NH = MAX_BIAS * jax.nn.sigmoid(down(jax.nn.relu(up(jnp.asarray(table_N2, wide)))))
        return jnp.moveaxis(bias_NH[between_TT], -1, 0)


def _unit_length(x):
    """Normalise to length one over the last axis. Zeros, as in padding, stay zeros."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.square(wide).sum(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(square, 1e-24))).astype(x.dtype)


class SwinBlock(nn.Module):
    """A post-norm block: ``x += norm(attention(x)); x += norm(mlp(x))``.

    The scales of the norms are initialised to zeros.
    """

    config: SwinConfig
    stage: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BYXD, shifted, scale=None):
        """Apply the block.

        Args:
          x_BYXD: patches.
          shifted: whether the windows are shifted, bool.
          scale: factor of each sublayer's output (`jaxgrow.layerdrop.KeepMask`); None: 1.
        """
        c = self.config
        s = f".{self.stage}"
        grid = self.config.grids[self.stage]
        norm = partial(LayerNorm, "embed" + s, c.eps, self.dtype, nn.initializers.zeros)
        attention = WindowAttention(c, self.stage, self.dtype, name="attention")
        # Patches are normalised in the layout of windows: in another layout, XLA may sum in another
        # order.
        y_BGTD = norm(name="attention_norm")(
            attention(into_windows(x_BYXD, grid, shifted), shifted)
        )
        x_BYXD = x_BYXD + rescaled(out_of_windows(y_BGTD, grid, shifted), scale, "attention")
        gelu = partial(jax.nn.gelu, approximate=False)
        axes = ("embed" + s, "mlp" + s)
        mlp = MLP(
            c.embed[self.stage], c.mlp[self.stage], INIT, INIT, self.dtype, gelu, axes, name="mlp"
        )
        return x_BYXD + rescaled(norm(name="mlp_norm")(mlp(x_BYXD)), scale, "mlp")


class Swin(Model):
    """A Swin: ``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]``.

    Images are normalised floats, and logits are float32.

    ::

        x = norm(patches W + b)
        in each stage: x = blocks(x);  between stages: x = norm([x of 2 x 2 patches] W)
        mean(norm(x)) head

    The keyword arguments are described in `jaxgrow.models.model.Model`. They count the layers of
    all stages, one after the other. A keep mask of indices is a tuple with an array for each stage,
    because the number of layers that a stage runs is static. The results of ``observe`` are a tuple
    as well, because their shapes depend on the stage. ``frozen`` also freezes the patch embedding,
    and the merging before a stage whose first layer is frozen.
    """

    config: SwinConfig

    reasons: ClassVar = {"kept_tokens": "windows need all of their patches"}

    def embeddings(self) -> dict[str, jax.Array]:
        return {}

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> tuple[Stack, ...]:
        """Create the layers of every stage."""
        return tuple(self._stage(s) for s in range(len(self.config.layers)))

    def _stage(self, s: int) -> Stack:
        c = self.config
        # The block is detached: only its init and apply are used.
        block = SwinBlock(c, s, self.dtype, parent=None)
        side = c.grids[s].side
        layers = c.layers[s]
        one = jnp.zeros((1, side, side, c.embed[s]), self.dtype)
        blocks = stacked_blocks(self, f"blocks{s}", block, layers, one, False, axis=f"layers.{s}")

        def layer(w, x, *scale):
            return block.apply({"params": w[0]}, x, w[1], *scale)

        return Stack(layer, (blocks, np.arange(layers) % 2 == 1))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        c = self.config
        x = embed_patches(c, call.inputs, self.dtype, "embed.0")
        x = LayerNorm("embed.0" + BELOW, c.eps, self.dtype, name="patch_norm")(x)
        return rearrange(x, "b (y x) d -> b y x d", y=c.grids[0].side)

    def run(
        self, stack: Sequence[Stack], x_BTD: jax.Array, call: Call, **options: object
    ) -> tuple[jax.Array, Tree]:
        """Run the stages, with a merging before each of them except the first."""
        begin = 0
        seen = []
        for s, stage in enumerate(stack):
            layers = self.config.layers[s]
            if s:
                x_BTD = _Merge(self.config, s, self.dtype, name=f"merge{s}")(x_BTD)
            if call.frozen > begin:
                x_BTD = jax.lax.stop_gradient(x_BTD)
            own = slice(begin, begin + layers)
            x_BTD, observed = super().run(
                stage,
                x_BTD,
                call,
                frozen=max(0, min(call.frozen - begin, layers)),
                keep_mask=None if call.keep_mask is None else call.keep_mask.part(s, own),
            )
            begin += layers
            seen.append(observed)
        return x_BTD, tuple(seen)

    def output(self, x_BTD: jax.Array, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        c = self.config
        last = f"embed.{len(c.layers) - 1}"
        x_BD = LayerNorm(last, c.eps, self.dtype, name="final_norm")(x_BTD).mean((1, 2))
        return class_logits(x_BD, c.classes, INIT, "head", axis=last)


class _Merge(nn.Module):
    """``norm(W [x of 2 x 2 patches])``: half of the side, and the width of ``stage``."""

    config: SwinConfig
    stage: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BYXD):
        c = self.config
        s = self.stage
        inputs = f"embed.{s - 1}"
        outputs = f"embed.{s}" + BELOW
        x = rearrange(x_BYXD, "b (y p) (x q) d -> b y x p q d", p=_MERGED, q=_MERGED)
        axes = ("merged_rows" + READ, "merged_columns" + READ, inputs + READ, outputs)
        shape = (_MERGED, _MERGED, c.embed[s - 1], c.embed[s])
        x = Linear(axes, shape, 3, INIT, self.dtype, bias=False, name="reduction")(x)
        return LayerNorm(outputs, c.eps, self.dtype, name="norm")(x)
