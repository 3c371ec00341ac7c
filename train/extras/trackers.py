"""Weights & Biases and MLflow as trackers of a run."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from train.config.experiment import Experiment, experiment_json
from train.store.trackers import PROJECT, TRACKERS


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
    found: dict[str, object] = {}
    for key, value in node.items():
        found |= flat_settings(value, f"{name}.{key}".lstrip("."))
    return found


TRACKERS.add("wandb", WandB)
TRACKERS.add("mlflow", MLflow)
