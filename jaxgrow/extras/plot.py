"""How do the new units depend on the old ones? Plots of growths, axis by axis, with matplotlib.

A matrix has the shape ``[new, old]``: row i contains the weights of the old units in the new unit
i. In large matrices, each cell stands for a square of units, so a growth of real sizes is as
readable, and as fast to draw, as a small example::

    plot.plot_growth(operators.lemon(sizes(params, axes), {"embed": 1024}), params,
    axes).savefig("lemon.png")
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxgrow.axes.names import (
    Axes,
    Names,
    Params,
    axis_kind,
    axis_of,
    is_layers,
    leaves,
    reads_axis,
    sizes,
)
from jaxgrow.growth.apply import check, parts
from jaxgrow.growth.maps import AxisMap, Growth, Rules, terms
from jaxgrow.growth.matrices import Matrix, SparseMap, is_identity, sparse

if TYPE_CHECKING:
    from matplotlib.axes import Axes as PlotAxes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

#: The maximum number of cells in a row or column; more of them cannot be distinguished.
CELLS = 128
#: The largest number of panels in a row of a figure.
COLUMNS = 4
# The font size in points: the smallest readable one.
_SMALL = 8
# The number of characters of this size that fit into a line.
_LINE = 100


class Panel(NamedTuple):
    """One matrix of a figure.

    Attributes:
      title: the title of the panel.
      matrix: the matrix, of shape [new, old].
      axes: the axes of the model that the matrix acts on; usually one.
    """

    title: str
    matrix: Matrix
    axes: tuple[str, ...]


def plot_growth(growth: Growth, params: Params, axes: Axes) -> "Figure":
    """Plot the matrices that `jaxgrow.grow` would apply with the same arguments.

    Args:
      growth: maps, or rules. Rules are also listed below the panels.
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each parameter.

    Returns:
      A figure of matplotlib with one panel per matrix. The axes that do not change are listed below
      the panels. Save the figure with ``.savefig("maps.png")``.

    Raises:
      ValueError: the growth does not fit the parameters, or does not change them.
      ImportError: matplotlib is not installed.

    Example:
      >>> from jaxgrow.growth.maps import tile
      >>> params, axes = {"up": np.ones((2, 3))}, {"up": ("embed.in", "mlp")}
      >>> drawn = plot_growth({"mlp": tile(3, times=2)}, params, axes)
      >>> [place.get_title() for place in drawn.axes if place.get_title()], drawn.get_supxlabel()
      (['mlp 3 → 6\\nwrite'], 'unchanged: embed 2')
    """
    drawn = growth_panels(growth, params, axes)
    if not drawn:
        raise ValueError("nothing to draw: the growth does not change any axis of the model")
    rules = growth.rules if isinstance(growth, Rules) else ()
    notes = [
        f"rule {i}: {str(rule).removeprefix('a rule for ')}" for i, rule in enumerate(rules, 1)
    ]
    changed = {name for panel in drawn for name in panel.axes}
    if stay := [
        f"{name} {size}" for name, size in sizes(params, axes).items() if name not in changed
    ]:
        notes.append(f"unchanged: {', '.join(stay)}")
    wrapped = (textwrap.wrap(note, _LINE, subsequent_indent="    ") for note in notes)
    lines = [line for part in wrapped for line in part]
    return panel_figure(drawn, lines)


def growth_panels(growth: Growth, params: Params, axes: Axes) -> list[Panel]:
    """List the matrices that parameters are contracted with, without identities and duplicates.

    Args:
      growth: maps, or rules.
      params: a pytree of arrays, or of their shapes.
      axes: the axis names of each parameter.

    Returns:
      The panels by axis, with the matrix for output axes ("write") before the one for input axes
      ("read"). For `Rules`, the title contains the numbers of the rules that use the matrix:
      ``2.1`` is the first term of the second rule, ``2`` is every term of it.

    Raises:
      ValueError: the growth does not fit the parameters.

    Example:
      >>> from jaxgrow.growth.maps import tile
      >>> params = {"up": np.ones((2, 3)), "down": np.ones((3, 2))}
      >>> axes = {"up": ("embed.in", "mlp"), "down": ("mlp.in", "embed")}
      >>> [panel.title for panel in growth_panels({"mlp": tile(3, times=2)}, params, axes)]
      ['mlp 3 → 6\\nwrite', 'mlp 3 → 6\\nread']
    """
    check(growth, params, axes)
    found: list[_Used] = []
    for leaf, _, names in leaves(params, axes):
        for i, term in enumerate(terms(growth, leaf, names), 1):
            for m, begin, end in parts(term, names):
                if m is not None and not is_identity(matrix := m.of(names[begin])):
                    used = _find_used(
                        found, tuple(axis_of(name) for name in names[begin:end]), m, matrix
                    )
                    used.roles.add("read" if reads_axis(names[begin]) else "write")
                    used.rules.setdefault(_rule_number(growth, leaf, names), set()).add(i)
    return [
        used.panel(growth)
        for used in sorted(found, key=lambda used: (used.along, "write" not in used.roles))
    ]


def panel_figure(panels: Sequence[Panel], notes: Sequence[str] = ()) -> "Figure":
    """Plot matrices side by side with one colour scale.

    Args:
      panels: the matrices in their order; at least one.
      notes: lines of text below the panels.

    Returns:
      A figure of matplotlib with the width of a page.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots require matplotlib, which is not installed: pip install matplotlib"
        ) from error
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    tall = max(panel.title.count("\n") for panel in panels)
    size = (1 + 1.9 * columns, rows * (1.9 + 0.14 * tall) + 0.14 * len(notes))
    fig = Figure(size, dpi=200, layout="constrained")
    places = [fig.add_subplot(rows, columns, i) for i in range(1, len(panels) + 1)]
    most = max(float(np.abs(matrix_cells(panel.matrix)).max()) for panel in panels) or 1.0
    drawn = [
        draw_matrix(place, panel.matrix, most) for place, panel in zip(places, panels, strict=True)
    ]
    for place, panel in zip(places, panels, strict=True):
        unit = _unit_label(panel.axes)
        each = _units_per_cell(panel.matrix)
        place.set_title(panel.title, fontsize=_SMALL)
        place.set_xlabel(
            f"old {unit}" + (f", {each} per cell" if each > 1 else ""), fontsize=_SMALL
        )
        place.set_ylabel(f"new {unit}", fontsize=_SMALL)
    ticks = most * np.array([-1, -0.25, 0, 0.25, 1])
    bar = fig.colorbar(
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
        fig.supxlabel("\n".join(notes), fontsize=_SMALL, x=0.01, ha="left")
    return fig


def draw_matrix(place: "PlotAxes", matrix: Matrix, most: float) -> "AxesImage":
    """Draw a matrix into a panel; units are counted from 0.

    The colour depends on the square root of a weight, so that small weights are visible.

    Args:
      place: the axes object of matplotlib.
      matrix: the matrix, of shape [new, old].
      most: the absolute weight of the darkest colours; red is positive, blue is negative.

    Returns:
      The image, which a colour bar needs.
    """
    from matplotlib.colors import FuncNorm
    from matplotlib.ticker import MaxNLocator

    drawn = matrix_cells(matrix)
    each = _units_per_cell(matrix)
    (new, old) = matrix.shape
    root = FuncNorm(
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x**2), -most, most
    )
    corners = (-0.5, drawn.shape[1] * each - 0.5, drawn.shape[0] * each - 0.5, -0.5)
    colours = place.imshow(
        drawn, cmap="RdBu_r", norm=root, extent=corners, aspect="auto", interpolation="nearest"
    )
    place.set(xlim=(-0.5, old - 0.5), ylim=(new - 0.5, -0.5))
    # Numbers with four digits or more need space on the horizontal axis.
    for side, ticks in ((place.xaxis, 5 if old < 1000 else 3), (place.yaxis, 5)):
        side.set_major_locator(MaxNLocator(integer=True, nbins=ticks))
    place.tick_params(labelsize=_SMALL)
    return colours


def matrix_cells(matrix: Matrix) -> np.ndarray:
    """Reduce a matrix to the cells that are drawn.

    Up to `CELLS` units, a cell is one entry. In larger matrices, a cell is the entry with the
    largest magnitude in a square of units. Sparse matrices are not converted to dense ones of shape
    [new, old].

    Args:
      matrix: the matrix, of shape [new, old].

    Returns:
      An array of at most [CELLS, CELLS].

    Example:
      >>> from jaxgrow.growth.maps import identity
      >>> matrix_cells(identity(50257).write).shape
      (128, 128)
    """
    each = _units_per_cell(matrix)
    (new, old) = matrix.shape
    if isinstance(matrix, SparseMap):
        m = sparse(matrix)
        high, low = np.zeros((2, -(-new // each), -(-old // each)))
        where = (np.arange(new)[:, None] // each, m.index // each)
        np.maximum.at(high, where, m.weight)
        np.minimum.at(low, where, m.weight)
    else:
        rows = [np.asarray(matrix[i : i + each]) for i in range(0, new, each)]
        columns = range(0, old, each)
        high = np.maximum.reduceat([np.maximum.reduce(r) for r in rows], columns, 1)
        low = np.minimum.reduceat([np.minimum.reduce(r) for r in rows], columns, 1)
    return np.where(np.abs(high) >= np.abs(low), high, low)


class _Used(NamedTuple):
    """A matrix over the axes ``along``, with the roles and the rules that use it."""

    along: tuple[str, ...]
    matrix: Matrix
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    roles: set[str]
    rules: dict[int, set[int]]  # the numbers of the terms of each rule

    def panel(self, growth: Growth) -> Panel:
        new, old = (" x ".join(map(str, shape)) for shape in self.shapes)
        lines = [
            f"{' x '.join(self.along)} {old} → {new}",
            " and ".join(sorted(self.roles, reverse=True)),
        ]
        if isinstance(growth, Rules):
            names: list[str] = []
            for i, used in sorted(self.rules.items()):
                all_used = len(used) == len(growth.rules[i - 1].terms)
                names += [f"{i}"] if all_used else [f"{i}.{n}" for n in sorted(used)]
            named = ", ".join(names)
            lines += textwrap.wrap(f"rule{'s' * (',' in named)} {named}", 26)
        return Panel("\n".join(lines), self.matrix, self.along)


def _rule_number(growth: Growth, leaf: str, names: Names) -> int:
    """The number of the rule that applies to a parameter, from 1; 0 without rules."""
    rules = growth.rules if isinstance(growth, Rules) else ()
    return next((i for i, rule in enumerate(rules, 1) if rule.matches(leaf, names)), 0)


def _find_used(found: list[_Used], along: tuple[str, ...], m: AxisMap, matrix: Matrix) -> _Used:
    """Return the entry of ``found`` with this matrix, after appending it if it is missing."""
    same = [used for used in found if used.along == along]
    # Most parameters share the same matrix object. Contents are compared only if they do not.
    for used in [u for u in same if u.matrix is matrix] or [
        u for u in same if _equal_matrices(u.matrix, matrix)
    ]:
        return used
    found.append(_Used(along, matrix, m.shapes, set(), {}))
    return found[-1]


def _equal_matrices(a: Matrix, b: Matrix) -> bool:
    both = [sparse(m) if isinstance(m, SparseMap) else m for m in (a, b)]
    x, y = (jax.tree.leaves(m) for m in both)
    return len(x) == len(y) and all(map(np.array_equal, x, y))


def _units_per_cell(matrix: Matrix) -> int:
    """The number of units per cell.

    It is the same for rows and columns, so that an identity is drawn as a straight line.
    """
    return -(-max(matrix.shape) // CELLS)


def _unit_label(axes: tuple[str, ...]) -> str:
    """The label of the rows and columns of a matrix over these axes."""
    first, *others = axes
    own = {"heads": "head", "kv_heads": "head", "experts": "expert"}
    return "unit" if others else "layer" if is_layers(first) else own.get(axis_kind(first), "unit")
