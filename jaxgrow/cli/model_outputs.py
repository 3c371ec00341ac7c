"""The outputs of the models that commands compare, computed in float32 or wider."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax

from jaxgrow.axes.names import Params
from jaxgrow.checkpoints import Cast, Source
from jaxgrow.growth.report import rms
from jaxgrow.models import Config

# A function from inputs to the logits and the RMS of the output of each layer.
Outputs = Callable[[Any], tuple[Any, Any]]


def outputs(source: Source) -> Outputs:
    """Return the function ``inputs -> (logits, RMS of the output of each layer)`` of a model."""
    return partial(_program(source.config), wide_params(source))


# Models with the same config share the compiled program. Programs are large, so only a few are cached.
@lru_cache(maxsize=4)
def _program(config: Config) -> Callable[..., tuple[Any, Any]]:
    return jax.jit(
        lambda params, inputs: config.module.apply({"params": params}, inputs, observe=rms)
    )


def wide_params(source: Source) -> Params:
    """The parameters in float32 or wider, so that intermediate results are not rounded."""
    return Cast(source, "float32", at_least=True).params()
