"""How does a plan learn the maps of LiGO for a frozen model, and grow the model by them?

The maps are saved with the run. ``python -m train.ligo_maps`` plots them, or applies them to
another checkpoint of the same shape.
"""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
import optax

from jaxgrow import flops, grow, sizes
from jaxgrow.axes import Axes, Params, Tree
from jaxgrow.models import Config
from jaxgrow.operators import ligo
from jaxgrow.operators.ligo import LiGO
from train.common.files import write_arrays
from train.plan.phase import Context, Models
from train.plan.training import Train
from train.plan.transforms import differing
from train.state.model import KeptFile, TrainState, initial, plain


@dataclass(frozen=True)
class GrownByMaps:
    """LiGO: the coefficients of the growth maps are trained, and grow a frozen small model."""

    small: Config  # config of the small model
    ligo: LiGO = field(default_factory=LiGO)

    def axes(self, config: Config) -> None:
        return None

    def base_axes(self, config: Config) -> Axes:
        return self.small.axes()

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        axes = self.small.axes()
        return grow(ligo.learned_growth(trained, axes, sizes(base, axes)), base, axes)

    plain = parameters

    def kept_file(self, model: TrainState) -> KeptFile:
        def write(path: Path, coefficients: Tree) -> None:
            save_maps(path, Maps(self.small, model.config, self.ligo, coefficients))

        return "maps.npz", model.params, write


@dataclass(frozen=True)
class Learn(Train):
    """Learns the maps from the frozen model ``source`` to ``config`` (`jaxgrow.operators.ligo`)."""

    source: str = "small"
    small: Config = field(default_factory=Config)  # the config of ``source``
    ligo: LiGO = field(default_factory=LiGO)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def target(self) -> dict[str, int]:
        """The new sizes of the axes that differ between the two models. These axes have maps."""
        return differing(self.small, self.config)

    def fixed_flops(self, accumulate: int = 1) -> float:
        """An upper bound of the FLOPs of growing the model and of the gradient of its maps.

        Every micro-batch computes both.
        """
        return 3 * accumulate * self._growing

    @cached_property
    def _growing(self) -> float:
        """The FLOPs of growing the model once."""
        axes = self.small.axes()
        sizes = self.small.sizes()
        small = jax.eval_shape(lambda: initial(self.small, jax.random.key(0)))
        maps = jax.eval_shape(
            lambda: ligo.init_coefficients(self.ligo, axes, sizes, self.target, jax.random.key(0))
        )
        # Shapes suffice for counting, but the maps must be arrays, because they are indexed by
        # layer.
        maps = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), maps)
        return flops.growth_flops(ligo.learned_growth(maps, axes, sizes), small, axes)

    def start(self, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> TrainState:
        small = models[self.source]
        maps = ligo.init_coefficients(
            self.ligo, self.small.axes(), self.small.sizes(), self.target, key
        )
        by = GrownByMaps(self.small, self.ligo)
        return TrainState(maps, tx.init(maps), self.config, None, plain(small), by)

    def init(self, context: Context) -> TrainState:
        model = super().init(context)
        context.validate(0, model)  # the model grown by the initial maps
        return model


@dataclass(frozen=True)
class Maps:
    """Learned maps, and the configs of the source model and the target model."""

    small: Config
    large: Config
    ligo: LiGO
    coefficients: dict[str, Tree]  # in the form of `jaxgrow.operators.ligo.init_coefficients`

    def apply(self, params: Params) -> Params:
        """Grow the parameters of a model of the config ``small`` to the sizes of ``large``.

        Raises:
          ValueError: the parameters have other sizes.
        """
        axes = self.small.axes()
        old = sizes(params, axes)
        expected = self.small.sizes()
        wrong = {a: (n, expected[a]) for a, n in old.items() if n != expected[a]}
        if wrong:
            raise ValueError(
                f"the maps are for a model with other sizes (size of this model, size for the maps): {wrong}"
            )
        return grow(ligo.learned_growth(self.coefficients, axes, old), params, axes)


def save_maps(path: Path, maps: Maps) -> None:
    """Write the maps of a `Learn` atomically."""
    about = {
        "small": maps.small.as_json(),
        "large": maps.large.as_json(),
        "ligo": asdict(maps.ligo),
    }
    arrays = {f"depth:{module}": w for module, w in maps.coefficients["depth"].items()}
    for name, ms in maps.coefficients["width"].items():
        arrays |= {f"width:{name}:{kind}": m for kind, m in ms.items()}
    write_arrays(path, about, arrays)
