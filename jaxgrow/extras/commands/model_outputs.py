"""The outputs of the models that commands compare, computed in float32 or wider."""

from collections.abc import Callable
from functools import lru_cache, partial

import jax

from jaxgrow.axes.names import Params
from jaxgrow.checkpoints import Cast, Source
from jaxgrow.extras.commands.model_inputs import Inputs
from jaxgrow.extras.preservation import output_rms
from jaxgrow.models import Config

# A function from inputs to the logits and the RMS of the output of each layer.
Outputs = Callable[[Inputs], tuple[jax.Array, jax.Array]]


def outputs_of(source: Source) -> Outputs:
    """Return the function ``inputs -> (logits, RMS of the output of each layer)`` of a model."""
    return partial(_compiled_outputs(source.config), wide_params(source))


# Models with the same config share the compiled program. Programs are large, so only a few are cached.
@lru_cache(maxsize=4)
def _compiled_outputs(config: Config) -> Callable[..., tuple[jax.Array, jax.Array]]:
    # Accelerators round the operands of float32 matrix products by default. For a growth that
    # preserves the function, the report would then show this rounding.
    @jax.jit
    def run(params: Params, inputs: Inputs):
        with jax.default_matmul_precision("highest"):
            return config.module.apply({"params": params}, inputs, observe=output_rms)

    return run


def wide_params(source: Source) -> Params:
    """The parameters in float32 or wider, so that intermediate results are not rounded."""
    return Cast(source, "float32", at_least=True).params()
