"""The folder of a run: which files it contains, which run owns it, and how to read a finished run.

``config.json`` contains the config of the run and the identity of its data. ``metrics.jsonl`` and
``tensorboard/`` are its log. A run is resumed from ``checkpoints/``. ``maps.npz``, ``lora.npz`` and
``adapter.npz`` contain the learned maps or adapters, if there are any.

A finished run has ``result.json`` and the parameters of its last model in the format of
`jaxgrow.checkpoints`: ``params/`` and ``jaxgrow.json``. ``ema/`` has the average of its weights in
the same format, if the run keeps one. A run on text also has its tokenizer,
``tokenizer.json``, with the files that define its special tokens. A run on a task also has
``scores.json``. If `train.compare` has evaluated the run, there is an ``evaluated.json``.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxgrow import typed
from jaxgrow.axes import Tree
from jaxgrow.checkpoints import Cast, CheckpointError, open_checkpoint, orbax
from jaxgrow.checkpoints.io.files import TRANSFORMERS, at_step
from jaxgrow.checkpoints.io.folders import is_at, lock_file, sync
from jaxgrow.checkpoints.opening import UNFINISHED
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.files import (
    delete_parts,
    locked_folder,
    parsed_json,
    read_own,
    read_record,
    write_record,
)
from train.common.hosts import on_process_zero
from train.common.output import say_notes
from train.config.experiment import (
    Experiment,
    described_differences,
    experiment_json,
    unequal_settings,
)
from train.config.resuming import binding_settings, class_of, resume_conflicts
from train.data.dataset import Dataset
from train.state.model import TrainState, split_head
from train.store import checkpoint, intact

# Settings of a model's config that may differ for another task.
_OF_HEADS = ("head", "pooler", "classes", "tied", "masked", "image", "window", "trained_windows")
COMPUTED_AGAIN = "delete it, and the command that wrote it computes it again"
# The keys of the config that every run has.
_OWN = ("name", "model", "data")
# The types of the values that commands read, in ``config.json`` and ``result.json``.
_CONFIG = {"model": dict, "data": dict, "method": dict, "sources": dict, "corpus": dict}
_RESULT = {
    **{"bytes": int, "steps": int, "flops": float, "seconds": float, "model": dict},
    **{"corpus": dict, "phases": tuple[dict, ...]},
    **{"source_tokens": dict[str, int]},
}
# The files that a run writes after its config, before it begins.
_EARLY = ("tokenizer.json", TRANSFORMERS)
# The folder of the average of the weights.
_EMA = "ema"
# Files that a run replaces. Without a run, they belong to somebody else.
_REPLACED = ("jaxgrow.json", "params", _EMA, *_EARLY)
# The keys of the hashes in the identity of data. Only hashes are compared, because equal data may
# have different names.
_WHAT = ("train", "valid", "tokenizer")
# The keys of ``config.json`` that are not settings of the experiment.
_ABOUT = ("corpus", "sources", "changes", "from", "order", "devices")

# Each writes the card of a finished run for another library, from the folder of the model, the config of
# the run, its result, the config of its model, and its scores on its task.
CARDS: Registry[
    Callable[[Path, Json, Json, Config, Mapping[str, Mapping[str, float]] | None], None]
] = Registry("model card", "train.extras")


class Workdir:
    """The folder of one run.

    Raises:
      UserError: ``folder`` is the address of an object store.
    """

    def __init__(self, folder: str | Path):
        # `Path` would make it a folder of this machine, which may lose its disk when it is preempted.
        if re.match(r"[a-z][a-z0-9]+:/", str(folder)):
            raise UserError(
                f"the folder of a run must be in a file system, but {folder} is the address of an object store: mount it, or "
                "give a folder that all processes can access"
            )
        self.folder = Path(folder).expanduser().resolve()
        self.log = self.folder / "metrics.jsonl"
        self.board = self.folder / "tensorboard"
        self.checkpoints = self.folder / "checkpoints"
        self._config = self.folder / "config.json"
        self._result = self.folder / "result.json"
        self.score_file = self.folder / "scores.json"
        self._held: list[tuple[int, Path]] = []  # locked files and folders

    # --- reading ---

    @property
    def begun(self) -> bool:
        """Whether a run has written a line of its log, a checkpoint or a result."""
        logged = self.log.exists() and self.log.stat().st_size > 0
        return logged or self.finished or any(self.checkpoints.glob("*"))

    @property
    def finished(self) -> bool:
        return os.path.lexists(self._result)

    @property
    def config(self) -> Json:
        """The content of ``config.json``.

        Raises:
          UserError: ``config.json`` is missing or damaged.
        """
        copy = (
            "copy the one that the same command writes at the start of a run in another --workdir"
        )
        way_out = f"restore it from a backup, or {copy}"
        found = _typed(self._config, read_record(self._config, way_out, _OWN), _CONFIG, way_out)
        _typed(self._config, found["data"], dict.fromkeys(found["data"], dict), way_out)
        return found

    @property
    def scores(self) -> dict[str, dict[str, float]] | None:
        """The scores of the last model on its task, by split and metric; None if not evaluated."""
        return (
            read_record(self.score_file, COMPUTED_AGAIN)
            if os.path.lexists(self.score_file)
            else None
        )

    @property
    def result(self) -> Json:
        """The content of ``result.json``.

        Raises:
          UserError: ``result.json`` is missing or damaged.
        """
        return _typed(self._result, read_record(self._result, self.again), _RESULT, self.again)

    def lines(self) -> list[Json]:
        """Return the lines of the log of a finished run.

        Raises:
          UserError: the log is missing or damaged, or does not contain all lines.
        """
        content = read_own(self.log) if os.path.lexists(self.log) else b""
        size = self.result.get("bytes", 0)
        if len(content) < size:
            raise UserError(
                f"{self.log} is damaged: only {len(content)} of its {size} bytes exist; {self.again}"
            )
        lines = []
        for n, line in enumerate(content.splitlines(), 1):
            try:
                lines.append(parsed_json(line, ("phase", "step")))
            except ValueError as error:
                raise UserError(
                    f"{self.log} is damaged: line {n}: {error}; {self.again}"
                ) from error
        return lines

    def params(self) -> Tree:
        """Return the final parameters of a finished run, as NumPy arrays.

        Raises:
          UserError: the parameters are missing or damaged.
        """
        try:
            return orbax.Orbax(self.folder).params()
        except CheckpointError as error:
            raise UserError(f"{error}; {self.again}") from error

    @property
    def again(self) -> str:
        """The part of a message that explains how to restore damaged files of a finished run."""
        return f"delete {self._result} and run the command of the run again: it restores its files from the last checkpoint"

    # --- claiming ---

    def claim(self, experiment: Experiment) -> None:
        """Create the folder if necessary, and check that ``experiment`` may use it.

        It may use its own folder, or a folder in which no run has written a log line, checkpoint or
        result.

        Raises:
          UserError: the folder contains a run of another config, a finished run with other data, or
            a model that is not of a run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.begun:
            self.check_unused()
            return
        there = self.config
        mine = experiment_json(experiment)
        known = "corpus" in there
        before = _own_settings(there)
        other = resume_conflicts(before, mine, binding_settings(experiment), known)
        if other:
            raise UserError(
                f"{self.folder} contains a run of another config (values there and here: {'; '.join(other[:8])}); "
                "give another --workdir"
            )
        moved = any(class_of(name, mine) == "place" for name in unequal_settings(before, mine))
        if known and moved and self.finished:
            self.same_data(there["corpus"], experiment.data.identity(experiment.model))

    def close_like(self, sources: Iterable[Path]) -> None:
        """Close the folder of a new run to all users who may not read the models it starts from."""
        if self.begun:
            return
        mode = now = stat.S_IMODE(self.folder.stat().st_mode)
        for source in sources:
            mode &= stat.S_IMODE(source.stat().st_mode) | 0o700
        if mode != now:
            self.folder.chmod(mode)

    def check_unused(self) -> None:
        """Check that a run that begins would not replace files of somebody else."""
        others = [name for name in _REPLACED if os.path.lexists(self.folder / name)]
        if os.path.lexists(self._config):
            try:
                # A run that was killed early has written its config and, after it, its tokenizer.
                if "corpus" in read_record(self._config, "", _OWN):
                    others = [name for name in others if name not in _EARLY]
            except UserError:
                others.append(self._config.name)
        if others:
            raise UserError(
                f"{self.folder} is not the folder of a run, but it contains {', '.join(others)}, which a run would replace; "
                "give another --workdir, or move the files away"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder within the block.

        A job that is started again while the previous one still saves must not write into its
        checkpoints.

        Raises:
          UserError: another process uses the folder.
        """
        with ExitStack() as held:
            on_process_zero(lambda: self._lock(held))
            held.callback(self._held.clear)
            yield

    def _lock(self, held: ExitStack) -> None:
        # The folder itself is locked, because somebody may remove the file, and the file is locked,
        # because some network file systems can lock only files.
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if (handle := locked_folder(self.folder)) is not None:
                held.callback(os.close, handle)
                self._held.append((handle, self.folder))
            file = held.enter_context(lock_file(self.folder / ".lock", wait=False))
        except BlockingIOError as error:
            raise UserError(
                f"another process uses {self.folder}; wait until it has saved its checkpoint, or give another --workdir"
            ) from error
        except CheckpointError as error:  # no locks; all processes have to end
            raise UserError(str(error)) from error
        if handle is None:
            self._held.append((file.fileno(), self.folder / ".lock"))
        delete_parts(self.folder)

    def still_alone(self) -> None:
        """Check that the locked folder has not been moved or replaced.

        Raises:
          UserError: it has, so that a new file would be in another folder than the run.
        """
        for handle, path in self._held:
            if not is_at(handle, path):
                raise UserError(
                    f"{path} was moved, removed or replaced while the run was using it; nothing more is written there. "
                    "To continue from the last checkpoint, give the present folder of the run as --workdir"
                )

    def begin(
        self,
        experiment: Experiment,
        corpus: Json,
        sources: Mapping[str, str],
        step: int = 0,
        origin: Json | None = None,
        order: Json | None = None,
        devices: int | None = None,
    ) -> list[str]:
        """Write ``config.json``, once the run can start.

        Args:
          experiment: experiment of the run.
          corpus: identity of its data.
          sources: fingerprint of each model that the run starts from, by its folder.
          step: step of the run at which it continues.
          origin: the other run and the step of its checkpoint, if the run starts from one.
          order: order of the training samples, if it comes from a source (`train.store.seen`).
          devices: number of devices that a batch is divided among, if the result depends on it.

        Returns:
          One line for each setting that has another value than before.

        Raises:
          UserError: the result depends on the number of devices, and the run began with another one.
        """
        changes: list[Json] = []
        said: list[str] = []
        if self.begun:
            there = self.config
            if (before := there.get("devices", devices)) != devices:
                raise UserError(
                    f"the run in {self.folder} has divided its batches among {before} devices, but now among {devices}, "
                    f"and the capacity of an expert is that of each device: divide them among {before} again, or give "
                    "another --workdir"
                )
            sources = there.get("sources", {}) | sources
            new = _setting_changes(there, experiment_json(experiment), step)
            said = [
                f"{c['setting']} is {c['after']!r} from step {step} on; it was {c['before']!r}"
                for c in new
            ]
            changes = _joined_changes(there.get("changes", []), new, step)
        about = {"corpus": corpus, "sources": sources, "changes": changes, "from": origin}
        about |= {"order": order, "devices": devices}
        write_record(
            self._config, experiment_json(experiment) | {k: v for k, v in about.items() if v}
        )
        return said

    def check_data(self, corpus: Json) -> None:
        """Check that the data are those that the run was started with.

        Args:
          corpus: identity of the present data.

        Raises:
          UserError: they are not.
        """
        if self.begun:
            self.same_data(self.config.get("corpus", corpus), corpus)

    def same_data(self, there: Json, here: Json) -> None:
        """Check that the data of the run have not changed.

        Args:
          there: identity of the data that the run was started with.
          here: identity of the present data.

        Raises:
          UserError: the identities differ.
        """
        if any(there.get(key) != here.get(key) for key in _WHAT):
            raise UserError(
                f"the run in {self.folder} was started with other data: {_described_data(there)} there, "
                f"{_described_data(here)} here; "
                f"{_data_advice(there, here)}, or give another --workdir"
            )

    def same_sources(self, here: Mapping[str, str]) -> None:
        """Check that the models that the run started from have not changed.

        Args:
          here: fingerprint of each of these models that still exists, by its folder.

        Raises:
          UserError: a fingerprint differs from the one in ``config.json``.
        """
        there = self.config.get("sources", {}) if self.begun else {}
        for folder, fingerprint in here.items():
            if (before := there.get(folder, fingerprint)) != fingerprint:
                raise UserError(
                    f"the run in {self.folder} started from another model in {folder}: its fingerprint was "
                    f"{before[:12]}, but is {fingerprint[:12]}; restore the model, or give another --workdir"
                )

    # --- ending ---

    def finish(
        self,
        result: Json,
        model: TrainState,
        data: Dataset,
        head: Json | None = None,
    ) -> None:
        """Write the last model of the run, its tokenizer and its card, and then the result.

        The result is written last, because it marks the run as finished. The folder of the average has
        the same files as the folder of the run, and a card with the losses of the average.

        Args:
          result: result of the run.
          model: last model. The average of its weights, if it has one, becomes the model in the
            folder ``ema``.
          data: data of the experiment.
          head: task and labels of the head, which are recorded with the model.
        """
        on_process_zero(self.still_alone)
        weights = {self.folder: (model.params, result)}
        if model.average is not None:
            averages = (name for name in result if name.endswith("_ema"))
            scores = {name.removesuffix("_ema"): result[name] for name in averages}
            weights[self.folder / _EMA] = (model.average, result | scores)
        for folder, (tree, about) in weights.items():
            on_process_zero(partial(folder.mkdir, exist_ok=True))
            # A single process exports from the host, because this does not compile any program.
            tree = jax.device_get(tree) if jax.process_count() == 1 else tree
            orbax.export_model(folder, model.config, tree, head)
            on_process_zero(partial(self._describe, folder, about, model.config, data))
        on_process_zero(lambda: self._end(result))

    def _describe(self, folder: Path, about: Json, config: Config, data: Dataset) -> None:
        """Write the files for `transformers` of the model in a folder, and its card."""
        keep_inputs(folder, data, config)
        CARDS["transformers"](folder, self.config, about, config, self.scores)

    def _end(self, result: Json) -> None:
        # Everything that the result describes must be on the disk before it.
        sync(self.folder)
        write_record(self._result, result)


def keep_inputs(folder: Path, data: Dataset, config: Config) -> None:
    """Write the tokenizer of the data, if they are text, and the inputs for `transformers`.

    Args:
      folder: folder of a run, or of the average of its weights.
      data: data of the experiment.
      config: config of the model that the run trains.
    """
    inputs = folder / TRANSFORMERS
    inputs.mkdir(exist_ok=True)
    write_record(inputs / "config.json", data.write_inputs(folder, config, inputs))


def imported_model(
    folder: Path, config: Config, mesh: Mesh, headless: bool = False
) -> tuple[TrainState, Json | None]:
    """Load an existing model onto a mesh, with its parameters in float32 or a wider dtype.

    Args:
      folder: folder of a finished run, or any folder that `jaxgrow.checkpoints.open_checkpoint`
        reads: a Hugging Face checkpoint, or one that ``jaxgrow`` wrote.
      config: expected config of the model.
      mesh: mesh that the model is placed on.
      headless: whether the head is left out; it may then differ from ``config``.

    Returns:
      The model and the result of its run. The result is None if the model is not from a run,
      because its training cost is then unknown.

    Raises:
      UserError: the folder does not contain a model, its run has not finished, or the model is
        damaged or does not have ``config``.
    """
    home, step = at_step(folder)
    run = Workdir(home)
    unfinished = step is not None or (not run.finished and run.begun)
    if (unfinished and not UNFINISHED["run"].accepts(home)) or not home.is_dir():
        raise UserError(
            f"there is neither a finished run nor another model in {folder}; run its config first, with the same seed"
        )
    try:
        source = open_checkpoint(folder)
        least = Cast(source, "float32", at_least=True)
        params = (source if least.leaves == source.leaves else least).shard(mesh)
    except CheckpointError as error:
        finished = run.finished and step is None
        raise UserError(f"{error}; {run.again}" if finished else str(error)) from error
    has = source.config.as_json()
    wanted = config.as_json()
    for name in config.run_by:
        has.pop(name, None)
        wanted.pop(name, None)
    wrong = described_differences(has, wanted)
    if headless:
        params = config.body_from(split_head(params)[0], source.config)
        wrong = [text for text in wrong if text.partition(":")[0] not in _OF_HEADS]
    if wrong:
        raise UserError(
            f"the model in {folder} does not have the expected config (values there and here: {'; '.join(wrong)})"
        )
    say_notes(source)
    if unfinished:
        step = intact.newest_step(run.checkpoints) if step is None else step
        cost = checkpoint.checkpoint_record(run.checkpoints / str(step)).cost
        return TrainState(params, None, config), cost.as_json()
    return TrainState(params, None, config), run.result if run.finished else None


def _typed(path: Path, content: Json, kinds: Json, way_out: str) -> Json:
    """Return the content of a JSON file after a check of the types of the values that exist."""
    for name in kinds.keys() & content.keys():
        try:
            typed.convert_json(content[name], kinds[name])
        except ValueError as error:
            raise UserError(f"{path} is damaged: {name}: {error}; {way_out}") from error
    return content


def _own_settings(config: Json) -> Json:
    """The settings of the experiment in a ``config.json``."""
    return {k: v for k, v in config.items() if k not in _ABOUT}


def _setting_changes(there: Json, here: Json, step: int) -> list[Json]:
    """List the settings that differ between two ``config.json`` when a run continues at ``step``."""
    return [
        {"step": step, "setting": name, "before": before, "after": after}
        for name, (before, after) in unequal_settings(_own_settings(there), here).items()
    ]


def _joined_changes(earlier: Sequence[Json], new: Sequence[Json], step: int) -> list[Json]:
    """Return all changes of a run that continues at ``step``, at most one of a setting at a step.

    The steps after ``step`` are computed again, with the new values.
    """
    found: dict[tuple[int, str], Json] = {}
    for change in (*earlier, *new):
        at = min(change["step"], step)
        first = found.get((at, change["setting"]), change)
        found[at, change["setting"]] = {**change, "step": at, "before": first["before"]}
    return [change for change in found.values() if change["before"] != change["after"]]


def _data_advice(there: Json, here: Json) -> str:
    """What to do with other data; the same sources in another order have other random seeds."""
    before, now = (
        [(part["train"], part["share"]) for part in identity.get("mixture", {}).values()]
        for identity in (there, here)
    )
    if before == now or sorted(before) != sorted(now):
        return "restore the original data"
    names = dict(zip(now, here["mixture"], strict=True))
    return (
        "the sources have another order in data.path, which decides the batches: name them in the order "
        + ", ".join(names[part] for part in before)
    )


def _described_data(identity: Json) -> str:
    """Format an identity: ``wiki (train 0123456789ab, valid 0123456789ab, tokenizer bytes)``."""
    keys = ("python", *_WHAT)
    return f"{identity['name']} ({', '.join(f'{k} {identity[k][:12]}' for k in keys if k in identity)})"
