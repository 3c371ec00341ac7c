"""Bottleneck adapters: small networks in a model that stands still (Houlsby et al., ICML 2019), and attention over several.

What a sublayer says, ``y``, becomes ``y + f(y D + d) U + u`` before it is added to the residual
stream (and before the norm that follows it in a post-LN model). D
``[layers, embed.in, bottleneck]``, U ``[layers, bottleneck.in, embed]`` and the biases name their
axes, so a model with adapters is a model like any other, and grows with them by the growth of the
model::

    config = replace(config, adapter=Adapter(size=64))
    params = attach(params, init(config, key))  # what `config.module` computes with; at birth the function is the model's
    grow(g, params, config.axes())
    == attach(grow(g, model, model_axes), grow(growth(g, config), adapter, axes_of(config)))

Where ``y' = write y`` and ``read.T write = I`` on ``embed``, as of any growth that copies units,
the grown adapter adds ``write (f(y D + d) U + u)``: the function stays wherever the model keeps its
own (hypercloning, staged training, LEMON at any width), and a new layer that says nothing
(`jaxgrow.operators.llama_pro`) has an adapter that adds nothing, and can learn. Copied layers have
copied adapters, which change the function as they do. Means of layers or of units (coalescing, AKI)
have means of adapters, which compute something else, for f is not linear. ``bottleneck`` itself
grows by copies, and keeps the function. AdapterFusion's query and key are a writer and a reader of
``embed``, so that its weights stay as they are.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Axes, Params, Tree, axis, is_names, path
from jaxgrow.growth import maps
from jaxgrow.growth.apply import parts
from jaxgrow.growth.maps import Growth, Rule, Rules
from jaxgrow.models.bottleneck import ADAPTER, FUSION, Adapter
from jaxgrow.models.config import Config

__all__ = ["Adapter", "attach", "axes_of", "detach", "fused", "growth", "init"]

BLOCKS = "blocks"  # the module of layers, in every family


def detach(tree: Tree, kinds: tuple[str, ...] = (ADAPTER, FUSION)) -> tuple[Tree, Tree]:
    """A tree without the modules of adapters, and these alone.

    Args:
      tree: parameters, or what has their structure.
      kinds: how the names of the modules end.

    Returns:
      ``(the model's, the adapters')``. `attach` is the inverse.

    Example:
      >>> detach({"blocks": {"mlp": 1, "mlp_adapter": 2}, "head": 3})
      ({'blocks': {'mlp': 1}, 'head': 3}, {'blocks': {'mlp_adapter': 2}})
    """
    blocks = tree[BLOCKS]
    own = {name: of for name, of in blocks.items() if name.endswith(kinds)}
    return {**tree, BLOCKS: {name: of for name, of in blocks.items() if name not in own}}, {
        BLOCKS: own
    }


def attach(params: Params, adapter: Params) -> Params:
    """The parameters of a model with its adapters, for its module to compute with.

    Args:
      params: of the model.
      adapter: of the structure of `init`.

    Returns:
      The leaves of both, of the structure that a config with that ``adapter`` has.

    Raises:
      ValueError: they have another number of layers.

    Example:
      >>> attach({"blocks": {"w": np.ones(2)}}, {"blocks": {"mlp_adapter": np.ones(2)}})["blocks"].keys()
      dict_keys(['w', 'mlp_adapter'])
    """
    layers = {np.shape(x)[0] for tree in (params, adapter) for x in jax.tree.leaves(tree[BLOCKS])}
    if len(layers) > 1:
        raise ValueError(
            f"a model and its adapters have the same layers, but these have {' and '.join(map(str, sorted(layers)))}; grow "
            "the adapters with their model (jaxgrow.peft.adapters.growth)"
        )
    return {**params, BLOCKS: {**params[BLOCKS], **adapter[BLOCKS]}}


def axes_of(config: Config) -> Axes:
    """The axis names of the adapters of a config.

    Args:
      config: with an ``adapter``.

    Returns:
      A tree of the structure that `init` gives.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> axes_of(GPT2Config(adapter=Adapter()))["blocks"]["mlp_adapter"]["up"]["kernel"]
      ('layers', 'bottleneck.in', 'embed')
    """
    return detach(config.axes())[1]


def init(config: Config, key: jax.Array) -> Params:
    """Fresh adapters, float32: U and u are zero, so that the function is the model's (not of a fusion: `fused`).

    Args:
      config: with an ``adapter``.
      key: what is drawn goes by it.

    Returns:
      A tree ``{"blocks": {"mlp_adapter": {"down": .., "up": ..}, ..}}``.

    Raises:
      ValueError: the config has no adapter.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(layers=2, embed=8, heads=2, head_dim=4, mlp=8, vocab=5, context=4, adapter=Adapter(size=3))
      >>> init(config, jax.random.key(0))["blocks"]["attention_adapter"]["down"]["kernel"].shape
      (2, 8, 3)

    References:
      Houlsby et al.,
      `Parameter-Efficient Transfer Learning for NLP <https://arxiv.org/abs/1902.00751>`_, ICML 2019

      Pfeiffer et al., `AdapterFusion <https://arxiv.org/abs/2005.00247>`_, EACL 2021
    """
    if config.adapter is None:
        raise ValueError(
            "this config has no adapter: give it one, replace(config, adapter=Adapter(size=64))"
        )
    return jax.jit(lambda key: detach(config.init(key))[1])(key)


def fused(adapters: Sequence[Params], fusion: Params) -> Params:
    """Several adapters of one model, and the attention that composes them (AdapterFusion, Pfeiffer et al., EACL 2021).

    ``y + sum_n s_n z_n V`` with ``z_n = f(y D_n + d_n) U_n + u_n`` and
    ``s = softmax_n (y Q) . (z_n K)``. V begins near the identity: of one adapter, or of several
    that are alike, it is that adapter, and else at first nearly their mean.

    Args:
      adapters: each of the structure of `init`, without fusion.
      fusion: as `init` gives it where the config's adapter has ``fused=len(adapters)``, whose
        query, key and value are taken.

    Returns:
      A tree of the structure of ``fusion``.

    Raises:
      ValueError: the adapters are not of the shapes that those of ``fusion`` have.

    Example:
      >>> one = {"blocks": {"mlp_adapter": np.ones((2, 3))}}
      >>> both = fused([one, one], {"blocks": {"mlp_adapter": np.zeros((2, 2, 3)), "mlp_fusion": np.ones(2)}})
      >>> both["blocks"]["mlp_adapter"].shape
      (2, 2, 3)

    References:
      Pfeiffer et al., `AdapterFusion <https://arxiv.org/abs/2005.00247>`_, EACL 2021
    """
    attention, places = detach(fusion, (ADAPTER,))
    try:
        own = jax.tree.map(lambda *x: jnp.stack(x, 1), *adapters)
        same = jax.tree.map(lambda x, y: np.shape(x) == np.shape(y), own, places)
    except ValueError as error:
        raise ValueError(
            f"adapters that are fused are all of one shape, at the same sublayers: {error}"
        ) from error
    if not all(jax.tree.leaves(same)):
        wrong = next(
            f"{path(p)}: {len(adapters)} adapters make it {np.shape(x)}, but the fusion has {np.shape(y)}"
            for (p, x), y in zip(
                jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(places), strict=True
            )
            if np.shape(x) != np.shape(y)
        )
        raise ValueError(wrong)
    return attach(attention, own)


def growth(of: Growth, config: Config) -> Rules:
    """The part of a model's growth that is its adapters', as data for `jaxgrow.grow` and `jaxgrow.grow_optimizer`.

    Args:
      of: the growth of the model; learned maps must be those of the model with its adapters.
      config: of the small model, with its adapter.

    Returns:
      A rule for every leaf of the adapters.

    Raises:
      ValueError: an axis grows in the model that would stay in a leaf of the adapters.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> own = growth({"layers": maps.tile(12, 2), "mlp": maps.tile(3072, 2)}, GPT2Config(adapter=Adapter()))
      >>> maps.new_sizes(own)
      {'layers': 24}
    """
    axes, rules, old, new = axes_of(config), [], config.sizes(), maps.new_sizes(of)
    for key_path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names):
        leaf = path(key_path)
        own = [
            {
                names_: m
                for names_, m in term.items()
                if any(m is x for x, _, _ in parts(term, names))
            }
            for term in maps.terms(of, leaf, names)
        ]
        grown = {name for term in own for names_ in term for name in names_}
        if left := [
            axis(n)
            for n in names
            if new.get(axis(n), old[axis(n)]) != old[axis(n)] and axis(n) not in grown
        ]:
            raise ValueError(
                f"{leaf}: {left[0]} grows from {old[left[0]]} to {new[left[0]]} in the model, but this growth has nothing for "
                "this leaf; take one that was made of the axes of the model with its adapters"
            )
        rules.append(Rule(tuple(own), path=leaf))
    return Rules(tuple(rules))
