"""How can two growths be combined into one? `compose` multiplies their maps."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias, overload

from jaxgrow.axes.names import axis_of
from jaxgrow.growth.maps import AxisMap, Growth, Maps, Rule, Rules, Term, all_terms, by_axes
from jaxgrow.growth.matrices import matmul


@overload
def compose(second: Mapping[str, AxisMap], first: Mapping[str, AxisMap]) -> dict[str, AxisMap]: ...
@overload
def compose(second: Growth, first: Growth) -> Growth: ...
def compose(second: Growth, first: Growth) -> Growth:
    """Combine two growths into one that has the effect of both.

    ``grow(compose(second, first), p) == grow(second, grow(first, p))``, up to rounding

    The maps of each axis are multiplied. If one of the growths is `Rules`, the result is `Rules`,
    with one rule for each pair of a rule of ``first`` and a rule of ``second`` that can match the
    same leaf. The terms of this rule are the products of all pairs of terms of the two rules.

    Args:
      second: the growth that is applied last. Its maps start from the sizes after ``first``.
      first: the growth that is applied first.

    Returns:
      ``{axis: AxisMap}`` for each axis that either growth names, or `Rules`, whose factor for
      ``eps`` is the product of both factors.

    Raises:
      ValueError: the size of an axis after ``first`` is not the size that ``second`` starts from.
      TypeError: one growth has a map over several axes, and the other changes some of these axes by
        another map.

    Example:
      >>> from jaxgrow.growth.maps import new_sizes
      >>> from jaxgrow.operators import hypercloning, llama_pro
      >>> sizes = {"layers": 2, "embed": 4, "heads": 2, "mlp": 8}
      >>> both = compose(llama_pro(sizes, {"layers": 3}), hypercloning(sizes, {"mlp": 16}))
      >>> new_sizes(both)
      {'mlp': 16, 'layers': 3}
    """
    if not isinstance(first, Rules) and not isinstance(second, Rules):
        product = _composed_term(by_axes(second), by_axes(first))
        return (
            product
            if any(len(key) > 1 for key in product)
            else {key: m for (key,), m in product.items()}
        )
    resized = _composed_sizes(second), _composed_sizes(first)
    rules = [
        _both(b, a, resized)
        for a, b in itertools.product(_exhaustive(first), _exhaustive(second))
        if not _exclude(a.conditions, b.conditions)
    ]
    return Rules(
        tuple(rules), math.prod(each.eps for each in (first, second) if isinstance(each, Rules))
    )


def _exhaustive(growth: Growth) -> list[Rule]:
    """Convert the growth to rules such that every leaf matches at least one of them.

    Each rule either touches all of its leaves or has only one term. A leaf that no term touches is
    returned unchanged, not multiplied by the number of terms. So a rule of several terms is split
    into rules for the leaves that have an axis of the terms, and one rule that keeps the others
    unchanged.
    """
    found: list[Rule] = []
    for rule in growth.rules if isinstance(growth, Rules) else (Rule((growth,)),):
        keys = dict.fromkeys(itertools.chain.from_iterable(map(by_axes, rule.terms)))
        required = (name for condition in rule.conditions for name in condition.axes)
        has = {axis_of(name.removesuffix(".out")) for name in required}
        if len(rule.terms) == 1 or any(set(key) <= has for key in keys):
            found.append(rule)
        else:
            found += [
                _merged_rule(rule.terms, [*rule.conditions, Rule((), axes=key)]) for key in keys
            ]
            found.append(_merged_rule(({},), rule.conditions))
        if not found[-1].conditions:  # a catch-all rule: later rules match no leaf
            return found
    return [*found, Rule(({},))]


Keys: TypeAlias = set[tuple[str, ...]]


def _both(second: Rule, first: Rule, resized: tuple[Keys, Keys]) -> Rule:
    """Return the rule for leaves that match both rules.

    Each growth resizes an axis in all leaves that have this axis. So if a rule has no map for an
    axis that other rules of its growth resize, the leaves of the rule do not have this axis. The
    map of the other growth for this axis is then omitted.
    """
    terms: list[Term] = []
    for a, b in itertools.product(map(by_axes, first.terms), map(by_axes, second.terms)):
        without = (resized[0] - b.keys()) | (resized[1] - a.keys())
        terms.append(_composed_term(_omit(b, without), _omit(a, without)))
    return _merged_rule(terms, [*first.conditions, *second.conditions])


def _omit(term: Term, keys: Keys) -> Term:
    return {key: m for key, m in term.items() if key not in keys}


def _composed_sizes(growth: Growth) -> Keys:
    """Return the axes of all maps that change a size."""
    maps = (pair for term in all_terms(growth) for pair in by_axes(term).items())
    return {key for key, m in maps if m.shapes[0] != m.shapes[1]}


def _merged_rule(terms: Iterable[Maps], conditions: Iterable[Rule]) -> Rule:
    main, *also = dict.fromkeys(conditions) or [Rule(())]
    return Rule(tuple(terms), main.path, main.axes, main.roles, tuple(also))


def _exclude(one: Sequence[Rule], other: Sequence[Rule]) -> bool:
    """Whether no leaf can meet both lists of conditions.

    This is the case for two different literal paths, for a literal path that the other pattern does
    not match, and for two sets of roles without a common role.
    """

    def literal(path: str) -> bool:
        return not set("*?[") & set(path)

    for a, b in itertools.product(one, other):
        if a.roles and b.roles and not set(a.roles) & set(b.roles):
            return True
        if literal(a.path) and not fnmatchcase(a.path, b.path):
            return True
        if literal(b.path) and not fnmatchcase(b.path, a.path):
            return True
    return False


def _composed_term(second: Term, first: Term) -> dict[tuple[str, ...], AxisMap]:
    out = {**first, **second}
    for key in out:
        for other in out:
            if key != other and set(key) & set(other):
                raise TypeError(
                    f"compose() cannot multiply a map over the axes "
                    f"{' x '.join(max(key, other, key=len))} by one over "
                    f"{' x '.join(min(key, other, key=len))}: grow twice instead"
                )
    for key in first.keys() & second.keys():
        (to, start), (end, old) = second[key].shapes, first[key].shapes
        if start != end:
            sizes = [" x ".join(map(str, size)) for size in (end, start)]
            raise ValueError(
                f"axis {' x '.join(key)!r}: the first growth ends at size {sizes[0]}, "
                f"the second starts at size {sizes[1]}"
            )
        write, read = (
            matmul(getattr(second[key], side), getattr(first[key], side))
            for side in ("write", "read")
        )
        out[key] = AxisMap(write, read, (to, old) if len(key) > 1 else None)
    return out
