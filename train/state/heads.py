"""What stands above the body of a model, and is another for another task."""

from functools import partial
from typing import Any

import jax

from jaxgrow.axes import Tree
from jaxgrow.models import Config

HEADS = ("transform", "head_norm", "head_bias", "head_kernel", "pooler", "classifier", "head", "distillation_head")


def split(tree: Tree) -> tuple[Tree, Tree]:
    """``(body, head)`` of parameters, or of what has their structure."""
    return {n: of for n, of in tree.items() if n not in HEADS}, {n: of for n, of in tree.items() if n in HEADS}


@partial(jax.jit, static_argnums=0)
def fresh_head(config: Config, key: jax.Array) -> dict[str, Any]:
    """The parameters of the head."""
    return split(config.init(key))[1]
