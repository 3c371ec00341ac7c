"""The arguments of the extra commands, and what extras add to the arguments of the core.

Nothing here imports JAX, because help and wrong arguments do not wait for it.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxgrow.cli.methods import EXPERTS, METHODS
from train.arguments import COMMANDS, CONFIG, MORE, fraction_of, seeds_argument
from train.common.commands import Arguments, argument, config_text, set_argument, workdir_argument
from train.common.errors import UserError
from train.config.overrides import number_list, seed_list
from train.extras.aot.machines import CHIPS, parsed_machine

TOKENIZER = argument(
    "--tokenizer", help="tokenizer.json, a folder, or bytes (default: the tokenizer of MODEL)"
)


# What a race decides, by the settings of its config that it replaces.
_OF_THE_RACE = {
    **dict.fromkeys(("steps", "epochs", "seconds"), "--steps"),
    **dict.fromkeys(("optim.schedule", "optim.decay", "optim.floor"), "constant learning rate"),
    **{"seed": "--seeds", "eval_every": "evaluations", "name": "names"},
}


def _new_config(text: str) -> Path:
    if not text.endswith(".py"):
        raise UserError(f"--write takes the name of a config file, FILE.py, not {text}")
    return Path(text)


def _data_of_tasks(a: Namespace, option: str) -> None:
    tasks = getattr(a, option.removeprefix("--"))
    if a.data is not None and all(Path(name).is_file() for name in tasks):
        raise UserError(
            f"--data {a.data} has no effect without a task with a name, such as wikitext2: name one with {option}, or "
            "leave out --data"
        )


def _names(text: str, option: str, kind: str = "task", example: str = "wikitext2") -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise UserError(f"{option} names no {kind}; give at least one, such as {example}")
    return names


def _one_stream(a: Namespace) -> None:
    if a.samples < 1:
        raise UserError(f"--samples is {a.samples}, but must be at least 1")
    if a.samples > 1 and a.temperature is None:
        raise UserError(
            f"--samples {a.samples} without --temperature gives the same text each time; give --temperature, such as 1"
        )
    if a.seed and a.temperature is None:
        raise UserError(
            f"--seed {a.seed} has no effect without --temperature, because the most likely token is taken each time; give "
            "--temperature, such as 1, or leave out --seed"
        )
    if a.stream and (len(a.prompt) > 1 or a.samples > 1 or a.json):
        raise UserError(
            "--stream prints one text while it is generated: give one --prompt, without --samples and --json"
        )


def _apply_with_out(a: Namespace) -> None:
    if (a.apply is None) != (a.out is None):
        raise UserError(
            "--apply and --out must be given together: the model to grow, and the folder for the result"
        )


def _machine(text: str) -> str:
    parsed_machine(text)
    return text


def _utilisation(a: Namespace) -> None:
    if not 0 < a.utilisation <= 1:
        raise UserError(
            f"--utilisation must be greater than 0 and at most 1, but is {a.utilisation}"
        )


def _race_settings(a: Namespace) -> None:
    if a.steps < 20:
        raise UserError(f"--steps must be at least 20, but is {a.steps}")
    for setting in [*a.set, *a.config.split(":")[1:]]:
        name = setting.partition("=")[0]
        if name in _OF_THE_RACE or name.startswith("method."):
            raise UserError(
                f"{setting} has no effect on a race, which has its own {_OF_THE_RACE.get(name, 'method')}: leave it out"
            )


def _extrapolated(text: str) -> tuple[float, float]:
    try:
        parameters, tokens = map(float, text.split(":"))
    except ValueError:
        parameters = tokens = 0.0
    if not (0 < parameters < math.inf and 0 < tokens < math.inf):
        raise UserError(
            f"--at takes parameters and tokens per parameter, such as 1e9:20, not {text}"
        )
    return parameters, tokens


def _each_once(a: Namespace) -> None:
    pairs = [text.partition("=") for text in a.comparisons]
    if len({(name, Path(path).resolve()) for name, _, path in pairs}) < len(pairs):
        raise UserError(
            "a comparison is given twice, so its seeds would be counted twice; give each comparison once"
        )


def _list_values(a: Namespace) -> None:
    a.set = listed_values(a.set)


def _equal_time(a: Namespace) -> None:
    if a.seconds is None:
        return
    lengths = [s for s in a.set if s.partition("=")[0] in ("steps", "epochs", "seconds")]
    if lengths:
        raise UserError(
            f"--seconds {a.seconds:g} and --set {lengths[0]} both set the length of the runs: leave out one of them"
        )
    a.set = [*a.set, f"seconds={a.seconds}"]


def _halving(text: str) -> list[float]:
    found = [fraction_of(part, "--halving") for part in text.split(",") if part]
    if found != sorted(set(found)):
        raise UserError(f"--halving takes increasing fractions, such as 0.25,0.5, not {text}")
    return found


def _new_file(text: str) -> Path:
    if Path(text).expanduser().exists():
        raise UserError(f"{text} exists already; give another --out")
    return Path(text)


def config_argument(help: str, kind: str = "Experiment"):
    """Declare the positional argument ``config``, which names a function that returns a ``kind``."""
    return argument("config", type=partial(config_text, kind=kind), help=help)


MORE.add(
    "compare",
    Arguments(
        (
            argument(
                "--seconds",
                type=float,
                metavar="S",
                help="seconds of training on this machine (default: the steps of each config)",
            ),
            argument(
                "--evaluate",
                type=partial(_names, option="--evaluate"),
                default=(),
                metavar="A,B",
                help="tasks of train.evaluate (default: none)",
            ),
            argument(
                "--data",
                type=Path,
                metavar="DIR",
                help="folder of the files of these tasks (default: the working directory)",
            ),
            argument(
                "--finetune",
                action="append",
                type=lambda text: config_text(text, "FineTuning"),
                default=[],
                metavar="CONFIG",
                help="a config of train.finetune (default: none)",
            ),
        ),
        (partial(_data_of_tasks, option="--evaluate"), _equal_time),
    ),
)
_EXTRA_COMMANDS = {
    "advise": Arguments(
        (
            config_argument("a training from scratch: FILE.py:NAME, or FILE.py"),
            argument(
                "--budget",
                type=float,
                metavar="FLOPS",
                help="compute budget (default: the FLOPs of the config's steps)",
            ),
            argument(
                "--measure",
                action="store_true",
                help="run a pilot of at most 3 %% of the budget, which measures how far a grown model is behind",
            ),
            argument(
                "--workdir",
                type=Path,
                default=Path("runs/advise"),
                help="folder of the pilot's runs",
            ),
            argument(
                "--write",
                type=_new_config,
                metavar="FILE.py",
                help="write the advised config to this file (default: none)",
            ),
            set_argument(),
        ),
    ),
    "evaluate": Arguments(
        (
            argument("model", type=Path, help="folder of the model"),
            argument(
                "--tasks",
                required=True,
                type=partial(_names, option="--tasks"),
                metavar="A,B",
                help="names of tasks or files, such as wikitext2,lambada_openai",
            ),
            argument(
                "--data",
                type=Path,
                metavar="DIR",
                help="folder of the files of the tasks (default: the working directory; lm-eval downloads)",
            ),
            TOKENIZER,
            argument(
                "--stride",
                type=int,
                help="number of tokens between windows over a text (default: the context length)",
            ),
            argument(
                "--few-shot",
                type=int,
                metavar="N",
                help="number of examples before each question of lm-eval (default: the setting of the task)",
            ),
            argument(
                "--limit",
                type=int,
                metavar="N",
                help="maximum number of questions of each task of lm-eval (default: all)",
            ),
            argument(
                "--include",
                type=Path,
                metavar="DIR",
                help="folder of YAML files with more tasks for lm-eval (default: none)",
            ),
            argument(
                "--json",
                type=Path,
                metavar="FILE",
                help="also write all numbers to this file (default: none)",
            ),
        ),
        (partial(_data_of_tasks, option="--tasks"),),
    ),
    "finetune": Arguments(
        (
            config_argument("FILE.py:NAME, such as configs/finetune.py:sst2", "FineTuning"),
            argument("--model", type=Path, required=True, help="folder of the model"),
            argument(
                "--lr",
                type=lambda text: number_list(text, float, "--lr"),
                default="",
                help="peak learning rates, such as 1e-5,2e-5 (default: from the config)",
            ),
            argument(
                "--seeds", type=seed_list, help="seeds, such as 0,1,2 (default: from the config)"
            ),
            workdir_argument("runs/finetune"),
            set_argument(),
        ),
    ),
    "generate": Arguments(
        (
            argument("model", type=Path, help="folder of the model"),
            argument(
                "--prompt",
                nargs="+",
                action="extend",
                required=True,
                metavar="TEXT",
                help="texts to continue; with -, each line of stdin is a prompt",
            ),
            argument(
                "--max-new",
                type=int,
                default=200,
                metavar="N",
                help="maximum number of new tokens of each text",
            ),
            argument(
                "--temperature",
                type=float,
                help="sample tokens; values below 1 prefer likely tokens (default: take the most likely token)",
            ),
            argument(
                "--top-k",
                type=int,
                metavar="N",
                help="sample from the N most likely tokens (default: from all tokens)",
            ),
            argument(
                "--top-p",
                type=float,
                metavar="P",
                help="sample from the most likely tokens with total probability P (default: from all tokens)",
            ),
            argument(
                "--min-p",
                type=float,
                metavar="P",
                help="sample from the tokens with at least P times the probability of the most likely one "
                "(default: from all tokens)",
            ),
            argument(
                "--repetition-penalty",
                type=float,
                metavar="X",
                help="make tokens that are already in the text less likely; 1.1 is usual (default: no penalty)",
            ),
            argument("--seed", type=int, default=0, help="random seed for sampling"),
            argument(
                "--stop",
                nargs="+",
                action="extend",
                default=[],
                metavar="TEXT",
                help="strings that end a text (default: none)",
            ),
            argument(
                "--chat",
                action="store_true",
                help="put each prompt, a user message, into the chat template of the model",
            ),
            argument(
                "--cut",
                action="store_true",
                help="remove the beginning of a prompt that does not fit into the context",
            ),
            argument("--stream", action="store_true", help="print the text while it is generated"),
            argument(
                "--samples",
                type=int,
                default=1,
                metavar="N",
                help="number of continuations of each prompt",
            ),
            TOKENIZER,
            argument("--json", action="store_true", help="print a JSON object for each sample"),
        ),
        (_one_stream,),
    ),
    "ligo_maps": Arguments(
        (
            argument("file", type=Path, help="file maps.npz of a run"),
            argument(
                "--plot", type=Path, help="file for a figure of the maps (default: no figure)"
            ),
            argument(
                "--apply",
                type=Path,
                metavar="MODEL",
                help="run or checkpoint that the maps grow (default: none)",
            ),
            argument(
                "--out",
                type=Path,
                help="new Orbax folder for the grown model, required with --apply (default: none)",
            ),
        ),
        (_apply_with_out,),
    ),
    "predict": Arguments(
        (
            argument("run", type=Path, help="folder of a finished fine-tuning"),
            argument("file", type=Path, help="table of texts"),
            argument(
                "--out",
                type=Path,
                metavar="FILE",
                help="file for the predictions (default: the terminal)",
            ),
        ),
    ),
    "preflight": Arguments(
        (
            argument(
                "configs",
                nargs="+",
                type=config_text,
                metavar="CONFIG",
                help="FILE.py:NAME or FILE.py; settings follow after more colons: FILE.py:NAME:batch=16",
            ),
            argument(
                "--on",
                required=True,
                type=_machine,
                metavar="KIND:SIZE",
                help=f"machine, such as h100:8 or v5e:2x4; KIND is one of {', '.join(CHIPS)}",
            ),
            set_argument("override fields of every config"),
            argument(
                "--utilisation",
                type=float,
                default=0.4,
                help="assumed fraction of the devices' peak",
            ),
            argument(
                "--json", type=Path, help="also write all numbers to this file (default: none)"
            ),
            argument(
                "--plot",
                type=Path,
                help="also write a figure of the memory of each program (default: none)",
            ),
        ),
        (_utilisation,),
    ),
    "race": Arguments(
        (
            config_argument("config of the large model: FILE.py:NAME, or FILE.py"),
            argument("run", type=Path, help="folder of a finished run of the small model"),
            argument(
                "--by",
                type=partial(_names, option="--by", kind="operator", example="stack"),
                help=f"operators, of {', '.join(sorted(METHODS.keys() - EXPERTS))}, ligo "
                "(default: some that can reach the sizes)",
            ),
            argument(
                "--steps", type=int, default=200, help="training steps after growing, at least 20"
            ),
            seeds_argument("operator"),
            workdir_argument("runs/race"),
            set_argument(),
        ),
        (_race_settings,),
    ),
    "scaling": Arguments(
        (
            argument(
                "comparisons",
                nargs="+",
                metavar="RUN=compare.json",
                help="name of the recipe, and the file of its comparison",
            ),
            argument(
                "--at",
                type=_extrapolated,
                metavar="PARAMETERS:TOKENS",
                help="size to extrapolate to (default: none)",
            ),
        ),
        (_each_once,),
    ),
    "show": Arguments(
        (
            argument(
                "plans",
                nargs="+",
                metavar="CONFIG|RUN",
                help="FILE.py:NAME, or the folder of a finished run",
            ),
            argument(
                "--out",
                type=Path,
                metavar="FILE",
                help="file for the figure: .png, .svg or .pdf (default: no figure)",
            ),
        ),
    ),
    "sweep": Arguments(
        (
            config_argument(CONFIG),
            set_argument("values of a field to try", "a.b=c,d,.."),
            argument(
                "--frontier",
                type=lambda text: fraction_of(text, "--frontier"),
                help="fraction of the config's steps (default: all of them)",
            ),
            seeds_argument("combination"),
            argument(
                "--halving",
                type=_halving,
                default="",
                help="increasing fractions of the steps; the better half is kept after each (default: no shorter runs)",
            ),
            workdir_argument("runs/sweep"),
        ),
        (_list_values,),
    ),
    "tokenizer": Arguments(
        (
            config_argument(CONFIG),
            argument("--vocab", type=int, required=True, metavar="N", help="vocabulary size"),
            argument(
                "--out",
                type=_new_file,
                required=True,
                metavar="FILE",
                help="new file, such as tokenizer.json",
            ),
            set_argument(),
        ),
    ),
    "variance": Arguments(
        (
            argument("baseline", type=Path, help="work directory of a run without layer dropping"),
            argument(
                "dropped", type=Path, help="work directory of the same run with layer dropping"
            ),
        ),
    ),
}
for _command, _declared in _EXTRA_COMMANDS.items():
    COMMANDS.add(_command, _declared)


def listed_values(settings: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting.

    The result is ``{"optim.peak_lr": ["5e-3", "1e-2"]}`` for ``["optim.peak_lr=5e-3,1e-2"]``.

    Raises:
      UserError: there are no settings, or a setting has no values.
    """
    found: dict[str, list[str]] = {}
    for name, _, values in (text.partition("=") for text in settings):
        found.setdefault(name, []).extend(filter(None, _split_values(values)))
    listed = {name: list(dict.fromkeys(values)) for name, values in found.items()}
    if not listed or not all(listed.values()):
        raise UserError(
            "a sweep needs --set with a field and values, such as optim.peak_lr=5e-3,1e-2"
        )
    return listed


def _split_values(values: str) -> list[str]:
    """Split a list at the commas outside brackets: ``["(1, 2)", "(2, 2)"]`` for ``"(1, 2),(2, 2)"``."""
    found = [""]
    depth = 0
    for letter in values:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]
