"""Swin Transformer V2 (Liu et al., CVPR 2022): attention in windows, in stages that halve the resolution.

G is the number of windows, T the patches of one, Y and X rows and columns of patches.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, VALUE, named
from jaxgrow.layerdrop.execution import Kept, rescaled
from jaxgrow.models.config import Cost
from jaxgrow.models.layers import MLP, KeptTokens, LayerNorm, Linear, Observe, run_parts, stacked
from jaxgrow.models.patches import INIT, PatchConfig, classified, embedded

MAX_SCALE = math.log(100)  # of the logarithm of what multiplies cosines
MAX_BIAS = 16  # what positions add to a score lies between 0 and this
_MERGED = 2  # patches a side that become one


class Grid(NamedTuple):
    """The patches of a stage: ``side`` x ``side`` of them, in windows of ``window`` x ``window``."""

    side: int
    window: int
    shift: int  # of the windows, in every other layer
    trained: int  # the window that positions are measured by

    @property
    def padded(self) -> int:
        """Patches a side, with what fills the last window."""
        return -(-self.side // self.window) * self.window


@dataclass(frozen=True)
class SwinConfig(PatchConfig):
    """Swin V2-T for images of 256 pixels, as it is. Tuples have one number for each stage.

    Layers alternate: windows lie where they are in even ones and are shifted by half in odd ones,
    counted from 0 in each stage. So a growth in depth that moves a layer to another parity changes
    what it computes, whatever its weights; `llama_pro`'s layers do, and those that are zero there
    still add the bias of the norm that follows. `jaxgrow.operators.prune` leaves every layer its
    parity, where it is told so (``alternating``). ``window`` is clipped to the side of a stage,
    which then has one window and no shift, as in `transformers` and timm.
    """

    layers: tuple[int, ...] = (2, 2, 6, 2)  # type: ignore[assignment]
    embed: tuple[int, ...] = (96, 192, 384, 768)  # type: ignore[assignment]
    heads: tuple[int, ...] = (3, 6, 12, 24)  # type: ignore[assignment]
    head_dim: int = 32
    mlp: tuple[int, ...] = (384, 768, 1536, 3072)  # type: ignore[assignment]
    image: int = 256
    patch: int = 4
    window: int = 8  # patches a side
    # The windows of the model that this one is fine-tuned from, whose units positions keep; 0, and
    # if left out: its own.
    trained_windows: tuple[int, ...] = ()
    position_mlp: int = 512  # units of the MLP that turns relative positions into biases

    no_axes: ClassVar = ("image", "patch", "window", "trained_windows")

    def __post_init__(self):
        stages = {name: len(getattr(self, name)) for name in ("layers", "embed", "heads", "mlp")}
        if self.trained_windows:
            stages["trained_windows"] = len(self.trained_windows)
        if len(set(stages.values())) > 1 or not self.layers:
            raise ValueError(f"SwinConfig: each stage has one number, but {stages} are there")
        super().__post_init__()
        merged = self.patch * _MERGED ** (len(self.layers) - 1)
        if self.image % merged:
            raise ValueError(
                f"SwinConfig: an image of {self.image} pixels a side has no whole number of the last stage's patches, of "
                f"{merged} pixels: {self.image // merged * merged or merged} fits"
            )
        if self.attention not in ("auto", "xla"):
            raise ValueError(
                f"a Swin's attention is of cosines and biases, which no kernel does: set attention=auto, not {self.attention}"
            )
        if self.adapter is not None:
            raise ValueError(
                "an adapter has the width of all layers, and a Swin's stages differ in it: leave out adapter"
            )

    @classmethod
    def least(cls, field: str) -> int:
        return 0 if field.startswith("trained_windows") else super().least(field)

    @property
    def module(self) -> nn.Module:
        return Swin(self)

    @property
    def pre_norm(self) -> bool:
        return False

    @property
    def traits(self) -> dict[str, Any]:
        shifted = tuple(f"layers.{s}" for s, grid in enumerate(self.grids) if grid.shift)
        return super().traits | {"alternating": shifted, "period": 2 if shifted else 1}

    @property
    def length(self) -> int:
        """The patches of the first stage, which others merge."""
        return self.patches

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Of each stage."""
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
        """Windows grow with the image, and positions keep the units of the windows that were trained."""
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
        """Of an image, a layer has ``8 D HK`` and ``4 T HK`` for each patch of its windows, T of
        them in each and what fills them up among them, and ``4 D F`` for each patch; what merges
        patches has ``2 * 4 D D'`` for each that it makes. A position, which is a patch of the first
        stage, has its share. Left out are the biases of positions, which all images of a batch
        share: below 1 % of one image.
        """
        layers, between = [], []
        for s, grid in enumerate(self.grids):
            embed, width = self.embed[s], self.heads[s] * self.head_dim
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


def coordinates(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Relative places in a window, log-spaced, [(2 W - 1)^2, 2]; and which of them lies between two patches, [T, T].

    ``sign(d) log2(1 + |8 d / (W - 1)|) / 3`` of rows and of columns: -1.06 to 1.06 in the window
    that was trained.
    """
    w = grid.window
    steps = np.arange(1 - w, w) * 8.0 / max(grid.trained - 1, 1)
    steps = np.sign(steps) * np.log2(1 + np.abs(steps)) / 3
    table = np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2)
    rows, columns = np.divmod(np.arange(w * w), w)
    apart = [place[:, None] - place[None, :] + w - 1 for place in (rows, columns)]
    return table, apart[0] * (2 * w - 1) + apart[1]


def neighbours(grid: Grid) -> np.ndarray:
    """Where windows are shifted, which patches of a window lay side by side before: bool [G, T, T].

    The last windows of rows and columns hold what was rolled over from the other side of the image.
    """
    place = np.arange(grid.padded)
    region = 0 + (place >= grid.padded - grid.window) + (place >= grid.padded - grid.shift)
    regions_YX = 3 * region[:, None] + region[None, :]
    regions_GT = rearrange(regions_YX, "(y p) (x q) -> (y x) (p q)", p=grid.window, q=grid.window)
    return regions_GT[:, :, None] == regions_GT[:, None, :]


def into_windows(x_BYXD, grid: Grid, shifted):
    """``[B, Y, X, D] -> [B, G, T, D]``, with zeros for what fills windows up; ``shifted``: whether they are, bool.

    What fills up comes before the shift, as in `transformers`; in timm after it.
    """
    fill = (0, grid.padded - grid.side)
    x_BYXD = jnp.pad(x_BYXD, ((0, 0), fill, fill, (0, 0)))
    if grid.shift:
        x_BYXD = jnp.where(shifted, jnp.roll(x_BYXD, (-grid.shift,) * 2, (1, 2)), x_BYXD)
    return rearrange(x_BYXD, "b (y p) (x q) d -> b (y x) (p q) d", p=grid.window, q=grid.window)


def out_of_windows(x_BGTD, grid: Grid, shifted):
    """`into_windows` undone."""
    across = grid.padded // grid.window
    x_BYXD = rearrange(x_BGTD, "b (y x) (p q) d -> b (y p) (x q) d", p=grid.window, y=across)
    if grid.shift:
        x_BYXD = jnp.where(shifted, jnp.roll(x_BYXD, (grid.shift,) * 2, (1, 2)), x_BYXD)
    return x_BYXD[:, : grid.side, : grid.side]


class Attention(nn.Module):
    """In windows of a stage: ``softmax(a cos(q, k) + 16 sigmoid(B)) v``, with ``a = exp(min(s_h, ln 100))``.

    ``B`` is what an MLP makes of the relative place of two patches, for each head. ``s`` and the
    MLP's second kernel write ``heads``, so that copies of a head attend alike. Keys have no bias.
    Deviation: patches that a shift brought together do not see each other; as published, their
    scores are less by 100 (by 200 in `transformers`).
    """

    config: SwinConfig
    stage: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BGTD, shifted):
        c, s, wide = self.config, f".{self.stage}", jnp.promote_types(self.dtype, jnp.float32)
        embed, heads, grid = c.embed[self.stage], c.heads[self.stage], c.grids[self.stage]

        def project(name, *outputs, bias=True):
            axes, shape = ("embed" + s + READ, "heads" + s, *outputs), (embed, heads, c.head_dim)
            return Linear(axes, shape, 1, INIT, self.dtype, bias, name=name)(x_BGTD)

        q_BGTHK = _unit(project("query", "head_dim"))
        k_BGTHK = _unit(project("key", "head_dim" + READ, bias=False))
        v_BGTHK = project("value", "head_dim" + VALUE)
        log_scale_H = self.param(
            "log_scale",
            named(nn.initializers.constant(math.log(10)), "heads" + s, role="scale"),
            (heads,),
        )
        scale_H = jnp.exp(jnp.minimum(log_scale_H.astype(wide), MAX_SCALE))
        bias_GHTT = self.biases(grid, heads, s)[None]
        if grid.shift:
            seen_GTT = neighbours(grid) | ~shifted
            bias_GHTT = jnp.where(seen_GTT[:, None], bias_GHTT, jnp.finfo(wide).min)
        scores_BGHTT = jnp.einsum(
            "bgthk,bgshk->bghts", q_BGTHK, k_BGTHK, preferred_element_type=wide
        )
        scores_BGHTT = scores_BGHTT * scale_H[None, None, :, None, None] + bias_GHTT[None]
        weights_BGHTT = jax.nn.softmax(scores_BGHTT).astype(self.dtype)
        y_BGTHK = jnp.einsum("bghts,bgshk->bgthk", weights_BGHTT, v_BGTHK)

        axes, shape = (
            ("heads" + s + READ, "head_dim" + READ, "embed" + s),
            (heads, c.head_dim, embed),
        )
        return Linear(axes, shape, 2, INIT, self.dtype, name="out")(y_BGTHK)

    def biases(self, grid: Grid, heads: int, s: str):
        """Of the scores, [H, T, T], in float32 or better."""
        wide, units = jnp.promote_types(self.dtype, jnp.float32), self.config.position_mlp
        table_N2, between_TT = coordinates(grid)
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


def _unit(x):
    """Over the last axis, of length one; zeros stay, as those of patches that fill a window up."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.square(wide).sum(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(square, 1e-24))).astype(x.dtype)


class Block(nn.Module):
    """``x += norm(attention(x)); x += norm(mlp(x))``: norms after sublayers, whose scales begin at zero."""

    config: SwinConfig
    stage: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BYXD, shifted, scale=None):
        """``scale`` multiplies what each sublayer adds (`jaxgrow.layerdrop.Kept`)."""
        c, s, grid = self.config, f".{self.stage}", self.config.grids[self.stage]
        norm = partial(LayerNorm, "embed" + s, c.eps, self.dtype, nn.initializers.zeros)
        attention = Attention(c, self.stage, self.dtype, name="attention")
        # Patches are normalised as they lie in windows: XLA may sum them in another order
        # elsewhere.
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


class Swin(nn.Module):
    """``apply({"params": p}, images [B, rows, columns, C]) -> logits [B, classes]`` in float32; images are normalised floats.

    ::

        x = norm(patches W + b);  stages: x = blocks(x), between them x = norm([x of 2 x 2 patches] W);  mean(norm(x)) head

    ``observe``, ``kept``, ``frozen`` as of `jaxgrow.models.gpt2.GPT2`, over the layers of all
    stages, one after the other; gates by indices are a tuple, of each stage, for how many it runs
    is static, and so is what is observed, for its shapes are the stage's. What is frozen with the
    bottom layers are patches, and what merges them for a stage whose first layer is frozen.
    """

    config: SwinConfig

    @nn.compact
    def __call__(
        self,
        images,
        *,
        observe: Observe | None = None,
        kept: Kept | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
    ):
        c = self.config
        if kept_tokens is not None:
            raise ValueError("a Swin drops no tokens: windows have all of their patches")
        if kept is not None and frozen:
            raise ValueError(
                "layers are dropped from a whole stack: not together with frozen layers"
            )
        dtype = jnp.dtype(c.dtype)
        x = LayerNorm("embed.0" + BELOW, c.eps, dtype, name="patch_norm")(
            embedded(c, images, dtype, "embed.0")
        )
        x = rearrange(x, "b (y x) d -> b y x d", y=c.grids[0].side)
        begin, seen = 0, []
        for s, layers in enumerate(c.layers):
            if s:
                x = _Merge(c, s, dtype, name=f"merge{s}")(x)
            if frozen > begin or (frozen and not s):
                x = jax.lax.stop_gradient(x)
            block = Block(c, s, dtype, parent=None)  # detached: only its init and apply are used
            one = jnp.zeros((1, *x.shape[1:]), dtype)
            blocks = stacked(self, f"blocks{s}", block, layers, one, False, axis=f"layers.{s}")
            x, own = run_parts(
                lambda w, x, *scale, block=block: block.apply({"params": w[0]}, x, w[1], *scale),
                (blocks, np.arange(layers) % 2 == 1),
                x,
                frozen=max(0, min(frozen - begin, layers)),
                remat=c.remat,
                scan=c.scan_layers,
                observe=observe,
                kept=None if kept is None else kept.part(s, slice(begin, begin + layers)),
            )
            begin += layers
            seen.append(own)
        last = f"embed.{len(c.layers) - 1}"
        x = LayerNorm(last, c.eps, dtype, name="final_norm")(x).mean((1, 2))
        logits = classified(c, x, axis=last)
        return (logits, tuple(seen)) if observe else logits


class _Merge(nn.Module):
    """``norm(W [x of 2 x 2 patches])``: half of the side, the width of the ``stage`` that follows."""

    config: SwinConfig
    stage: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BYXD):
        c, s = self.config, self.stage
        inputs, outputs = f"embed.{s - 1}", f"embed.{s}" + BELOW
        x = rearrange(x_BYXD, "b (y p) (x q) d -> b y x p q d", p=_MERGED, q=_MERGED)
        axes = ("merged_rows" + READ, "merged_columns" + READ, inputs + READ, outputs)
        shape = (_MERGED, _MERGED, c.embed[s - 1], c.embed[s])
        x = Linear(axes, shape, 3, INIT, self.dtype, bias=False, name="reduction")(x)
        return LayerNorm(outputs, c.eps, self.dtype, name="norm")(x)
