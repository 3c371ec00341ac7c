"""The settings of a run: a frozen dataclass, which a function of a config file returns.

Settings of the form ``a.b=c`` override its fields.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

import optax

from jaxgrow.models import Config
from jaxgrow.models.config import EXPERTS
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.common.commands import config_file, unknown_experiment
from train.common.errors import UserError
from train.common.hosts import is_first
from train.common.output import say
from train.config.overrides import all_settings, by_name, with_overrides, wrong_types
from train.data.dataset import Dataset
from train.data.text import Data
from train.plan.lifetimes import Plan, shapes
from train.plan.methods import Method, Scratch, TrainStage
from train.plan.modifiers import DropLayers, less_than_one
from train.plan.phase import Phase
from train.plan.training import Train
from train.plan.transforms import Correct, Grow, Interpolate
from train.state.mesh import How, Mesh
from train.state.optim import Optim, transformation

T = TypeVar("T")
Logger: TypeAlias = Literal["wandb", "mlflow"]

# Larger sizes are probably typing errors, and building a plan for them would take minutes.
LARGEST = {"layers": 2**14}
LARGEST_SIZE = 2**24


@dataclass(frozen=True)
class Experiment:
    """All settings of one run.

    ``steps`` is the number of steps of a training from scratch. The stages of a method are
    fractions of this number. With ``epochs`` instead, the number follows from the corpus
    (`with_steps`). With ``seconds`` instead, it is measured when the run starts
    (`train.extras.timing`). An override of one of these fields replaces the other ones.
    """

    name: str
    model: Config
    # 0: ``epochs`` or ``seconds`` determines the number of steps.
    steps: int = field(default=0, kw_only=True, metadata={"replaces": ("epochs", "seconds")})
    # How often every training sample is used.
    epochs: float | None = field(
        default=None, kw_only=True, metadata={"replaces": ("steps", "seconds")}
    )
    # Time of training on this machine, without compilation, validation and checkpoints.
    seconds: float | None = field(
        default=None, kw_only=True, metadata={"replaces": ("steps", "epochs")}
    )
    # Number of samples (sequences of the context length, or images) over all devices and
    # micro-batches.
    batch: int = field(kw_only=True)
    data: Dataset = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    method: Method = field(default_factory=Scratch)
    accumulate: int = 1  # number of micro-batches in a batch
    # The batch doubles after these fractions of the training steps, until it has ``batch`` samples.
    ramp: tuple[float, ...] = ()
    parallel: How = "mesh"
    mesh: Mesh = field(default_factory=Mesh)
    seed: int = 0  # random seed of the initialisation and of the data order
    eval_every: int = 100  # steps between evaluations
    eval_batches: int = 8
    log_every: int = 10
    checkpoint_every: int = 500
    # Also save a checkpoint when this many minutes have passed since the last one. 0: save by steps
    # only.
    checkpoint_minutes: float = 0.0
    # Never delete every K-th checkpoint of the run. 0: keep only the two newest checkpoints.
    keep_every: int = 0
    # After a step whose loss or gradients are not finite: end the run, or leave out its update.
    on_nan: Literal["stop", "skip"] = "stop"
    most_skipped: int = 10  # for on_nan=skip: end the run after more such steps in a row
    # Trackers in addition to the log and TensorBoard. Their packages are optional dependencies.
    loggers: tuple[Logger, ...] = ()

    # The choices that use a field (`train.extras.effect`).
    used_with = {"most_skipped": {"on_nan": ("skip",)}}
    step_counts = ("eval_every",)

    def __post_init__(self):
        self._check_length()
        for name in (
            "batch",
            "accumulate",
            "eval_every",
            "eval_batches",
            "log_every",
            "checkpoint_every",
            "most_skipped",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if self.keep_every < 0:
            raise ValueError(f"keep_every must be at least 0, but is {self.keep_every}")
        if not 0 <= self.checkpoint_minutes < math.inf:
            raise ValueError(
                f"checkpoint_minutes must be 0 or a number of minutes, but is {self.checkpoint_minutes}"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 2^32 - 1, but is {self.seed}")
        for name, size in self.model.sizes().items():
            if size > (most := LARGEST.get(name, LARGEST_SIZE)):
                raise ValueError(f"model.{name} must be at most {most:,}, but is {size:,}")
        if self.batch % self.accumulate:
            raise ValueError(
                f"a batch of {self.batch} cannot be divided into {self.accumulate} micro-batches: set batch to a multiple of "
                f"{self.accumulate}, or accumulate to a divisor of {self.batch}"
            )
        if not all(0 < a < b for a, b in itertools.pairwise((*self.ramp, 1.0))):
            raise ValueError(
                f"ramp must be fractions of the steps between 0 and 1, in increasing order, but is {self.ramp}"
            )
        if self.batch % (parts := self.accumulate * 2 ** len(self.ramp)):
            raise ValueError(
                f"a batch of {self.batch} cannot be halved {len(self.ramp)} times and divided into {self.accumulate} "
                f"micro-batches: set batch to a multiple of {parts}, or leave out fractions of ramp"
            )
        if self.model.length % self.mesh.context:
            raise ValueError(
                f"{self.model.length} positions are not divisible by the {self.mesh.context} devices of mesh.context"
            )
        if (
            self.parallel == "pmap"
            and self.mesh.fsdp * self.mesh.tensor * self.mesh.context * self.mesh.expert > 1
        ):
            raise ValueError(
                "pmap replicates the model on every device: set parallel=mesh to shard it"
            )

    def _check_length(self) -> None:
        lengths = {"steps": self.steps or None, "epochs": self.epochs, "seconds": self.seconds}
        given = {name: value for name, value in lengths.items() if value is not None}
        if self.steps < 0 or not given:
            raise ValueError(f"steps must be at least 1, but is {self.steps}: set steps, or epochs")
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, but is {value}")
        if len(given) > 1:
            one, other = [*given][:2]
            unset = {"steps": "steps=0", "epochs": "epochs=None", "seconds": "seconds=None"}
            raise ValueError(
                f"{one}={given[one]} and {other}={given[other]} both set the length of the run: leave out one of them "
                f"({unset[one]}, or {unset[other]})"
            )

    @cached_property
    def plan(self) -> Plan:
        """The phases of the run.

        Raises:
          UserError: the number of steps is not known yet (`with_steps`).
        """
        if not self.steps:
            why = (
                f"epochs={self.epochs} and the size of the corpus, and no corpus was read here"
                if self.seconds is None
                else f"seconds={self.seconds} and the speed of the machine, which only a run measures"
            )
            raise UserError(
                f"{self.name}: the number of steps follows from {why}: give the number of steps, for example as "
                "CONFIG:steps=100_000"
            )
        plan = self.method.plan(self.model, self.optim, self.steps)
        return RAMPS["plan"](plan, self.ramp) if self.ramp else plan

    @property
    def mean_batch(self) -> float:
        """The mean number of samples in a batch, over all steps."""
        parts = itertools.pairwise((0.0, *self.ramp, 1.0))
        doublings = range(-len(self.ramp), 1)
        return sum(
            self.batch * 2.0**n * (b - a) for n, (a, b) in zip(doublings, parts, strict=True)
        )

    @property
    def cost(self) -> float:
        """Expected FLOPs of the training phases."""
        return sum(phase.cost(self.batch, self.accumulate) for phase in self.plan)

    @cached_property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer of all models of the run, which are of one family with the same axis names."""
        return transformation(self.optim, self.model.axes())


# "plan" returns a plan with a phase of training for each size of the batch, from `Experiment.ramp`.
RAMPS: Registry[Callable[[Plan, Sequence[float]], Plan]] = Registry("batch ramp", "train.extras")
# Each replaces the value "auto" of settings by values that fit the devices of this run, and prints
# its choice with the given function.
AUTOMATIC: Registry[Callable[[Experiment, Callable[[str], None]], Experiment]] = Registry(
    "automatic settings", "train.extras"
)
# "settings" refuses settings that have no effect, from an experiment or another dataclass, the phases
# of the plan, and the names of the settings of the command line.
UNUSED: Registry[Callable[[object, Sequence[object], Collection[str]], None]] = Registry(
    "unused", "train.extras"
)
# "seconds" returns an experiment with ``steps`` in place of ``seconds``. It measures steps, and keeps
# the measurement in a folder.
TIMINGS: Registry[Callable[[Experiment, Path], Experiment]] = Registry("timing", "train.extras")


def with_steps(experiment: Experiment) -> Experiment:
    """Return the experiment with ``steps`` in place of ``epochs``, from the size of its corpus.

    An epoch has as many steps as there are complete and partial batches in the training samples, on
    average: ``steps = round(epochs * samples / batch)``, at least 1. With a ramp, ``batch`` is the mean
    size of a batch. The corpus is read, and text
    is tokenised into the cache that the training uses.

    Raises:
      UserError: the corpus cannot be read.
    """
    if experiment.epochs is None:
        return experiment
    try:
        samples = len(experiment.data.sources(experiment.model)[0])
    except UserError as error:
        raise UserError(
            f"{experiment.name}: the number of steps follows from epochs={experiment.epochs:g} and the size of the corpus, "
            f"which cannot be read: {error}. Or give the number of steps, for example as CONFIG:steps=100_000"
        ) from error
    steps = max(1, round(experiment.epochs * samples / experiment.mean_batch))
    return replace(experiment, steps=steps, epochs=None)


def with_fitting_steps(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with ``steps`` in place of ``seconds``, by `TIMINGS`."""
    return experiment if experiment.seconds is None else TIMINGS["seconds"](experiment, folder)


def load_experiment(
    text: str | Path, overrides: Sequence[str] = (), corpus: bool = True
) -> Experiment:
    """Load an experiment from a config file.

    Args:
      text: ``FILE.py:NAME`` for the function ``def NAME() -> Experiment`` in the file, or
        ``FILE.py`` for the function ``config``. Further parts after colons are additional
        overrides: ``configs/demo.py:scratch:optim.peak_lr=2e-2``.
      overrides: settings of the form ``a.b=c``. Settings in ``text`` are applied after them.
      corpus: whether to read the corpus if the experiment has ``epochs``. Commands that do not
        train leave it alone; the plan of such an experiment is then an error.

    Raises:
      UserError: the file is missing, raises an error, or does not define the experiment; or an
        override does not fit; or the corpus of ``epochs`` cannot be read.
    """
    path, experiment = load_as(Experiment, text, overrides)
    with settings_errors(f"config {path}"):
        if corpus:
            experiment = with_steps(experiment)
        # The number of steps of ``seconds`` is measured later. Any number shows which settings are used.
        planned = (
            replace(experiment, steps=1000, seconds=None) if experiment.seconds else experiment
        )
        if planned.steps:
            check_experiment(planned)
            given = [*overrides, *str(text).split(":")]
            names = {setting.partition("=")[0] for setting in given}
            UNUSED["settings"](planned, planned.plan, names)
    if experiment.steps:
        print_warnings(experiment)
    return experiment


@contextmanager
def settings_errors(what: str) -> Iterator[None]:
    """Turn the errors of settings that do not fit together into a ``UserError`` about ``what``."""
    try:
        yield
    # An ArithmeticError is, for example, a fraction of the steps that is not a finite number.
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{what}: {error}") from error


def check_experiment(experiment: Experiment) -> None:
    """Check the plan of an experiment, the shapes of its models, and its cost.

    Raises:
      ValueError: the settings do not fit together.
      ArithmeticError: a number is not finite.
    """
    plan = experiment.plan
    shapes(plan, len(plan), experiment.tx)
    # The cost also checks that the layers that a layer drop names exist.
    _ = experiment.cost
    for before, phase in itertools.pairwise((None, *plan)):
        if isinstance(phase, Train):
            # Without a growth, all entries are old or all are new: a modifier of new ones has no effect, or
            # changes the schedule of the model.
            found = [m.key for m in phase.modifiers if m.by_counts and not phase.begin]
            if found and not isinstance(before, Grow | Interpolate | Correct):
                raise ValueError(
                    f"{phase.label} has {found[0]}, which is for the entries that a growth has just made, but no growth comes "
                    f"directly before it: leave out {found[0]} there, or use it in the first stage after a growth"
                )
            _check_experts(phase.config, experiment.mesh.expert)
            # The cost of the head would count another number of predicted positions.
            if phase.config.masked != experiment.model.masked:
                raise ValueError(
                    f"{phase.label}: its model has masked={phase.config.masked}, but all models of a run are trained on the "
                    f"same samples, with model.masked={experiment.model.masked}: set both to the same value"
                )
            # The ledger would count the positions of the model, not of the samples.
            data = experiment.data
            if data.padded_length not in (None, phase.length):
                raise ValueError(
                    f"{phase.label} is counted with {phase.length} positions, but the samples of the task have data.length="
                    f"{data.padded_length}: use train.finetune, or a model with a context of this length"
                )
            padded = data.padded_length is not None and "mask" in getattr(
                phase.config, "inputs", ()
            )
            drops = (
                isinstance(m, DropLayers) or "drop" in m.savings(phase.config)
                for m in phase.modifiers
            )
            if padded and any(drops):
                raise ValueError(
                    f"{phase.label} drops layers or tokens, which encoders do not support for padded texts: leave out the "
                    f"drop, or use a decoder, such as a GPT-2, instead of a {type(phase.config).__name__}"
                )


def _check_experts(config: Config, devices: int) -> None:
    """Check that a model can be trained with its experts sharded over ``devices`` devices."""
    experts = config.sizes().get(EXPERTS, 0)
    if devices == 1 or not experts:
        return
    if not getattr(config, "capacity", 0.0):
        raise ValueError(
            f"mesh.expert={devices} shards the experts, which needs a capacity, but model.capacity is 0: set it, for "
            "example to 1.25, or set mesh.expert=1"
        )
    if experts % devices:
        raise ValueError(
            f"{experts} experts are not divisible by the {devices} devices of mesh.expert"
        )


def load_as(kind: type[T], text: str | Path, overrides: Sequence[str] = ()) -> tuple[Path, T]:
    """Load a dataclass of type ``kind`` from a config file, without checks of its plan.

    Returns:
      The path of the file, and the dataclass that its function returns, with all overrides.
    """
    file, *settings = str(text).split(":")
    name = settings.pop(0) if settings and "=" not in settings[0] else None
    path = config_file(file)
    loaded = with_overrides(_called_function(path, name, kind), [*overrides, *settings])
    wrong = wrong_types(loaded)
    if wrong:
        raise UserError(f"config {path}: {'; '.join(wrong)}")
    with settings_errors(f"config {path}"):
        UNUSED["settings"](loaded, (), ())
    return path, loaded


def listed_experiments(text: str | Path) -> dict[str, str]:
    """Return the names of the experiments in a file, with the first lines of their docstrings.

    Raises:
      UserError: the file is missing or raises an error.
    """
    path = config_file(str(text).partition(":")[0])
    with _located(path):
        module = _imported_config(path)
    found = experiment_names(module) or [name for name in ("config",) if hasattr(module, name)]
    return {
        name: (inspect.getdoc(getattr(module, name)) or "").partition("\n")[0] for name in found
    }


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Add the file and the line to an error that the code of the file ``path`` raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise UserError(f"config {where}: {type(error).__name__}: {error}") from error


def _imported_config(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"config {path.resolve()}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses with deferred annotations look up their module by its name.
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _called_function(path: Path, name: str | None, kind: type[T]) -> T:
    with _located(path):
        result = _experiment_function(_imported_config(path), name, path, kind)()
    if not isinstance(result, kind):
        raise UserError(
            f"config {path}: {name or 'config'}() must return {_a(kind.__name__)}, not {type(result).__name__}"
        )
    return result


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def experiment_names(module: ModuleType, kind: type = Experiment) -> list[str]:
    """Return the names of the experiments of a config file, in their order in the file.

    Experiments are the functions of the file whose return annotation is ``kind``.
    """
    own = [
        f
        for f in vars(module).values()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    ]
    return [f.__name__ for f in own if not f.__name__.startswith("_") and _returns(f, kind)]


def _returns(f: Callable, kind: type) -> bool:
    """Whether a function has no arguments, and ``kind`` as its return annotation."""
    try:
        signature = inspect.signature(f, eval_str=True)
    except NameError:  # an annotation that exists for type checkers only
        return False
    return signature == inspect.Signature(return_annotation=kind)


def _experiment_function(
    module: ModuleType, name: str | None, path: Path, kind: type[T]
) -> Callable[[], T]:
    function = getattr(module, name or "config", None)
    if function is None and (others := experiment_names(module, kind)):
        raise unknown_experiment(path, name, others)
    if function is None:
        raise UserError(
            f"config {path} defines no experiment; write a function config() -> {kind.__name__}"
        )
    return function


def print_warnings(experiment: Experiment) -> None:
    """Print warnings on stderr about settings that are allowed but probably not intended."""
    if not is_first():
        return
    texts = [text for phase in experiment.plan for text in phase.warnings()]
    texts += [text for phase in experiment.plan for text in _run_differently(phase, experiment)]
    for s in all_settings(experiment.method, "method."):
        if s.owner is TrainStage and s.name.endswith(".steps"):
            texts += less_than_one(s.name, s.value, experiment.steps)
    for text in dict.fromkeys(texts):
        say(f"{experiment.name}: {text}", file=sys.stderr)


def _run_differently(phase: Phase, experiment: Experiment) -> list[str]:
    """One text for each run setting, such as ``dtype``, in which a trained model differs."""
    if not isinstance(phase, Train):
        return []
    settings = ((n, getattr(phase.config, n), getattr(experiment.model, n)) for n in Config.run_by)
    return [
        f"{phase.label}: its model has {name}={own}, but model.{name}={other}. The method has its own "
        f"config for this model, such as method.small; set {name} there, too, if both should be equal"
        for name, own, other in settings
        if own != other
    ]


def experiment_json(experiment: Experiment) -> Json:
    """Return the experiment in the form of ``config.json``; equal experiments have equal forms."""

    def plain(node: object) -> Any:
        if isinstance(node, Config):
            return node.as_json()
        if dataclasses.is_dataclass(node):
            fields = {}
            for f in dataclasses.fields(node):
                value = getattr(node, f.name)
                if "named" in f.metadata:
                    fields |= {name: plain(x) for name, x in by_name(node, f).items()}
                else:
                    fields[f.name] = plain(value)
            return fields
        return [plain(item) for item in node] if isinstance(node, tuple) else node

    tagged = plain(experiment) | {
        name: {type(getattr(experiment, name)).__name__: plain(getattr(experiment, name))}
        for name in ("data", "method")
    }
    return json.loads(json.dumps(tagged))


def unequal_settings(old: object, new: object, name: str = "") -> dict[str, tuple[object, object]]:
    """Return the old and the new value of each setting that differs, by its name."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        found = {}
        for key in sorted(old.keys() | new.keys()):
            found |= unequal_settings(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
        return found
    return {} if old == new else {name: (old, new)}


def described_differences(old: object, new: object) -> list[str]:
    """Return the settings that differ: ``["optim.peak_lr: 0.01 and 0.02", ..]``."""
    return [f"{name}: {a!r} and {b!r}" for name, (a, b) in unequal_settings(old, new).items()]
