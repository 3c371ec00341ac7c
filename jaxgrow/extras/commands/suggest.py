"""The command suggest: which growth methods fit a model, and which savings were measured for them?"""

import argparse
import itertools
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files

from jaxgrow import operators
from jaxgrow.axes.names import axis_kind, is_layers
from jaxgrow.checkpoints import CheckpointError, Grown, Source, open_checkpoint
from jaxgrow.checkpoints.hf.storage import HuggingFace, family_for
from jaxgrow.cli.errors import UsageError, with_options
from jaxgrow.cli.new_sizes import given_sizes, target_sizes
from jaxgrow.cli.options import axis_option
from jaxgrow.cli.preservation import keeps_function
from jaxgrow.cli.writing import print_json, sizes_as_text
from jaxgrow.extras.commands.sizes import sizes_near, without_unchanged
from jaxgrow.operators.targets import layer_axes, width_axes
from jaxgrow.tables import align_columns
from jaxgrow.typed import Json
from jaxgrow.untrusted import print_text

_SCALE = "on GPTs of 94 thousand parameters"
# The key in ``jaxgrow/extras/evidence.toml`` of each sequence of methods, by the kinds of axes that
# grow.
_EVERY = frozenset({"layers", "embed", "heads", "mlp"})
_MEASURED = {
    (("interleave",), frozenset({"layers"})): "deepen",
    (("hypercloning", "interleave"), frozenset({"layers", "mlp"})): "halves",
    (("lemon", "stack"), _EVERY): "stack",
    (("aki",), _EVERY): "aki",
    (("average",), _EVERY): "ligo_start",
}


@cache
def marked_measurements() -> list[Json]:
    """The rows of the file that are marked for this command, sorted by the number of seeds.

    ``mean`` of a row without it is the mean of ``each`` of its seeds.
    """
    rows = tomllib.loads((files("jaxgrow.extras") / "evidence.toml").read_text("utf-8"))["measured"]
    found = [
        {"mean": round(sum(row.get("each", ())) / row["seeds"], 1), **row}
        for row in rows
        if row.get("suggest")
    ]
    return sorted(found, key=lambda row: -row["seeds"])


def describe_measurement(row: Json) -> str:
    """Format a row: the FLOPs saved in per cent, its setting, and its page."""
    more = f" ± {row['interval']:g}" if "interval" in row else ""
    given = f"; {row['given']:g} % if the small model already exists" if "given" in row else ""
    seeds = f"{row['seeds']} seed{'s' * (row['seeds'] > 1)}"
    setting = f"{row['optimizer']}, {row['tokens_per_parameter']:.0f} tokens per parameter, {seeds}"
    bound = "> " * ("bounds" in row)
    return f"{bound}{row['mean']:g} % of the FLOPs saved{more} ({setting}{given}): {row['page']}"


@dataclass(frozen=True)
class Suggestion:
    """A sequence of growth methods from a model to larger sizes.

    Attributes:
      methods: the methods, in the order in which they are applied.
      targets: the new sizes for each method.
      keeps: whether the growth preserves the function of the model.
      policies: the policy of the optimizer state for each method.
      parameters: number of parameters of the grown model.
      measured: the `marked_measurements` of these methods; may be empty.
    """

    methods: tuple[str, ...]
    targets: tuple[dict[str, int], ...]
    keeps: bool
    policies: tuple[str, ...]
    parameters: int
    measured: tuple[Json, ...]

    def commands(self, src: str, dst: str) -> list[str]:
        """The commands that grow the folder ``src`` into ``dst``."""
        folders = [src, *(f"{dst}-{name}" for name in self.methods[:-1]), dst]
        folders = [shlex.quote(folder) for folder in folders]
        steps = zip(self.methods, self.targets, folders, folders[1:], strict=False)
        return [
            f"jaxgrow grow {a} {b} --method {name} {size_options(target)}"
            for name, target, a, b in steps
        ]


def size_options(target: Mapping[str, int]) -> str:
    """The sizes of a target as options of the command line; stages become one option.

    Example:
      >>> size_options({"layers": 4, "kv_heads": 2})
      '--layers 4 --kv-heads 2'
    """
    kinds: dict[str, list[str]] = {}
    for name, size in target.items():
        kinds.setdefault(axis_kind(name), []).append(str(size))
    return " ".join(f"{axis_option(name)} {','.join(sizes)}" for name, sizes in kinds.items())


def larger_targets(sizes: Mapping[str, int], times: Fraction) -> list[dict[str, int]]:
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
      >>> larger_targets({"layers": 2, "embed": 8, "heads": 2, "mlp": 32}, Fraction(2))[0]
      {'layers': 4}
    """
    deeper, wide = layer_axes(sizes), width_axes(sizes)
    mlp = tuple(name for name in wide if axis_kind(name) == "mlp")
    found = [{axis: round(sizes[axis] * times) for axis in axes} for axes in (deeper, deeper + mlp)]
    if all((sizes[axis] * times).denominator == 1 for axis in wide):
        found.append({axis: int(sizes[axis] * times) for axis in wide})
    larger = list(filter(None, (without_unchanged(target, sizes) for target in found)))
    return [target for i, target in enumerate(larger) if target not in larger[:i]]


def suggest_methods(
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
    for names, parts in _method_sequences(deeper, wider):
        # These methods follow a loop of the model, and a list of layers.
        if ("unloop" in names and source.config.loop is None) or "passthrough" in names:
            continue
        try:
            way = _try_methods(source, names, parts)
        except (ValueError, CheckpointError) as error:
            refused[", then ".join(names)] = with_options(error).split("\n")[0]
            continue
        if way.keeps or not keep:
            found.append(way)
    # Sort by the smallest measured saving (0 without a measurement), then by function preservation.
    found.sort(key=lambda x: (-min((m["mean"] for m in x.measured), default=0.0), not x.keeps))
    return found, refused


def _method_sequences(
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


def _try_methods(
    source: Source, names: tuple[str, ...], parts: tuple[dict[str, int], ...]
) -> Suggestion:
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
        kept &= keeps_function(growth, model.config, name)
        model = Grown(model, growth)
        if isinstance(source, HuggingFace):
            family_for(model.config, source.hf_config)  # which may not store all sizes
    policies = tuple(operators.OPERATORS[name].policies[0] for name in names)
    grown = frozenset(axis_kind(axis) for target in parts for axis in target) - {"kv_heads"}
    measured = tuple(
        m for m in marked_measurements() if m["method"] == _MEASURED.get((names, grown))
    )
    return Suggestion(names, parts, kept, policies, model.parameters, measured)


def model_properties(source: Source) -> str:
    """Describe the properties of a model that determine which methods fit, one per line."""
    norms = (
        "before each sublayer"
        if source.config.pre_norm
        else "after each sublayer (post-norm): few methods preserve its function"
    )
    experts = source.sizes().get("experts")
    about = (
        f"{experts}, whose units grow like those of an MLP; `jaxgrow grow --method expert_copies` "
        "copies complete experts"
    )
    if experts is None:
        about = (
            "none; `jaxgrow grow --method virtual_groups` or upcycle turns the MLPs into experts"
        )
        try:
            source.config.as_mixture()
        except ValueError as error:
            about = f"none; {error}"
    more = "; `jaxgrow grow --method loop --loop I-JxN` repeats the layers I to J"
    loop = f"each layer runs once{more * source.config.loops}"
    head = (
        "tied; `jaxgrow grow --method untie` separates it and preserves the function"
        if source.config.ties
        else "none, or separate from the embedding"
    )
    return f"Norms: {norms}\nLoops: {loop}\nHead: {head}\nExperts: {about}"


def suggestions_as_text(
    source: Source, ways: Sequence[Suggestion], refused: Mapping[str, str], src: str
) -> str:
    """Format the suggestions for one target: table, measurements, commands of the first row."""
    if not ways:
        reasons = [f"  {name}: {why}" for name, why in refused.items()] or [
            "  every method changes the function here"
        ]
        return "\n".join(["no method is applicable:", *reasons])
    parameters = ways[0].parameters
    rows = [
        (
            ", then ".join(way.methods),
            "preserved" if way.keeps else "changed",
            ", then ".join(way.policies),
            f"{way.measured[0]['mean']:g} %" if way.measured else "-",
        )
        for way in ways
    ]
    notes = [
        f"  {', then '.join(way.methods)}: {describe_measurement(m)}"
        for way in ways
        for m in way.measured
    ]
    lines = [
        f"{parameters:,} parameters, {parameters / source.parameters:.2f} times the present number",
        align_columns(("METHOD", "FUNCTION", "OPTIMIZER STATE", "MEASURED"), rows),
        *[f"measured in this project, {_SCALE}:", *notes] * bool(notes),
        "commands of the first row:",
        *(f"  {command}" for command in ways[0].commands(src, "DST")),
    ]
    return "\n".join(lines)


def run_suggest(a: argparse.Namespace) -> None:
    """Run ``jaxgrow suggest``."""
    source = open_checkpoint(a.src)
    found = [
        (target, *suggest_methods(source, target, a.keep_function))
        for target in _wanted_targets(a, source)
    ]
    if a.json:
        targets = [
            {"target": target, "ways": [asdict(way) for way in ways], "refused": refused}
            for target, ways, refused in found
        ]
        about = {"src": str(a.src), "parameters": source.parameters, "targets": targets}
        return print_json(about)
    print_text(f"{sizes_as_text(source.sizes())}\n{model_properties(source)}")
    for target, ways, refused in found:
        text = suggestions_as_text(source, ways, refused, str(a.src))
        print_text(f"\nto {sizes_as_text(target)}: {text}")


def _wanted_targets(a: argparse.Namespace, source: Source) -> list[dict[str, int]]:
    """The target sizes: the given ones, or the candidates for ``--to`` or ``--to-params``."""
    if a.to is None and a.to_params is None:
        return [target_sizes(a, source)]
    if given_sizes(a) or None not in (a.to, a.to_params):
        raise UsageError("give only one of --to, --to-params and explicit sizes")
    if a.to is None:
        if a.to_params <= source.parameters:
            raise UsageError(
                f"--to-params {a.to_params:,}: {a.src} has {source.parameters:,} parameters, and grow "
                f"makes a model larger. For a smaller model, run jaxgrow prune with --params {a.to_params}"
            )
        return sizes_near(source, a.to_params)
    wanted = larger_targets(source.sizes(), a.to)
    if not wanted:
        raise UsageError(
            "--to is too close to 1x: no size of this model changes. Give new sizes, such as "
            "--layers 24"
        )
    return wanted
