"""Operators that make a mixture of experts of an MLP, or a larger one of a smaller one.

A model without experts is one of a single expert, which its router cannot but choose
(`jaxgrow.models.upcycling.as_mixture`): so all of these grow the axis ``experts``. They copy the
router's columns with their experts, and copies are chosen alike until noise tells them apart:
`jaxgrow.models.upcycling.routed`, which every recipe here goes on with.
"""

import numpy as np

from jaxgrow.growth.maps import AxisMap, Maps, Rule, Rules, select
from jaxgrow.growth.matrices import Rows
from jaxgrow.operators.registry import operator
from jaxgrow.operators.targets import Sizes, grown, in_turn, whole


@operator(
    axes=("experts",),
    preserves="yes",
    source="Komatsuzaki et al. 2023",
    state="copy",
)
def upcycle(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """Each expert a copy of an old one, in turn: sparse upcycling of a single one, expert upcycling of several.

    From one expert, with gates that add up to one, it keeps the function whatever the router says.
    From several it does if each token then goes through so many times more of them: all copies of
    those that it went through.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"experts": new number}``.

    Returns:
      The map of ``experts``.

    Raises:
      ValueError: another axis, or fewer experts.

    Example:
      >>> upcycle({"experts": 2}, {"experts": 4})["experts"].write.index[:, 0].tolist()
      [0, 1, 0, 1]

    References:
      Komatsuzaki et al., `Sparse Upcycling <https://arxiv.org/abs/2212.05055>`_, ICLR 2023
    """
    sizes, target = whole("upcycle", "sizes", sizes), whole("upcycle", "target", target)
    old, new = grown(
        "upcycle", ("experts",), sizes, {"experts": sizes.get("experts", 0), **target}
    )["experts"]
    return {"experts": select(in_turn(old, new), old)}


@operator(
    axes=("experts", "mlp"),
    sizes="experts with fewer mlp units each",
    preserves="yes, if each token uses a multiple of the number of parts",
    source="He et al. 2024",
    state="copy",
)
def virtual_groups(sizes: Sizes, target: Sizes) -> Rules:
    """A single expert cut into G parts of its units, each part an expert, E / G times over: finer experts of the same cost.

    ``G = F / F'``; expert e has the part ``e mod G``. With gates that add up to one, and the same
    router's column for the G experts of a group (`jaxgrow.models.upcycling.routed`), a token that
    goes through G experts goes through all parts of a group, each with the gate 1 / G: what reads
    ``mlp`` is multiplied by G, and the function is kept. (He et al. spread the factor over all
    three kernels, and normalise no gates.)

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`), of one expert.
      target: ``{"experts": E, "mlp": F'}``.

    Returns:
      A rule for experts, a sum of G terms, and one for the router.

    Raises:
      ValueError: sizes that are not those of whole groups, or several experts.

    Example:
      >>> len(virtual_groups({"experts": 1, "mlp": 8}, {"experts": 4, "mlp": 4}).rules[0].terms)
      2

    References:
      He et al.,
      `Upcycling Large Language Models into Mixture of Experts <https://arxiv.org/abs/2410.07524>`_,
      2024
    """
    sizes, target = (
        whole("virtual_groups", "sizes", sizes),
        whole("virtual_groups", "target", target),
    )
    experts, units = target.get("experts", 1), sizes.get("mlp")
    if units is None or set(target) - {"experts", "mlp"} or sizes.get("experts") != 1:
        raise ValueError(
            "virtual_groups divides the one expert of a model with the axes experts and mlp, and changes no other axis; this "
            f"model has {sizes.get('experts', 'no axis')} experts and the axes {', '.join(sizes)}, and the target has "
            f"{', '.join(target)}"
        )
    groups, odd = divmod(units, max(1, target.get("mlp", units)))
    if odd or not groups or experts % groups:
        raise ValueError(
            f"virtual_groups divides {units} units into equal parts, and makes whole groups of them, not {experts} experts of "
            f"{target.get('mlp', units)}: mlp={units // 2} and experts={-(-experts // 2) * 2}, say"
        )
    part = units // groups

    def term(g: int) -> Maps:
        mine = np.arange(experts) % groups == g
        of = Rows(np.zeros((experts, 1), np.int32), mine[:, None].astype(float), 1)
        cut = np.arange(g * part, (g + 1) * part, dtype=np.int32)[:, None]
        ones = np.ones((part, 1))
        return {
            "experts": AxisMap(of, of),
            "mlp": AxisMap(Rows(cut, ones, units), Rows(cut, groups * ones, units)),
        }

    router = {"experts": select([0] * experts, 1)}
    return Rules(
        (Rule(tuple(term(g) for g in range(groups)), axes=("experts", "mlp")), Rule((router,)))
    )
