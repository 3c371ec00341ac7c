"""Which experts of a model are worth a copy? A phase measures it before the growth of a plan."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.extras.importance import expert_utility
from jaxgrow.models import Config
from jaxgrow.models.config import EXPERTS
from train.plan.methods import PHASES
from train.plan.phase import Models
from train.plan.training import Measure
from train.state.model import TrainState, parameters


@dataclass(frozen=True)
class MeasureExperts(Measure, kind="measure"):
    """Measures the utility of each expert in each layer of the model ``name`` on validation data.

    The sensitivity of the model is then `jaxgrow.extras.importance.expert_utility`, by which
    `train.plan.transforms.Grow` copies experts.
    """

    def measure(self, model: TrainState, batches: Tree) -> TrainState:
        def one(batch):
            return expert_utility(model.config, parameters(model), batch[0])

        return replace(model, sensitivity=jax.lax.map(one, batches).mean(0))

    def flops(self, config: Config, samples: int) -> float:
        return flops.train_flops(config, samples * config.length)

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        model = models[self.name]
        return replace(
            model, sensitivity=jnp.zeros((model.config.depth, model.config.sizes()[EXPERTS]))
        )


PHASES.add("experts", MeasureExperts)
