"""What do ``--list`` and ``--show`` of `train.pretrain` print?"""

from argparse import Namespace
from dataclasses import MISSING, is_dataclass

from jaxgrow.tables import align_columns
from train.arguments import LISTINGS
from train.common.errors import UserError
from train.config.experiment import Experiment, listed_experiments, load_experiment
from train.config.overrides import all_settings


def listed_settings(arguments: Namespace) -> str:
    """Return the experiments of a config file, or all fields of one experiment."""
    if arguments.list:
        return experiment_list(arguments.config)
    return field_table(load_experiment(arguments.config, arguments.set, corpus=False))


def experiment_list(config: str) -> str:
    """Return the experiments of a config file, one in each line, as the command line names them.

    Raises:
      UserError: the file has no experiments.
    """
    path = config.partition(":")[0]
    found = listed_experiments(config)
    if not found:
        raise UserError(
            f"{path} has no experiments: functions whose return annotation is Experiment"
        )
    return align_columns(
        (),
        [(path if name == "config" else f"{path}:{name}", about) for name, about in found.items()],
    )


def field_table(experiment: Experiment) -> str:
    """Return a table of all fields: the name for ``--set``, the value, the default and the type."""
    rows = [
        (s.name, _as_setting(s.value), _as_setting(s.default), s.type)
        for s in all_settings(experiment)
    ]
    return align_columns(("setting", "value", "default", "type"), rows)


def _as_setting(value: object) -> str:
    """Write a value as for ``--set a.b=``.

    A dataclass is written by its name, because its fields have their own lines.
    """
    if value is MISSING:
        return "required"
    if is_dataclass(value):
        return type(value).__name__
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"({', '.join(map(_as_setting, value))})"
    return value if isinstance(value, str) else repr(value)


LISTINGS.add("settings", listed_settings)
