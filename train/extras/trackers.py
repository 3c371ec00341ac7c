"""Weights & Biases and MLflow as trackers of a run."""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.config.experiment import Experiment, experiment_json
from train.store.trackers import PROJECT, TRACKERS, Tracker

# File in the folder of a run with its id in each tracker, so that a resumed run continues there.
IDS = "trackers.json"


class WandB:
    """Weights & Biases.

    ``WANDB_MODE=offline`` writes to the folder of the run, for ``wandb sync``. ``WANDB_PROJECT``
    names the project. A resumed run computes some points again. W&B already has their steps, and
    ignores them.
    """

    def __init__(self, experiment: Experiment, folder: Path, id: str | None):
        import wandb  # pyright: ignore[reportMissingImports]

        self.id = id or secrets.token_hex(8)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            group=experiment.name,
            config=experiment_json(experiment),
            dir=folder,
            id=self.id,
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow at ``MLFLOW_TRACKING_URI``, in the experiment ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(self, experiment: Experiment, folder: Path, id: str | None):
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        self._metric = Metric
        self._last = 0
        if id is not None:
            self.id = id
            self._last = max(
                (m.step for m in self._client.get_metric_history(id, "flops")), default=0
            )
            self._client.update_run(id, "RUNNING")
            return
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(project)
        tags = {"group": experiment.name, "seed": str(experiment.seed)}
        where = known.experiment_id if known else self._client.create_experiment(project)
        self.id = self._client.create_run(where, run_name=folder.name, tags=tags).info.run_id
        params = [
            Param(name, str(value))
            for name, value in flat_settings(experiment_json(experiment)).items()
        ]
        for i in range(0, len(params), 100):  # the limit of one request
            self._client.log_batch(self.id, params=params[i : i + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._last:  # a resumed run computes these points again
            return
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.id, [self._metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self.id)


def flat_settings(node: object, name: str = "") -> dict[str, object]:
    """Flatten nested dicts to ``{"optim.peak_lr": 0.01, ...}``."""
    if not isinstance(node, dict):
        return {name: node}
    below = (flat_settings(value, f"{name}.{key}".lstrip(".")) for key, value in node.items())
    return {key: value for part in below for key, value in part.items()}


class Service(Tracker, Protocol):
    """A tracker outside of the folder of the run."""

    id: str  # of the run in the service


# Each opens a tracker from the experiment, the folder of the run, and the id of a run that continues.
SERVICES: dict[str, Callable[[Experiment, Path, str | None], Service]] = {
    "wandb": WandB,
    "mlflow": MLflow,
}


def opened_trackers(experiment: Experiment, folder: Path) -> list[Tracker]:
    """Open the trackers in ``experiment.loggers`` for the run in ``folder``.

    The name of the run is the name of its folder, and its group is the name of the experiment. The
    config contains the seed.

    Args:
      experiment: experiment of the run.
      folder: folder of the run.

    Raises:
      UserError: the package of a tracker is not installed, or its service refuses the run, for
        example because of a missing key.
    """
    for name in experiment.loggers:
        if find_spec(name) is None:
            raise UserError(
                f"loggers={name} needs the package {name}: run pip install -e '.[{name}]' in a clone of jaxgrow"
            )
    file = folder / IDS
    ids = {}
    if os.path.lexists(file):
        ids = read_record(
            file, f"delete it; a new run then starts in {', '.join(experiment.loggers)}"
        )
    found: list[Tracker] = []
    for name in experiment.loggers:
        try:
            tracker = SERVICES[name](experiment, folder, ids.get(name))
        except Exception as error:  # each service has its own exceptions
            why = " ".join(str(error).split())
            raise UserError(
                f"loggers={name} cannot be opened ({type(error).__name__}: {why}); correct the settings of this service, or "
                "leave it out of loggers"
            ) from error
        ids[name] = tracker.id
        found.append(tracker)
    if found:
        write_record(file, ids)
    return found


TRACKERS.add("services", opened_trackers)
