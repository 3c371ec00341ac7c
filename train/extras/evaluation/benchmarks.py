"""Benchmarks: tasks of the lm-evaluation-harness (``pip install -e '.[eval]'``).

The files of a task are local or downloaded.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jaxgrow.typed import Json, did_you_mean
from train.common.errors import UserError
from train.extras.evaluation.perplexity import TEXTS
from train.extras.evaluation.published import local_dataset
from train.extras.labelled.task import NAMES
from train.extras.pretrained import TextModel

LmEval: TypeAlias = Any  # an object of lm-eval, which has no types
# Bootstrap samples for the standard errors of metrics that are not means, such as perplexity.
BOOTSTRAP = 1000
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_ABOUT = ("alias", "name", "sample_len", "sample_count")  # keys of a result that are not metrics


@dataclass(frozen=True)
class Benchmarks:
    """Settings for the tasks of lm-eval.

    Args:
      data: folder of the tasks' files (`train.extras.evaluation.published`); None: lm-eval
        downloads datasets.
      few_shot: number of examples before each question; None: the default of the task.
      limit: the maximum number of questions of each task; None: all.
      include: folder of YAML files that define more tasks, as lm-eval reads them.
    """

    data: Path | None = None
    few_shot: int | None = None
    limit: int | None = None
    include: Path | None = None

    def load(self, names: Sequence[str]) -> Json:
        """Load tasks and groups with their data, by name.

        Raises:
          UserError: lm-eval is not installed or has no such task, files are missing or damaged, or
            the setting of examples has no effect.
        """
        if self.few_shot is not None and self.few_shot < 0:
            raise UserError(f"--few-shot is {self.few_shot}, less than 0")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit is {self.limit}, less than 1")
        manager = _manager(self.include)
        if unknown := [name for name in names if name not in manager.all_tasks]:
            raise UserError(
                f"there is no task {unknown[0]!r}: it is not a text, a file, a task of train.finetune, or a task of lm-eval "
                f"(lm-eval ls tasks){did_you_mean(unknown[0], (*manager.all_tasks, *NAMES, *TEXTS))}"
            )
        loaded = {name: self._loaded(manager, name) for name in names}
        leaves = [leaf for tasks in loaded.values() for leaf in _leaf_tasks(tasks)]
        if self.few_shot and all(leaf.get_config("num_fewshot") == 0 for leaf in leaves):
            raise UserError(
                f"--few-shot {self.few_shot} has no effect on {', '.join(names)}, because lm-eval always evaluates without "
                "examples there; leave out --few-shot"
            )
        return loaded

    def run(self, model: TextModel, names: Sequence[str]) -> dict[str, Json]:
        """Evaluate a model: the metrics and standard errors of each task.

        A group also has the scores of its parts.

        Raises:
          UserError: as for `load`, or the model cannot do a task.
        """
        loaded = self.load(names)
        # lm-eval would fork processes, in which JAX does not work.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")

        import lm_eval  # pyright: ignore[reportMissingImports]

        from train.extras.evaluation.harness import Harness

        found: LmEval = lm_eval.simple_evaluate(
            Harness(model),
            tasks=[task for tasks in loaded.values() for task in tasks],
            num_fewshot=self.few_shot,
            limit=self.limit,
            task_manager=_manager(self.include),
            log_samples=False,
            bootstrap_iters=BOOTSTRAP,
        )
        return {name: _task_result(name, found, loaded[name]) for name in names}

    def files(self, names: Sequence[str]) -> dict[str, list[Path]]:
        """The local files of each task.

        Raises:
          UserError: as for `load`.
        """
        return {name: _task_files(tasks) for name, tasks in self.load(names).items()}

    def _loaded(self, manager: LmEval, member: str | Json) -> list[LmEval]:
        """The tasks and groups of a name, or of a member of a group, which may have settings."""
        if isinstance(member, str):
            member = {"group" if member in manager.all_groups else "task": member}
        name = member.get("group") or member["task"]
        if "group" in member and self.data is not None:
            known = {} if "task" in member else manager.task_index[name].cfg
            return [self._group(manager, {**known, **member})]
        if self.data is None or name not in (*manager.all_tags, *_yaml_tasks(manager)):
            loaded = manager.load([name])
            return [*loaded["groups"].values()] or [*loaded["tasks"].values()]
        own = {**member, "class": _local_task(self.data, self.few_shot)}
        return [*manager.load([{"group": "local", "task": [own]}])["tasks"].values()]

    def _group(self, manager: LmEval, about: Json) -> LmEval:
        """A group with its members.

        It is made here, because lm-eval does not replace the class of the tasks of a group.
        """
        from lm_eval.api.group import Group  # pyright: ignore[reportMissingImports]

        group = Group.from_config({**about, "task": None})
        for member in about["task"]:
            for part in self._loaded(manager, member):
                group.add(part)
        return group


@cache
def _manager(include: Path | None) -> LmEval:
    """All tasks of lm-eval and of the folder; cached, because the search takes seconds."""
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "all tasks except texts, files, and the tasks of train.finetune need lm-eval, which is not "
            "installed: run pip install -e '.[eval]' in a clone of jaxgrow"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=None if include is None else str(include))


def _yaml_tasks(manager: LmEval) -> list[str]:
    """Tasks that are defined by YAML only; other tasks read their data with their own code."""
    return [
        name for name in manager.all_subtasks if "class" not in (manager.task_index[name].cfg or {})
    ]


def _leaf_tasks(tasks: Sequence[LmEval]) -> list[LmEval]:
    parts = (t.get_all_tasks() if hasattr(t, "get_all_tasks") else [t] for t in tasks)
    return [leaf for part in parts for leaf in part]


def _task_files(tasks: Sequence[LmEval]) -> list[Path]:
    return [file for leaf in _leaf_tasks(tasks) for file in getattr(leaf, "files", ())]


def _local_task(folder: Path, shots: int | None) -> type:
    """A class of tasks that read files in ``folder``.

    With ``shots`` (None: the number of the task), they also read the examples before questions.
    """
    from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

    class LocalTask(ConfigurableTask):
        files: list[Path]

        def __init__(self, config: Json):
            super().__init__(config={key: value for key, value in config.items() if key != "class"})

        def download(self, dataset_kwargs: LmEval = None, **more: LmEval) -> None:
            config: LmEval = self.config
            if own := (dataset_kwargs or {}).get("data_files"):  # the task names its own files
                super().download(dataset_kwargs, **more)
                self.files = [Path(file) for file in jax.tree.leaves(own)]
                return
            splits = [config.test_split or config.validation_split]
            if config.num_fewshot if shots is None else shots:
                splits.append(config.fewshot_split or config.training_split or splits[0])
            wanted = list(dict.fromkeys(splits))
            self.dataset, self.files = local_dataset(
                self.DATASET_PATH, self.DATASET_NAME, config.task, wanted, folder
            )
            for name in _SPLITS:
                if getattr(config, name) not in self.dataset:
                    setattr(config, name, None)

    return LocalTask


def _task_result(name: str, found: Json, tasks: Sequence[LmEval]) -> Json:
    """The metrics of a task; a group also has the metrics of its parts, under ``by``."""
    every = {**found["results"], **(found.get("groups") or {})}
    leaves = [leaf.task_name for leaf in _leaf_tasks(tasks)]
    parts = {leaf: _plain_metrics(every[leaf]) for leaf in leaves if leaf != name}
    out = _plain_metrics(every.get(name, {}))
    own = {"few_shot": found["n-shot"].get(name, 0), "version": found["versions"].get(name)}
    out |= {"by": parts} if parts else own
    return out | {"files": [*map(str, _task_files(tasks))]}


def _plain_metrics(result: Json) -> Json:
    """The metrics of a result, renamed from ``acc,none`` to ``acc``.

    Metrics of other filters keep their names. Unknown standard errors are left out.
    """
    return {
        key.removesuffix(",none"): value
        for key, value in result.items()
        if key not in _ABOUT and isinstance(value, int | float)
    }
