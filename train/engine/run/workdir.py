"""A run's folder: what lies where in it, whose it is, and how a finished run is read.

``config.json`` says what the run is, and on which data; ``metrics.jsonl`` and ``tensorboard/`` are
its log, ``checkpoints/`` what it goes on from, ``maps.npz``, ``lora.npz`` and ``adapter.npz`` what
it learned of that kind, if any. A finished run has ``result.json`` and, as `jaxgrow.checkpoints`
reads them, the parameters of its last model: ``params/`` and ``jaxgrow.json``, beside the tokenizer
of its text, ``tokenizer.json``, with the files that define its special tokens; of a task, also
``scores.json``; and ``evaluated.json``, if `train.compare` has evaluated it.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxgrow.axes import Tree
from jaxgrow.checkpoints import Cast, CheckpointError, Loaded, Source, open_checkpoint, orbax
from jaxgrow.checkpoints.io.folders import sync
from jaxgrow.models import Config, from_json
from jaxgrow.models.patches import PatchConfig, resized_positions
from train.common.errors import UserError
from train.common.files import appears_whole, checked_json, lock, read_json, write_json
from train.config.experiment import Experiment, as_json, conflicts, differences
from train.data import batches, special, text
from train.engine.hosts import once
from train.engine.run import checkpoint
from train.engine.state.heads import split
from train.engine.state.model import Model
from train.plan.methods import LARGE

_HOW = ("cache", "workers")  # of Data and Images: how they are read, not what
_WHERE = ("path", "valid_path", "tokenizer")
# Of a model's config: what another task may have otherwise.
_OF_HEADS = ("head", "classes", "tied", "masked", "image", "window", "trained_windows")
_COMPUTED_AGAIN = "delete it, and the command that wrote it computes it again"
_WHAT = ("train", "valid", "tokenizer")  # of an identity: hashes; equal data may have other names


class Workdir:
    """The folder of one run."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser().resolve()
        self.log = self.folder / "metrics.jsonl"
        self.board = self.folder / "tensorboard"
        self.checkpoints = self.folder / "checkpoints"
        self._config = self.folder / "config.json"
        self._result = self.folder / "result.json"
        self._scores = self.folder / "scores.json"
        self._evaluated = self.folder / "evaluated.json"

    # --- reading ---

    @property
    def begun(self) -> bool:
        """Whether a run has written a line of its log, a checkpoint or a result."""
        logged = self.log.exists() and self.log.stat().st_size > 0
        return logged or self.finished or any(self.checkpoints.glob("*"))

    @property
    def finished(self) -> bool:
        return self._result.exists()

    @property
    def config(self) -> dict[str, Any]:
        """
        Raises:
          UserError: ``config.json`` is missing or damaged.
        """
        copy = (
            "copy the one that the same command writes at the start of a run in another --workdir"
        )
        return read_json(
            self._config, f"restore it from a backup, or {copy}", ("name", "model", "data")
        )

    @property
    def scores(self) -> dict[str, dict[str, float]] | None:
        """What its last model scores on the data that judge its task, if somebody has asked: split -> metric -> value."""
        return read_json(self._scores, _COMPUTED_AGAIN) if self._scores.exists() else None

    def keep_scores(self, scores: dict[str, dict[str, float]]) -> None:
        once(lambda: write_json(self._scores, scores))

    @property
    def evaluated(self) -> dict[str, dict[str, Any]]:
        """What its last model scores without training, by what was asked; nothing, if nobody has."""
        return read_json(self._evaluated, _COMPUTED_AGAIN) if self._evaluated.exists() else {}

    def keep_evaluated(self, results: dict[str, dict[str, Any]]) -> None:
        write_json(self._evaluated, self.evaluated | results)

    @property
    def result(self) -> dict[str, Any]:
        """
        Raises:
          UserError: ``result.json`` is missing or damaged.
        """
        return read_json(self._result, self.again)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the log of a finished run.

        Raises:
          UserError: the log is missing or damaged, or lines of it are lost.
        """
        content, size = (
            self.log.read_bytes() if self.log.exists() else b"",
            self.result.get("bytes", 0),
        )
        if len(content) < size:
            raise UserError(
                f"{self.log} is damaged: {len(content)} of its {size} bytes are there; {self.again}"
            )
        lines = []
        for n, line in enumerate(content.splitlines(), 1):
            try:
                lines.append(checked_json(line, ("phase", "step")))
            except ValueError as error:
                raise UserError(
                    f"{self.log} is damaged: line {n}: {error}; {self.again}"
                ) from error
        return lines

    def params(self) -> Tree:
        """The parameters that a finished run ended with, as NumPy arrays.

        Raises:
          UserError: they are not there, or not whole.
        """
        if not (self.folder / "params").is_dir():  # finished by a version that did not export them
            return checkpoint.load(self.checkpoints, LARGE, self.result["steps"])
        try:
            return orbax.Orbax(self.folder).params()
        except CheckpointError as error:
            raise UserError(f"{error}; {self.again}") from error

    @property
    def again(self) -> str:
        """How to get back files of a finished run that are damaged."""
        return f"delete {self._result} and give the command of the run again: it restores its files from the last checkpoint"

    # --- claiming ---

    def claim(self, experiment: Experiment) -> None:
        """Makes the folder if need be, and sees that it is free for ``experiment``: its own, or one where no run got far.

        Raises:
          UserError: it holds a run that computes something else, or one that has ended with other
            data.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.begun:
            return
        there, mine = self.config, as_json(experiment)
        known = "corpus" in there
        other = conflicts(_comparable(there, known), _comparable(mine, known))
        if other:
            raise UserError(
                f"{self.folder} belongs to another config, there and here: {'; '.join(other[:8])}; give another --workdir"
            )
        if known and _comparable(there, False) != _comparable(mine, False) and self.finished:
            self.same_data(there["corpus"], batches.identity(experiment.data, experiment.model))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A job that was started again while the one before still saves must not write into its checkpoints.

        Raises:
          UserError: another process is in the folder.
        """
        with ExitStack() as held:

            def take() -> None:
                try:
                    held.enter_context(lock(self.folder / ".lock", wait=False))
                except BlockingIOError as error:
                    raise UserError(
                        f"another process runs in {self.folder}; wait until it has saved, or give another --workdir"
                    ) from error

            once(take)
            yield

    def begin(self, experiment: Experiment, corpus: dict[str, Any]) -> None:
        """Writes down what the run is; only when it can begin, for what cannot is no run.

        Raises:
          UserError: it was begun with other data than those that ``corpus`` identifies.
        """
        if self.begun:
            self.same_data(self.config.get("corpus", corpus), corpus)
        write_json(self._config, as_json(experiment) | {"corpus": corpus})

    def same_data(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Raises:
        UserError: the run was begun with other data than those here.
        """
        if any(there.get(key) != here.get(key) for key in _WHAT):
            raise UserError(
                f"{self.folder} was begun with other data: there {_named(there)}, here {_named(here)}; bring those back, or "
                "give another --workdir"
            )

    # --- ending ---

    def finish(
        self,
        result: dict[str, Any],
        config: Config,
        params: Tree,
        tokenizer: str | None,
        head: Mapping[str, Any] | None = None,
    ) -> None:
        """Exports the run's last model, and its tokenizer if it is of text, and then writes the result.

        The result comes last because it marks the run as finished. ``head`` records the task and
        the labels of the head.
        """
        # One process does it on the host, where nothing is compiled.
        orbax.export(
            self.folder,
            config,
            jax.device_get(params) if jax.process_count() == 1 else params,
            head,
        )
        once(lambda: self._end(result, tokenizer))

    def _end(self, result: dict[str, Any], tokenizer: str | None) -> None:
        if tokenizer is not None:
            with appears_whole(self.folder / "tokenizer.json") as part:
                text.tokenizer(tokenizer).save(str(part))
            special.copied(text.folder_of(tokenizer), self.folder)
        sync(self.folder)  # everything that the result is of
        write_json(self._result, result)


def imported(
    folder: Path, config: Config, mesh: Mesh, headless: bool = False
) -> tuple[Model, dict[str, Any] | None]:
    """A model that somebody has, on the devices of a mesh, in parameters of float32 or better, and the result of its run.

    ``folder``: of a run that has ended, or whatever `jaxgrow.checkpoints.open_checkpoint` reads: a
    Hugging Face folder, or one that ``jaxgrow`` wrote. What such a model has cost nobody knows:
    then the result is None. ``headless``: it may have another head, which is left out.

    Raises:
      UserError: there is no such thing, the run has not ended, its model is another than
        ``config``, or damaged.
    """
    run = Workdir(folder)
    if not run.finished and (run.begun or not folder.is_dir()):
        raise UserError(
            f"there is no finished run in {folder}, nor another model; run its config first, with the same seed"
        )
    try:
        source = _stored(run, config) or open_checkpoint(folder)
        least = Cast(source, "float32", at_least=True)
        params = (source if least.leaves == source.leaves else least).shard(mesh)
    except CheckpointError as error:
        raise UserError(f"{error}; {run.again}" if run.finished else str(error)) from error
    has, wanted = (
        {name: value for name, value in c.as_json().items() if name not in config.run_by}
        for c in (source.config, config)
    )
    wrong = differences(has, wanted)
    if headless:
        params, _ = split(params)
        if (
            isinstance(config, PatchConfig)
            and isinstance(source.config, PatchConfig)
            and config.positions
        ):
            params["position_embedding"] = resized_positions(
                params["position_embedding"], source.config, config
            )
        wrong = [text for text in wrong if text.partition(":")[0] not in _OF_HEADS]
    if wrong:
        raise UserError(
            f"the model in {folder} is another than the one asked for, there and here: {'; '.join(wrong)}"
        )
    return Model(params, None, config), run.result if run.finished else None


def _stored(run: Workdir, config: Config) -> Source | None:
    """The model of a run that was finished by a version that did not export it."""
    if not run.finished or (run.folder / "params").is_dir():
        return None
    return Loaded(
        replace(from_json(run.result["model"]), **{n: getattr(config, n) for n in config.run_by}),
        run.params(),
    )


def load(folder: str | Path, name: str | None = None, step: int | None = None) -> Tree:
    """Parameters of a run, as NumPy arrays: those that it ended with, or, of one that has not ended, in its newest checkpoint.

    ``name`` asks for another model than the one that the run is for, and ``step`` for a certain
    checkpoint.

    Raises:
      UserError: there is nothing of that kind, or it is not whole.
    """
    run = Workdir(folder)
    if run.finished and name is None and step is None:
        return run.params()
    return checkpoint.load(run.checkpoints, name or LARGE, step)


def _comparable(config: Mapping[str, Any], known: bool) -> dict[str, Any]:
    """A ``config.json`` without how its data are read and, where their identity is ``known``, without where from."""
    left_out = (*_HOW, *_WHERE, "corpus") if known else (*_HOW, "corpus")
    data = {
        kind: {k: v for k, v in d.items() if k not in left_out}
        for kind, d in config["data"].items()
    }
    return {k: v for k, v in config.items() if k != "corpus"} | {"data": data}


def _named(identity: Mapping[str, Any]) -> str:
    """``wiki (train 0123456789ab, valid 0123456789ab, tokenizer bytes)``."""
    keys = ("python", *_WHAT)
    return f"{identity['name']} ({', '.join(f'{k} {identity[k][:12]}' for k in keys if k in identity)})"
