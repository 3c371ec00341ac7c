"""Bottleneck adapters: how is a frozen model adapted by small networks (Houlsby et al., ICML 2019)?

An adapter changes the output ``y`` of a sublayer to ``y + f(y D + d) U + u`` before it is added to
the residual stream (in a post-LN model, also before the norm that follows). D
``[layers, embed.in, bottleneck]``, U ``[layers, bottleneck.in, embed]`` and the biases have axis
names. A model with adapters is therefore an ordinary model, and its adapters grow by the growth of
the model::

    config = replace(config, adapter=Adapter(size=64))
    params = attach_adapters(params, init_adapters(config, key))  # parameters for `config.module`; preserves the function
    grow(g, params, config.axes())
    == attach_adapters(grow(g, model, model_axes), grow(adapter_growth(g, config), adapter, adapter_axes(config)))

**Function preservation.** For a growth that copies units, ``y' = write y`` and ``read.T write = I``
hold on ``embed``. The grown adapter then adds ``write (f(y D + d) U + u)``. The function with
adapters is therefore preserved if the growth preserves the function of the model (hypercloning,
staged training, LEMON at any width). A new layer whose output is zero
(`jaxgrow.operators.llama_pro`) has an adapter that adds nothing and can learn. Copied layers have
copied adapters, and change the function with or without them. If a growth averages layers or units
(coalescing, AKI), it also averages adapters, which gives a different function because f is not
linear. The axis ``bottleneck`` itself can be grown by copies, which preserves the function.
"""

from functools import partial

import jax
import numpy as np

from jaxgrow.axes.names import Axes, Params, Tree, axis_of, is_names, path
from jaxgrow.growth import maps
from jaxgrow.growth.apply import parts
from jaxgrow.growth.maps import Growth, Rule, Rules, Term
from jaxgrow.models.bottleneck import ADAPTER
from jaxgrow.models.config import Config

# The name of the module with the layers, in every model family.
BLOCKS = "blocks"


def detach_adapters(tree: Tree) -> tuple[Tree, Tree]:
    """Separate the modules of adapters from the other parameters.

    Args:
      tree: parameters, or a tree with their structure.

    Returns:
      ``(tree without adapters, tree of the adapters)``. `attach_adapters` is the inverse.

    Example:
      >>> detach_adapters({"blocks": {"mlp": 1, "mlp_adapter": 2}, "head": 3})
      ({'blocks': {'mlp': 1}, 'head': 3}, {'blocks': {'mlp_adapter': 2}})
    """
    blocks = tree[BLOCKS]
    own = {name: of for name, of in blocks.items() if name.endswith(ADAPTER)}
    return {**tree, BLOCKS: {name: of for name, of in blocks.items() if name not in own}}, {
        BLOCKS: own
    }


def attach_adapters(params: Params, adapter: Params) -> Params:
    """Add adapters to the parameters of a model.

    Args:
      params: the parameters of the model.
      adapter: the parameters of the adapters, with the structure of `init_adapters`.

    Returns:
      The parameters of both, with the structure for the module of a config that has this ``adapter``.

    Raises:
      ValueError: the model and the adapters have different numbers of layers.

    Example:
      >>> attach_adapters({"blocks": {"w": np.ones(2)}}, {"blocks": {"mlp_adapter": np.ones(2)}})["blocks"].keys()
      dict_keys(['w', 'mlp_adapter'])
    """
    leaves = jax.tree.leaves((params[BLOCKS], adapter[BLOCKS]))
    layers = {np.shape(x)[0] for x in leaves}
    if len(layers) > 1:
        raise ValueError(
            "a model and its adapters must have the same number of layers, not "
            f"{' and '.join(map(str, sorted(layers)))}. Grow the adapters with their model "
            "(jaxgrow.extras.peft.adapters.adapter_growth)"
        )
    return {**params, BLOCKS: {**params[BLOCKS], **adapter[BLOCKS]}}


def adapter_axes(config: Config) -> Axes:
    """Determine the axis names of the adapters of a config.

    Args:
      config: a config with an ``adapter``.

    Returns:
      A tree with the structure that `init_adapters` returns.

    Example:
      >>> from jaxgrow.models import Adapter, GPT2Config
      >>> adapter_axes(GPT2Config(adapter=Adapter()))["blocks"]["mlp_adapter"]["up"]["kernel"]
      ('layers', 'bottleneck.in', 'embed')
    """
    return detach_adapters(config.axes())[1]


def init_adapters(config: Config, key: jax.Array) -> Params:
    """Initialise adapters in float32 such that they do not change the function of the model.

    U and u are zero.

    Args:
      config: a config with an ``adapter``.
      key: random key for D.

    Returns:
      A tree ``{"blocks": {"mlp_adapter": {"down": ..., "up": ...}, ...}}``.

    Raises:
      ValueError: the config has no adapter.

    Example:
      >>> from jaxgrow.models import Adapter, GPT2Config
      >>> config = GPT2Config(layers=2, embed=8, heads=2, head_dim=4, mlp=8, vocab=5, context=4, adapter=Adapter(size=3))
      >>> init_adapters(config, jax.random.key(0))["blocks"]["attention_adapter"]["down"]["kernel"].shape
      (2, 8, 3)

    References:
      Houlsby et al.,
      `Parameter-Efficient Transfer Learning for NLP <https://arxiv.org/abs/1902.00751>`_, ICML 2019
    """
    if config.adapter is None:
        raise ValueError(
            "this config has no adapter. Add one: replace(config, adapter=Adapter(size=64))"
        )
    return _fresh_adapters(config, key)


@partial(jax.jit, static_argnums=0)  # compiled once for each config
def _fresh_adapters(config: Config, key: jax.Array) -> Params:
    return detach_adapters(config.init(key))[1]


def adapter_growth(of: Growth, config: Config) -> Rules:
    """Derive the growth of adapters from the growth of their model.

    `jaxgrow.grow` and `jaxgrow.grow_optimizer` accept the result.

    Args:
      of: the growth of the model. If its maps are learned (LiGO), they must have been learned for
        the model with its adapters.
      config: the config of the small model, with its adapter.

    Returns:
      Rules with one rule for every parameter of the adapters.

    Raises:
      ValueError: the growth changes an axis of the model, but has no map for it in a parameter of
        the adapters.

    Example:
      >>> from jaxgrow.models import Adapter, GPT2Config
      >>> own = adapter_growth({"layers": maps.tile(12, 2), "mlp": maps.tile(3072, 2)}, GPT2Config(adapter=Adapter()))
      >>> maps.new_sizes(own)
      {'layers': 24}
    """
    axes = adapter_axes(config)
    rules = []
    old = config.sizes()
    new = maps.new_sizes(of)
    for key_path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names):
        leaf = path(key_path)
        own: list[Term] = []
        grown: set[str] = set()
        for term in maps.terms(of, leaf, names):
            used = {id(m) for m, _, _ in parts(term, names)}
            kept = {key: m for key, m in term.items() if id(m) in used}
            own.append(kept)
            grown.update(*kept)
        if left := [
            axis_of(n)
            for n in names
            if new.get(axis_of(n), old[axis_of(n)]) != old[axis_of(n)] and axis_of(n) not in grown
        ]:
            raise ValueError(
                f"{leaf}: {left[0]} grows from {old[left[0]]} to {new[left[0]]} in the model, but "
                "the growth has no map for this parameter. Build the growth from the axes of the "
                "model with its adapters"
            )
        rules.append(Rule(tuple(own), path=leaf))
    return Rules(tuple(rules))
