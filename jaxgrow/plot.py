"""Pictures of growths: which old unit goes where, axis by axis. Needs matplotlib.

A matrix is drawn as it is, ``[new, old]``: row i says what new unit i is made of. Of many units a
cell stands for a square of them, so that a growth of real sizes is as readable, and as quickly
drawn, as one of toys::

    show.growth(operators.lemon(sizes(params, axes), {"embed": 1024}), params, axes).savefig("lemon.png")
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxgrow.axes.names import Axes, Names, Params, axis, is_layers, kind, leaves, reads, sizes
from jaxgrow.growth.apply import check, parts
from jaxgrow.growth.maps import AxisMap, Growth, Rules, terms
from jaxgrow.growth.matrices import Matrix, Rows, is_identity, sparse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 128  # in a row or column of a picture: nobody tells more of them apart
_SMALL = 8  # points: the smallest text that is read
_LINE = 100  # letters of the smallest text beside one another


class Panel(NamedTuple):
    """One matrix of a picture."""

    title: str
    matrix: Matrix  # [new, old]
    axes: tuple[str, ...]  # that it is over, mostly one


def growth(growth: Growth, params: Params, axes: Axes) -> "Figure":
    """What `jaxgrow.grow` would do with the same arguments: a panel for each matrix, and below what stays as it is.

    Args:
      growth: maps, or rules, which are listed below the panels, too.
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each.

    Returns:
      A figure of matplotlib's, to be saved: ``.savefig("maps.png")``.

    Raises:
      ValueError: the growth does not fit the parameters, or leaves them as they are.
      ImportError: matplotlib is not installed.

    Example:
      >>> from jaxgrow.growth.maps import tile
      >>> params, axes = {"up": np.ones((2, 3))}, {"up": ("embed.in", "mlp")}
      >>> drawn = growth({"mlp": tile(3, times=2)}, params, axes)
      >>> [place.get_title() for place in drawn.axes if place.get_title()], drawn.get_supxlabel()
      (['mlp 3 → 6\\nwrite'], 'as they are: embed 2')
    """
    drawn = panels(growth, params, axes)
    if not drawn:
        raise ValueError("nothing to draw: the growth leaves all axes of the model as they are")
    rules = growth.rules if isinstance(growth, Rules) else ()
    notes = [
        f"rule {i}: {str(rule).removeprefix('a rule for ')}" for i, rule in enumerate(rules, 1)
    ]
    changed = {name for panel in drawn for name in panel.axes}
    if stay := [
        f"{name} {size}" for name, size in sizes(params, axes).items() if name not in changed
    ]:
        notes.append(f"as they are: {', '.join(stay)}")
    return figure(
        drawn,
        [line for note in notes for line in textwrap.wrap(note, _LINE, subsequent_indent="    ")],
    )


def panels(growth: Growth, params: Params, axes: Axes) -> list[Panel]:
    """The matrices that leaves are contracted with, identities left out: each once, with who uses it.

    Args:
      growth: maps, or rules.
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each.

    Returns:
      By axis, what writes it first. Matrices of `Rules` name the rules that they are of: ``2.1`` is
      the first term of the second rule, ``2`` every term.

    Raises:
      ValueError: the growth does not fit the parameters.

    Example:
      >>> from jaxgrow.growth.maps import tile
      >>> params = {"up": np.ones((2, 3)), "down": np.ones((3, 2))}
      >>> axes = {"up": ("embed.in", "mlp"), "down": ("mlp.in", "embed")}
      >>> [panel.title for panel in panels({"mlp": tile(3, times=2)}, params, axes)]
      ['mlp 3 → 6\\nwrite', 'mlp 3 → 6\\nread']
    """
    check(growth, params, axes)
    found: list[_Used] = []
    for leaf, _, names in leaves(params, axes):
        for i, term in enumerate(terms(growth, leaf, names), 1):
            for m, begin, end in parts(term, names):
                if m is not None and not is_identity(matrix := m.of(names[begin])):
                    used = _used(found, tuple(axis(name) for name in names[begin:end]), m, matrix)
                    used.roles.add("read" if reads(names[begin]) else "write")
                    used.rules.setdefault(_rule(growth, leaf, names), set()).add(i)
    return [
        used.panel(growth)
        for used in sorted(found, key=lambda used: (used.along, "write" not in used.roles))
    ]


def figure(panels: Sequence[Panel], notes: Sequence[str] = (), columns: int = 4) -> "Figure":
    """Matrices side by side in one scale of colours, as wide as a page.

    Args:
      panels: what is drawn, in order; at least one.
      notes: lines below.
      columns: how many stand side by side, at most.

    Returns:
      A figure of matplotlib's.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    tall = max(panel.title.count("\n") for panel in panels)
    size = (1 + 1.9 * columns, rows * (1.9 + 0.14 * tall) + 0.14 * len(notes))
    whole = Figure(size, dpi=200, layout="constrained")
    places = [whole.add_subplot(rows, columns, i) for i in range(1, len(panels) + 1)]
    most = max(float(np.abs(cells(panel.matrix)).max()) for panel in panels) or 1.0
    drawn = [image(place, panel.matrix, most) for place, panel in zip(places, panels, strict=True)]
    for place, panel in zip(places, panels, strict=True):
        unit, each = _unit(panel.axes), _each(panel.matrix)
        place.set_title(panel.title, fontsize=_SMALL)
        place.set_xlabel(f"old {unit}" + (f", {each} a cell" if each > 1 else ""), fontsize=_SMALL)
        place.set_ylabel(f"new {unit}", fontsize=_SMALL)
    ticks = most * np.array([-1, -0.25, 0, 0.25, 1])
    bar = whole.colorbar(
        drawn[0],
        ax=places,
        ticks=ticks,
        format="%.3g",
        aspect=30,
        shrink=min(1, 2 / rows),
        anchor=(0, 1),
    )
    bar.set_label("weight", fontsize=_SMALL)
    bar.ax.tick_params(labelsize=_SMALL)
    if notes:
        whole.supxlabel("\n".join(notes), fontsize=_SMALL, x=0.01, ha="left")
    return whole


def image(place: Any, matrix: Matrix, most: float) -> Any:
    """Draws a matrix; units are counted from 0. Colours go by the root of a weight, so that small ones are seen.

    Args:
      place: axes of matplotlib's.
      matrix: [new, old].
      most: the weight of the darkest colours: red adds, blue subtracts.

    Returns:
      What a bar of colours is made for.
    """
    from matplotlib.colors import FuncNorm
    from matplotlib.ticker import MaxNLocator

    drawn, each, (new, old) = cells(matrix), _each(matrix), matrix.shape
    root = FuncNorm(
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x**2), -most, most
    )
    corners = (-0.5, drawn.shape[1] * each - 0.5, drawn.shape[0] * each - 0.5, -0.5)
    made = place.imshow(
        drawn, cmap="RdBu_r", norm=root, extent=corners, aspect="auto", interpolation="nearest"
    )
    place.set(xlim=(-0.5, old - 0.5), ylim=(new - 0.5, -0.5))
    for side, ticks in (
        (place.xaxis, 5 if old < 1000 else 3),
        (place.yaxis, 5),
    ):  # long numbers need their place
        side.set_major_locator(MaxNLocator(integer=True, nbins=ticks))
    place.tick_params(labelsize=_SMALL)
    return made


def cells(matrix: Matrix) -> np.ndarray:
    """A matrix as it is drawn: each cell is the largest entry, by magnitude, of the square of units that it stands for.

    Up to `CELLS` units, a cell is one unit. Of a sparse matrix nothing dense of ``[new, old]`` is
    made.

    Args:
      matrix: [new, old].

    Returns:
      An array, at most [CELLS, CELLS].

    Example:
      >>> from jaxgrow.growth.maps import identity
      >>> cells(identity(50257).write).shape
      (128, 128)
    """
    each, (new, old) = _each(matrix), matrix.shape
    if isinstance(matrix, Rows):
        m = sparse(matrix)
        high, low = np.zeros((2, -(-new // each), -(-old // each)))
        where = (np.arange(new)[:, None] // each, m.index // each)
        np.maximum.at(high, where, m.weight)
        np.minimum.at(low, where, m.weight)
    else:
        rows = [np.asarray(matrix[i : i + each]) for i in range(0, new, each)]
        high, low = (
            f.reduceat([f.reduce(r) for r in rows], range(0, old, each), 1)
            for f in (np.maximum, np.minimum)
        )
    return np.where(np.abs(high) >= np.abs(low), high, low)


class _Used(NamedTuple):
    """A matrix over the axes ``along``, and who uses it."""

    along: tuple[str, ...]
    matrix: Matrix
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    roles: set[str]
    rules: dict[int, set[int]]  # the terms of each

    def panel(self, growth: Growth) -> Panel:
        new, old = (" x ".join(map(str, shape)) for shape in self.shapes)
        lines = [
            f"{' x '.join(self.along)} {old} → {new}",
            " and ".join(sorted(self.roles, reverse=True)),
        ]
        if isinstance(growth, Rules):
            every = [
                [f"{i}"]
                if len(used) == len(growth.rules[i - 1].terms)
                else [f"{i}.{n}" for n in sorted(used)]
                for i, used in sorted(self.rules.items())
            ]
            named = ", ".join(name for names in every for name in names)
            lines += textwrap.wrap(f"rule{'s' * (',' in named)} {named}", 26)
        return Panel("\n".join(lines), self.matrix, self.along)


def _rule(growth: Growth, leaf: str, names: Names) -> int:
    """The number of the rule that a leaf grows by; 0 where there are none."""
    rules = growth.rules if isinstance(growth, Rules) else ()
    return next((i for i, rule in enumerate(rules, 1) if rule.matches(leaf, names)), 0)


def _used(found: list[_Used], along: tuple[str, ...], m: AxisMap, matrix: Matrix) -> _Used:
    """That of ``found`` with this matrix, or a new one, which joins them."""
    same = [used for used in found if used.along == along]
    # Leaves mostly share a matrix: large ones are compared only where they do not.
    for used in [u for u in same if u.matrix is matrix] or [
        u for u in same if _equal(u.matrix, matrix)
    ]:
        return used
    found.append(_Used(along, matrix, m.shapes, set(), {}))
    return found[-1]


def _equal(a: Matrix, b: Matrix) -> bool:
    both = [sparse(m) if isinstance(m, Rows) else m for m in (a, b)]
    x, y = (jax.tree.leaves(m) for m in both)
    return len(x) == len(y) and all(map(np.array_equal, x, y))


def _each(matrix: Matrix) -> int:
    """How many units a cell stands for; as many along both axes, so that what stays in its place is a straight line."""
    return -(-max(matrix.shape) // CELLS)


def _unit(axes: tuple[str, ...]) -> str:
    """What the rows and columns of a matrix over these axes are."""
    first, *others = axes
    own = {"heads": "head", "kv_heads": "head", "experts": "expert"}
    return "unit" if others else "layer" if is_layers(first) else own.get(kind(first), "unit")
