"""Which growth methods fit a model, and which savings were measured for them?

The measurements are copied from ``train/extras/advice/evidence.toml``. A test compares the two.
"""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxgrow import operators
from jaxgrow.axes.names import axis_kind, is_layers
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import Grown, Source
from jaxgrow.cli.errors import with_options
from jaxgrow.cli.keeps import keeps
from jaxgrow.cli.options import axis_option
from jaxgrow.operators.targets import layer_axes, width_axes
from jaxgrow.tables import align_columns


@dataclass(frozen=True)
class Measurement:
    """One row of ``train/extras/advice/evidence.toml``; the fields are explained there.

    Attributes:
      method: the key of the method in the file.
      optimizer: the optimizer of both runs.
      tokens_per_parameter: length of the training, rounded.
      seeds: number of seeds.
      saved: FLOPs saved at an equal loss, in per cent, mean over the seeds.
      interval: half of the 95 % interval of ``saved``; None if the file has none.
      given: FLOPs saved in per cent if the cost of the small model is not counted; None if it was
        not measured.
      bounds: number of seeds whose saving is a lower bound.
      page: the documentation page with the command and all losses.
    """

    method: str
    optimizer: str
    tokens_per_parameter: int
    seeds: int
    saved: float
    interval: float | None
    given: float | None
    bounds: int
    page: str

    def __str__(self) -> str:
        more = "" if self.interval is None else f" ± {self.interval:g}"
        given = (
            "" if self.given is None else f"; {self.given:g} % if the small model already exists"
        )
        seeds = f"{self.seeds} seed{'s' * (self.seeds > 1)}"
        setting = f"{self.optimizer}, {self.tokens_per_parameter} tokens per parameter, {seeds}"
        return (
            f"{'> ' * bool(self.bounds)}{self.saved:g} % of the FLOPs saved{more} "
            f"({setting}{given}): {self.page}"
        )


_SCALE = "on GPTs of 94 thousand parameters"
_MUON = "docs/results/muon.md"
_WIKIPEDIA = "docs/results/wikipedia.md"
_DEEPEN = (
    Measurement("deepen", "Muon", 20, 3, 14.7, 4.5, 44.0, 0, _MUON),
    Measurement("deepen", "AdamW", 20, 3, 13.5, 15.9, None, 0, _MUON),
    Measurement("deepen", "Muon", 49, 3, 8.9, 20.3, None, 0, _MUON),
)
_HALVES = (
    Measurement("halves", "Muon", 20, 3, 17.7, 3.5, 49.1, 0, _MUON),
    Measurement("halves", "Muon", 49, 3, 6.2, 7.7, None, 0, _MUON),
)
_STACK = (Measurement("stack", "AdamW", 20, 3, -9.0, 5.0, 11.4, 0, _WIKIPEDIA),)
_AKI = (Measurement("aki", "AdamW", 20, 3, -7.1, 13.8, 12.9, 0, _WIKIPEDIA),)
_AVERAGE = (
    Measurement("ligo_start", "AdamW", 20, 3, 20.2, None, 35.1, 1, _WIKIPEDIA),
    Measurement("ligo_start", "Muon", 20, 1, -21.7, None, None, 0, _MUON),
)

#: The policy of `jaxgrow.growth.moments.grow_optimizer` that suits each method best.
POLICY = {name: found.policies[0] for name, found in operators.OPERATORS.items()}
#: The measurements by method (in order of application) and by the kinds of axes that grew.
_EVERY = frozenset({"layers", "embed", "heads", "mlp"})
MEASURED: dict[tuple[tuple[str, ...], frozenset[str]], tuple[Measurement, ...]] = {
    (("interleave",), frozenset({"layers"})): _DEEPEN,
    (("hypercloning", "interleave"), frozenset({"layers", "mlp"})): _HALVES,
    (("lemon", "stack"), _EVERY): _STACK,
    (("aki",), _EVERY): _AKI,
    (("average",), _EVERY): _AVERAGE,
}


@dataclass(frozen=True)
class Suggestion:
    """A sequence of growth methods from a model to larger sizes.

    Attributes:
      methods: the methods, in the order in which they are applied.
      targets: the new sizes for each method.
      keeps: whether the growth preserves the function of the model.
      policies: the policy of the optimizer state for each method.
      parameters: number of parameters of the grown model.
      measured: the measurements of this project; empty if there are none.
    """

    methods: tuple[str, ...]
    targets: tuple[dict[str, int], ...]
    keeps: bool
    policies: tuple[str, ...]
    parameters: int
    measured: tuple[Measurement, ...]

    def commands(self, src: str, dst: str) -> list[str]:
        """The commands that grow the folder ``src`` into ``dst``."""
        folders = [src, *(f"{dst}-{name}" for name in self.methods[:-1]), dst]
        folders = [shlex.quote(folder) for folder in folders]
        steps = zip(self.methods, self.targets, folders, folders[1:], strict=False)
        return [
            f"jaxgrow grow {a} {b} --method {name} {options(target)}"
            for name, target, a, b in steps
        ]

    def as_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {
            **self.__dict__,
            "measured": [measurement.__dict__ for measurement in self.measured],
        }


def options(target: Mapping[str, int]) -> str:
    """The sizes of a target as options of the command line; stages become one option.

    Example:
      >>> options({"layers": 4, "kv_heads": 2})
      '--layers 4 --kv-heads 2'
    """
    kinds: dict[str, list[str]] = {}
    for name, size in target.items():
        kinds.setdefault(axis_kind(name), []).append(str(size))
    return " ".join(f"{axis_option(name)} {','.join(sizes)}" for name, sizes in kinds.items())


def targets(sizes: Mapping[str, int], times: Fraction) -> list[dict[str, int]]:
    """Propose target sizes for growing a model by the factor ``times``.

    There are three candidates: the first multiplies the number of layers, the second multiplies
    the numbers of layers and MLP units, and the third multiplies all widths. The first two round
    the numbers. The third does not round, because the heads divide the residual stream.

    Args:
      sizes: the size of each axis of the model, as of `jaxgrow.sizes`.
      times: the factor.

    Returns:
      One target per candidate; candidates with fractional sizes or without any growth are omitted.

    Example:
      >>> targets({"layers": 2, "embed": 8, "heads": 2, "mlp": 32}, Fraction(2))[0]
      {'layers': 4}
    """
    deeper = layer_axes(sizes)
    mlp = tuple(name for name in width_axes(sizes) if axis_kind(name) == "mlp")
    found: list[dict[str, int]] = []
    for axes in (deeper, (*deeper, *mlp)):
        found.append({axis: round(sizes[axis] * times) for axis in axes})
    if all((sizes[axis] * times).denominator == 1 for axis in width_axes(sizes)):
        found.append({axis: int(sizes[axis] * times) for axis in width_axes(sizes)})
    larger: list[dict[str, int]] = []
    for target in found:
        grows = any(n > sizes[a] for a, n in target.items())
        if grows and target not in larger:
            larger.append(target)
    return larger


def suggest(
    source: Source, target: Mapping[str, int], keep: bool = False
) -> tuple[list[Suggestion], dict[str, str]]:
    """List sequences of methods that reach the sizes of ``target``, the best measured one first.

    If a target contains widths and layers, a function-preserving method for width is applied first,
    followed by a method for depth.

    Args:
      source: the model, as `jaxgrow.checkpoints.open_checkpoint` returns it.
      target: the new sizes, by axis.
      keep: return only function-preserving sequences.

    Returns:
      ``(suggestions, refused)``: ``refused`` contains the reason for each method that does not fit.
    """
    deeper = {axis: size for axis, size in target.items() if is_layers(axis)}
    wider = {axis: size for axis, size in target.items() if not is_layers(axis)}
    found = []
    refused = {}
    for names, parts in _ways(deeper, wider):
        try:
            way = _tried(source, names, parts)
        except (ValueError, CheckpointError) as error:
            refused[", then ".join(names)] = with_options(error).split("\n")[0]
            continue
        if way.keeps or not keep:
            found.append(way)
    return sorted(found, key=_rank), refused


def _rank(way: Suggestion) -> tuple[float, bool]:
    """Sort by the smallest measured saving (0 if there is none), then by function preservation."""
    return (-min((m.saved for m in way.measured), default=0.0), not way.keeps)


def _ways(
    deeper: dict[str, int], wider: dict[str, int]
) -> list[tuple[tuple[str, ...], tuple[dict[str, int], ...]]]:
    both = [
        name
        for name in operators.DEPTH | operators.WIDTH
        if "layers" in operators.OPERATORS[name].axes and name not in operators.DEPTH
    ]
    if deeper and wider:
        pairs = itertools.product(("hypercloning", "lemon"), operators.DEPTH)
        return [((name,), (wider | deeper,)) for name in both] + [
            (pair, (wider, deeper)) for pair in pairs
        ]
    names = [*operators.DEPTH, *both] if deeper else list(operators.WIDTH)
    return [((name,), (deeper or wider,)) for name in dict.fromkeys(names)]


def _tried(source: Source, names: tuple[str, ...], parts: tuple[dict[str, int], ...]) -> Suggestion:
    """Apply the methods in turn to the shapes of a model, and describe the result.

    Raises:
      ValueError: a method cannot reach the sizes.
      CheckpointError: the growth does not fit the model.
    """
    kept = True
    model = source
    for name, target in zip(names, parts, strict=True):
        operator = operators.OPERATORS[name]
        growth = operator(model.sizes(), target, **model.config.traits, seed=0)
        kept &= keeps(growth, model.config, name)
        model = Grown(model, growth)
    policies = tuple(POLICY[name] for name in names)
    grown = frozenset(axis_kind(axis) for target in parts for axis in target) - {"kv_heads"}
    return Suggestion(
        names, parts, kept, policies, model.parameters, MEASURED.get((names, grown), ())
    )


def questions(source: Source) -> str:
    """Describe the properties of a model that determine which methods fit, one per line."""
    config = source.config
    norms = (
        "before each sublayer"
        if config.pre_norm
        else "after each sublayer (post-norm): few methods preserve its function"
    )
    experts = source.sizes().get("experts")
    about = (
        _dense(source) if experts is None else f"{experts}, whose units grow like those of an MLP"
    )
    return f"Norms: {norms}\nExperts: {about}"


def _dense(source: Source) -> str:
    """Whether the MLPs of a dense model can become experts."""
    try:
        source.config.as_mixture()
    except ValueError as error:
        return f"none; {error}"
    return (
        "none; `jaxgrow grow` with --method virtual_groups or upcycle turns the MLPs into experts"
    )


def described(
    source: Source, ways: Sequence[Suggestion], refused: Mapping[str, str], src: str
) -> str:
    """Format the suggestions for one target: table, measurements, commands of the first row."""
    if not ways:
        reasons = [f"  {name}: {why}" for name, why in refused.items()] or [
            "  every method changes the function here"
        ]
        return "\n".join(["no method is applicable:", *reasons])
    parameters = ways[0].parameters
    head = ("METHOD", "FUNCTION", "OPTIMIZER STATE", "MEASURED")
    lines = [
        f"{parameters:,} parameters, {parameters / source.parameters:.2f} times the present number",
        align_columns(head, [_row(way) for way in ways]),
    ]
    notes: dict[Measurement, str] = {}
    for way in ways:
        methods = ", then ".join(way.methods)
        notes |= {m: f"  {methods}: {m}" for m in way.measured}
    lines += [f"measured in this project, {_SCALE}:", *notes.values()] * bool(notes)
    return "\n".join(
        [
            *lines,
            "commands of the first row:",
            *(f"  {command}" for command in ways[0].commands(src, "DST")),
        ]
    )


def _row(way: Suggestion) -> tuple[str, str, str, str]:
    saved = f"{way.measured[0].saved:g} %" if way.measured else "-"
    return (
        ", then ".join(way.methods),
        "preserved" if way.keeps else "changed",
        ", then ".join(way.policies),
        saved,
    )
