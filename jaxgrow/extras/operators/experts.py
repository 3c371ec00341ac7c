"""Operators that turn an MLP into a mixture of experts, or a mixture into a larger one.

A model without experts is first converted to a mixture with a single expert, which its router must
always choose (`as_mixture` of `jaxgrow.extras.models.upcycling`). All operators here therefore grow the axis
``experts``. They copy the router's columns with the experts, so the router cannot distinguish the
copies until noise is added to it. `add_router_noise` of the same module adds this noise, and
all recipes for these operators apply it after the growth.
"""

import numpy as np
from numpy.typing import ArrayLike

from jaxgrow.axes.names import LAYERS
from jaxgrow.axes.size_error import SizeError
from jaxgrow.extras.operators.pruning import single_layer_map
from jaxgrow.growth.maps import AxisMap, CopyMap, Growth, Maps, Rule, Rules, select
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.operators.registry import ModelForm, operator
from jaxgrow.operators.targets import Sizes, checked_sizes, grown_sizes, in_turn

__all__ = ["expert_copies", "upcycle", "virtual_groups"]


@operator(
    axes=("experts",),
    preserves="yes",
    source="Komatsuzaki et al. 2023",
    policies=("copy",),
)
def upcycle(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Make each new expert a copy of an old one, in turn: ``W'_e = W_{e mod E}``.

    From a single expert, this is sparse upcycling. If the gates add up to 1, it preserves the
    function for any router. From several experts, this is expert upcycling. It preserves the
    function if the number of experts per token grows by the same factor, so that each token is
    routed to all copies of its previous experts. ``target`` is ``{"experts": new number}``.

    Args:
      {arguments}

    Returns:
      The map of ``experts``.

    Raises:
      ValueError: another axis than ``experts``, or a smaller number of experts.

    Example:
      >>> upcycle({"experts": 2}, {"experts": 4})["experts"].write.index[:, 0].tolist()
      [0, 1, 0, 1]

    References:
      Komatsuzaki et al., `Sparse Upcycling <https://arxiv.org/abs/2212.05055>`_, ICLR 2023
    """
    sizes = checked_sizes("upcycle", "sizes", sizes)
    target = checked_sizes("upcycle", "target", target)
    old, new = grown_sizes(
        "upcycle", ("experts",), sizes, {"experts": sizes.get("experts", 0), **target}
    )["experts"]
    return {"experts": select(in_turn(old, new), old)}


def _uses_one_expert(growth: Growth, form: ModelForm) -> bool:
    """Whether each token uses one expert with the gate 1, of which any copy is as good."""
    return getattr(form, "active", 0) == 1 and getattr(form, "gates_normed", False)


@operator(
    axes=("experts",),
    preserves_for=_uses_one_expert,
    preserves="only if each token uses one expert, whose gate is 1",
    source="Dwivedi et al. 2026 (Expert Upcycling)",
    policies=("copy", "drop"),
)
def expert_copies(sizes: Sizes, target: Sizes, utility: ArrayLike | None = None) -> Growth:
    """Copy trained experts with their router columns; the number of experts per token is unchanged.

    By default, all experts are copied in turn, as in `upcycle`, so the copies have equal shares of
    the probability p of their expert: ``p / m`` for m copies, as if their logits were lowered by
    ``log m``. With ``utility``, each further copy goes to the expert with the highest utility per
    copy, in each layer separately.

    The function is preserved if each token uses one expert with the gate 1. Otherwise it changes: a
    copy ties with its expert, so a token that uses two experts uses an expert and its copy. Noise in
    the router (`jaxgrow.extras.models.upcycling.add_router_noise`) then divides the tokens among copies.

    Args:
      {arguments}
      utility: the utility of each expert, ``[layers, experts]``, at least 0, such as
        `jaxgrow.extras.importance.expert_utility`; None: all experts are equal.

    Returns:
      The map of ``experts``, or rules with a term for each layer.

    Raises:
      ValueError: another axis than ``experts``, a smaller number of experts, or utilities that are
        negative, not finite, or of another shape.

    Example:
      >>> growth = expert_copies({"layers": 1, "experts": 2}, {"experts": 5}, [[0.9, 0.2]])
      >>> growth.rules[0].terms[0]["experts"].write.index[:, 0].tolist()
      [0, 1, 0, 0, 0]

    References:
      Dwivedi et al., `Expert Upcycling <https://arxiv.org/abs/2604.19835>`_, 2026
    """
    found = {"experts": sizes.get("experts", 0), **target}
    old, new = grown_sizes("expert_copies", ("experts",), sizes, found)["experts"]
    even = {"experts": select(in_turn(old, new), old)}
    if utility is None:
        return even
    worth = np.asarray(utility, np.float64)
    layers = sizes.get(LAYERS, 0)
    if worth.shape != (layers, old) or not (np.isfinite(worth) & (worth >= 0)).all():
        raise ValueError(
            f"expert_copies needs a utility of at least 0 for each of {layers} layers and {old} "
            f"experts, but has an array of shape {worth.shape} from {worth.min()} to {worth.max()}"
        )
    terms: list[Maps] = []
    for layer, row in enumerate(worth):
        alone = single_layer_map(layer, layer, np.arange(layers), layers)
        terms.append({LAYERS: alone, "experts": select(_copied_by_utility(row, new), old)})
    return Rules((Rule(tuple(terms), axes=(LAYERS, "experts")), Rule((even,))))


def _copied_by_utility(utility: np.ndarray, new: int) -> list[int]:
    """Return all experts, and then the experts that get further copies."""
    copies = np.ones(len(utility), int)
    for _ in range(new - len(utility)):
        copies[(utility / copies).argmax()] += 1
    return [*range(len(utility)), *np.repeat(np.arange(len(utility)), copies - 1).tolist()]


@operator(
    axes=("experts", "mlp"),
    sizes="experts with fewer mlp units each",
    preserves="yes, if each token uses a multiple of the number of parts",
    source="He et al. 2024",
    policies=("copy",),
)
def virtual_groups(sizes: Sizes, target: Sizes) -> Rules:
    """Cut a single expert into G parts, and copy each part E / G times: finer experts at equal cost.

    ``target`` is ``{"experts": E, "mlp": F'}``. With the old number F of MLP units, ``G = F / F'``,
    and expert e is a copy of part ``e mod G``. Each group of G consecutive experts contains every
    part once. `add_router_noise` of `jaxgrow.extras.models.upcycling` with ``group=G`` keeps the same router
    column for the experts of a group. A token with G experts is then routed to all parts of one
    group. If the gates add up to 1, each part has the gate 1 / G. Kernels whose input axis is
    ``mlp`` are multiplied by G, so the function is preserved. (He et al. distribute the factor over
    all three kernels, and do not normalise the gates.)

    Args:
      {arguments}

    Returns:
      A rule with G terms for the experts, and one rule for the router and the other parameters.

    Raises:
      ValueError: a model with several experts, or sizes that do not form complete groups.

    Example:
      >>> len(virtual_groups({"experts": 1, "mlp": 8}, {"experts": 4, "mlp": 4}).rules[0].terms)
      2

    References:
      He et al.,
      `Upcycling Large Language Models into Mixture of Experts <https://arxiv.org/abs/2410.07524>`_,
      2024
    """
    sizes = checked_sizes("virtual_groups", "sizes", sizes)
    target = checked_sizes("virtual_groups", "target", target)
    experts = target.get("experts", 1)
    units = sizes.get("mlp")
    if units is None or set(target) - {"experts", "mlp"} or sizes.get("experts") != 1:
        raise ValueError(
            "virtual_groups divides the single expert of a model with the axes experts and mlp, and cannot change other axes. "
            f"This model has {sizes.get('experts', 'no axis')} experts and the axes {', '.join(sizes)}; the target has "
            f"{', '.join(target)}. Convert a dense model with jaxgrow.extras.models.upcycling.as_mixture first"
        )
    groups, odd = divmod(units, max(1, target.get("mlp", units)))
    if odd or not groups or experts % groups:
        raise SizeError(
            f"virtual_groups cuts {units} units of mlp into G equal parts and makes a multiple of "
            f"G experts, but the target has {experts} experts of {target.get('mlp', units)} units. "
            "For example, use {} and {}",
            ("mlp", units // 2),
            ("experts", -(-experts // 2) * 2),
        )
    part = units // groups

    def term(g: int) -> Maps:
        mine = np.arange(experts) % groups == g
        of = SparseMap(np.zeros((experts, 1), np.int32), mine[:, None].astype(float), 1)
        cut = np.arange(g * part, (g + 1) * part, dtype=np.int32)[:, None]
        ones = np.ones((part, 1))
        return {
            "experts": AxisMap(of, of),
            "mlp": AxisMap(SparseMap(cut, ones, units), SparseMap(cut, groups * ones, units)),
        }

    router = {"experts": select([0] * experts, 1)}
    return Rules(
        (Rule(tuple(term(g) for g in range(groups)), axes=("experts", "mlp")), Rule((router,)))
    )
