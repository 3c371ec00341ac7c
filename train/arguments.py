"""The arguments of the commands ``python -m train.X``.

Help and wrong arguments do not wait for JAX: this module imports nothing that imports it.
`train` parses the arguments before it imports the module of the command.
"""

import ast
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from jaxgrow.cli.methods import EXPERTS, METHODS
from jaxgrow.typed import nearest
from train.common.commands import Parser, config_text
from train.common.errors import UserError
from train.config.overrides import listed_values, numbers, seed_list
from train.extras.aot.machines import CHIPS, parsed_machine

_CONFIG = "FILE.py:NAME, or FILE.py with config() -> Experiment"
_TRAIN = Path(__file__).parent


def command_parser(command: str) -> Parser:
    """Return the parser of ``python -m train.COMMAND``; the module's docstring describes it."""
    text = (_TRAIN / f"{command}.py").read_text(encoding="utf-8")
    parser = Parser(command, ast.get_docstring(ast.parse(text)))
    COMMANDS[command](parser)
    return parser


def check_arguments() -> None:
    """Parse the arguments of this process, ``python -m train.X ..``, before its module is imported.

    Modules in folders, which are not commands, are left to Python.

    Raises:
      UserError: the command does not exist, or an argument is wrong.
    """
    # At this moment, Python has replaced `-m train.X` in sys.argv by `-m`.
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    package, _, command = module.partition(".")
    if command in COMMANDS:
        command_parser(command).parse_args()
    elif package == "train" and "." not in command:
        every = [f"train.{name}" for name in COMMANDS]
        near = nearest(module, every) or f"; the commands are {', '.join(every)}"
        raise UserError(f"{module} is not a command{near}")


def fraction_of(text: str, option: str) -> float:
    """Return the fraction of the steps that an option names.

    Raises:
      UserError: it is not a number between 0 and 1.
    """
    found = numbers(text, float, option)
    if len(found) != 1 or not 0 < found[0] < 1:
        raise UserError(f"{option} takes fractions between 0 and 1, not {text}")
    return found[0]


def _for_advise(parser: Parser) -> None:
    parser.add_config("a training from scratch: FILE.py:NAME, or FILE.py")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="FLOPS",
        help="compute budget (default: the FLOPs of the config's steps)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run a pilot, which measures how far a grown model is behind",
    )
    parser.add_argument(
        "--workdir", type=Path, default=Path("runs/advise"), help="folder of the pilot's runs"
    )
    parser.add_argument(
        "--write",
        type=_new_config,
        metavar="FILE.py",
        help="write the advised config to this file (default: none)",
    )
    parser.add_set()


def _new_config(text: str) -> Path:
    if not text.endswith(".py"):
        raise UserError(f"--write takes the name of a config file, FILE.py, not {text}")
    return Path(text)


def _for_compare(parser: Parser) -> None:
    parser.add_argument(
        "configs",
        nargs="+",
        type=config_text,
        help="FILE.py[:NAME], with individual settings :a.b=c ...; the first config is the baseline",
    )
    _add_seeds(parser, "config")
    parser.add_argument(
        "--frontier",
        type=_frontier,
        default="",
        help="fractions of the steps of the baseline, such as 0.4,0.75:a.b=c (default: none)",
    )
    parser.add_workdir("runs")
    parser.add_argument(
        "--evaluate", default="", metavar="A,B", help="tasks of train.evaluate (default: none)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the files of these tasks (default: the working directory)",
    )
    parser.add_argument(
        "--finetune",
        action="append",
        type=lambda text: config_text(text, "FineTuning"),
        default=[],
        metavar="CONFIG",
        help="a config of train.finetune (default: none)",
    )
    parser.add_set("override fields of every config")
    parser.checks.append(_data_of_tasks)


def _data_of_tasks(a: Namespace) -> None:
    if a.data is not None and not a.evaluate:
        raise UserError(
            f"--data {a.data} has no effect without --evaluate: name the tasks with --evaluate, or leave out --data"
        )


def _frontier(text: str) -> list[tuple[float, list[str]]]:
    """Read the fractions of ``--frontier``, each with its settings."""
    found = []
    for fraction, *settings in (part.split(":") for part in text.split(",") if part):
        if not fraction:
            raise UserError(f"--frontier {text} has settings without a fraction; write 0.4:a.b=c")
        found.append((fraction_of(fraction, "--frontier"), settings))
    return found


def _for_evaluate(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--tasks",
        required=True,
        type=_tasks,
        metavar="A,B",
        help="names of tasks or files, such as wikitext2,lambada_openai",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the files of the tasks (default: the working directory; lm-eval downloads)",
    )
    parser.add_tokenizer()
    parser.add_argument(
        "--stride",
        type=int,
        help="number of tokens between windows over a text (default: the context length)",
    )
    _add_harness(parser)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write all numbers to this file (default: none)",
    )


def _tasks(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise UserError("--tasks names no task; give at least one, such as wikitext2")
    return names


def _add_harness(parser: Parser) -> None:
    """Add the options for tasks of lm-eval."""
    parser.add_argument(
        "--few-shot",
        type=int,
        metavar="N",
        help="number of examples before each question of lm-eval (default: the setting of the task)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="maximum number of questions of each task of lm-eval (default: all)",
    )
    parser.add_argument(
        "--include",
        type=Path,
        metavar="DIR",
        help="folder of YAML files with more tasks for lm-eval (default: none)",
    )


def _for_finetune(parser: Parser) -> None:
    parser.add_config("FILE.py:NAME, such as configs/finetune.py:sst2", "FineTuning")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--lr",
        type=lambda text: numbers(text, float, "--lr"),
        default="",
        help="peak learning rates, such as 1e-5,2e-5 (default: from the config)",
    )
    parser.add_argument(
        "--seeds", type=seed_list, help="seeds, such as 0,1,2 (default: from the config)"
    )
    parser.add_workdir("runs/finetune")
    parser.add_set()


def _for_generate(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        required=True,
        metavar="TEXT",
        help="texts to continue; with -, each line of stdin is a prompt",
    )
    _add_sampling(parser)
    _add_texts(parser)
    parser.checks.append(_one_stream)


def _add_sampling(parser: Parser) -> None:
    """Add the options that choose the new tokens."""
    parser.add_argument(
        "--max-new",
        type=int,
        default=200,
        metavar="N",
        help="maximum number of new tokens of each text",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="sample tokens; values below 1 prefer likely tokens (default: take the most likely token)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help="sample from the N most likely tokens (default: from all tokens)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most likely tokens with total probability P (default: from all tokens)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from the tokens with at least P times the probability of the most likely one (default: from all tokens)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="make tokens that are already in the text less likely; 1.1 is usual (default: no penalty)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling")


def _add_texts(parser: Parser) -> None:
    """Add the options for the form and the number of the texts."""
    parser.add_argument(
        "--stop",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="strings that end a text (default: none)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put each prompt, a user message, into the chat template of the model",
    )
    parser.add_argument(
        "--cut",
        action="store_true",
        help="remove the beginning of a prompt that does not fit into the context",
    )
    parser.add_argument(
        "--stream", action="store_true", help="print the text while it is generated"
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="number of continuations of each prompt"
    )
    parser.add_tokenizer()
    parser.add_argument("--json", action="store_true", help="print a JSON object for each sample")


def _one_stream(a: Namespace) -> None:
    if a.samples < 1:
        raise UserError(f"--samples is {a.samples}, but must be at least 1")
    if a.samples > 1 and a.temperature is None:
        raise UserError(
            f"--samples {a.samples} without --temperature gives the same text each time; give --temperature, such as 1"
        )
    if a.stream and (len(a.prompt) > 1 or a.samples > 1 or a.json):
        raise UserError(
            "--stream prints one text while it is generated: give one --prompt, without --samples and --json"
        )


def _for_ligo_maps(parser: Parser) -> None:
    parser.add_argument("file", type=Path, help="file maps.npz of a run")
    parser.add_argument(
        "--plot", type=Path, help="file for a figure of the maps (default: no figure)"
    )
    parser.add_argument(
        "--apply",
        type=Path,
        metavar="MODEL",
        help="run or checkpoint that the maps grow (default: none)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="new Orbax folder for the grown model, required with --apply (default: none)",
    )
    parser.checks.append(_apply_with_out)


def _apply_with_out(a: Namespace) -> None:
    if (a.apply is None) != (a.out is None):
        raise UserError(
            "--apply and --out must be given together: the model to grow, and the folder for the result"
        )


def _for_predict(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="folder of a finished fine-tuning")
    parser.add_argument("file", type=Path, help="table of texts")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file for the predictions (default: the terminal)"
    )


def _for_preflight(parser: Parser) -> None:
    parser.add_argument(
        "configs",
        nargs="+",
        type=config_text,
        metavar="CONFIG",
        help="FILE.py:NAME or FILE.py; settings follow after more colons: FILE.py:NAME:batch=16",
    )
    parser.add_argument(
        "--on",
        required=True,
        type=_machine,
        metavar="KIND:SIZE",
        help=f"machine, such as h100:8 or v5e:2x4; KIND is one of {', '.join(CHIPS)}",
    )
    parser.add_set("override fields of every config")
    parser.add_argument(
        "--utilisation", type=float, default=0.4, help="assumed fraction of the devices' peak"
    )
    parser.add_argument(
        "--json", type=Path, help="also write all numbers to this file (default: none)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        help="also write a figure of the memory of each program (default: none)",
    )
    parser.checks.append(_utilisation)


def _machine(text: str) -> str:
    parsed_machine(text)
    return text


def _utilisation(a: Namespace) -> None:
    if not 0 < a.utilisation <= 1:
        raise UserError(
            f"--utilisation must be greater than 0 and at most 1, but is {a.utilisation}"
        )


def _for_pretrain(parser: Parser) -> None:
    parser.add_argument("config", help=_CONFIG)
    parser.add_argument(
        "--workdir", help="folder of the run (default: runs/NAME, with the name of the experiment)"
    )
    parser.add_set()
    parser.add_argument(
        "--from",
        dest="start",
        metavar="RUN[@STEP]",
        help="folder of another run, finished or not, from whose checkpoint of this step of the run the new run starts "
        "(default: none; without @STEP, the newest checkpoint)",
    )
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="number of steps to trace for xprof and Perfetto, in the folder profile of the run",
    )
    parser.add_argument(
        "--show", action="store_true", help="print all fields of the experiment, and run nothing"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the experiments of the file, and run nothing"
    )
    _add_processes(parser)
    parser.checks += [_listed_or_one, _profile]


def _listed_or_one(a: Namespace) -> None:
    if not a.list:
        config_text(a.config)


def _add_processes(parser: Parser) -> None:
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0 with a free port, for several processes (default: found by JAX)",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (default: found by JAX)"
    )
    parser.add_argument(
        "--process",
        type=int,
        metavar="I",
        help="index of this process, from 0 (default: found by JAX)",
    )


def _profile(a: Namespace) -> None:
    if a.profile < 0:
        raise UserError(f"--profile must be a number of steps, 0 or more, but is {a.profile}")


def _for_race(parser: Parser) -> None:
    parser.add_config("config of the large model: FILE.py:NAME, or FILE.py")
    parser.add_argument("run", type=Path, help="folder of a finished run of the small model")
    names = ", ".join(sorted(METHODS.keys() - EXPERTS))
    parser.add_argument(
        "--by",
        type=_operators,
        help=f"operators, of {names}, ligo (default: some that can reach the sizes)",
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="training steps after growing, at least 20"
    )
    _add_seeds(parser, "operator")
    parser.add_workdir("runs/race")
    parser.add_set()
    parser.checks.append(_race_steps)


def _operators(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise UserError("--by names no operator; give at least one, such as stack")
    return names


def _race_steps(a: Namespace) -> None:
    if a.steps < 20:
        raise UserError(f"--steps must be at least 20, but is {a.steps}")


def _for_scaling(parser: Parser) -> None:
    parser.add_argument(
        "comparisons",
        nargs="+",
        metavar="RUN=compare.json",
        help="name of the recipe, and the file of its comparison",
    )
    parser.add_argument(
        "--at",
        type=_extrapolated,
        metavar="PARAMETERS:TOKENS",
        help="size to extrapolate to (default: none)",
    )
    parser.checks.append(_each_once)


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


def _for_show(parser: Parser) -> None:
    parser.add_argument(
        "plans",
        nargs="+",
        metavar="CONFIG|RUN",
        help="FILE.py:NAME, or the folder of a finished run",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the figure: .png, .svg or .pdf (default: no figure)",
    )


def _for_sweep(parser: Parser) -> None:
    parser.add_config(_CONFIG)
    parser.add_set("values of a field to try", "a.b=c,d,..")
    parser.add_argument(
        "--frontier",
        type=lambda text: fraction_of(text, "--frontier"),
        help="fraction of the config's steps (default: all of them)",
    )
    _add_seeds(parser, "combination")
    parser.add_argument(
        "--halving",
        type=_halving,
        default="",
        help="increasing fractions of the steps; the better half is kept after each (default: no shorter runs)",
    )
    parser.add_workdir("runs/sweep")
    parser.checks.append(_list_values)


def _list_values(a: Namespace) -> None:
    a.set = listed_values(a.set)


def _halving(text: str) -> list[float]:
    found = [fraction_of(part, "--halving") for part in text.split(",") if part]
    if found != sorted(set(found)):
        raise UserError(f"--halving takes increasing fractions, such as 0.25,0.5, not {text}")
    return found


def _for_tokenizer(parser: Parser) -> None:
    parser.add_config(_CONFIG)
    parser.add_argument("--vocab", type=int, required=True, metavar="N", help="vocabulary size")
    parser.add_argument(
        "--out",
        type=_new_file,
        required=True,
        metavar="FILE",
        help="new file, such as tokenizer.json",
    )
    parser.add_set()


def _new_file(text: str) -> Path:
    if Path(text).exists():
        raise UserError(f"{text} exists already; give another --out")
    return Path(text)


def _for_variance(parser: Parser) -> None:
    parser.add_argument(
        "baseline", type=Path, help="work directory of a run without layer dropping"
    )
    parser.add_argument(
        "dropped", type=Path, help="work directory of the same run with layer dropping"
    )


def _add_seeds(parser: Parser, each: str) -> None:
    about = f"seeds of each {each}, such as 0,1,2 or 0-2"
    parser.add_argument("--seeds", type=seed_list, default="0", help=about)


COMMANDS: dict[str, Callable[[Parser], None]] = {
    "advise": _for_advise,
    "compare": _for_compare,
    "evaluate": _for_evaluate,
    "finetune": _for_finetune,
    "generate": _for_generate,
    "ligo_maps": _for_ligo_maps,
    "predict": _for_predict,
    "preflight": _for_preflight,
    "pretrain": _for_pretrain,
    "race": _for_race,
    "scaling": _for_scaling,
    "show": _for_show,
    "sweep": _for_sweep,
    "tokenizer": _for_tokenizer,
    "variance": _for_variance,
}
