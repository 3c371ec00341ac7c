"""How does PEFT's ``adapter_config.json`` determine the modules that have a LoRA, and its rank?"""

import math
import re
from collections.abc import Iterable
from typing import Any

from jaxgrow.checkpoints.io.files import CheckpointError, read_json, spelt
from jaxgrow.extras.limited_process import run_limited
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, file_limits

# These keys describe the training or the origin of an adapter. They do not change its function.
WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
    "runtime_config",
    # These have an effect only with their initialisation.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
_READ = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("use_dora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "init_lora_weights"),
)
# With these initialisations the base model keeps its weights. All others subtract the initial
# product of the factors from the weights.
_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
# PEFT saves the heads of these tasks with the adapter, even if modules_to_save does not name them.
# The values are the kind of head and its modules.
_TASKS = {
    "SEQ_CLS": ("classes", ("classifier", "score")),
    "QUESTION_ANS": ("spans", ("qa_outputs",)),
}

# PEFT cannot merge these kinds of adapters into their models, nor LoRAs with these settings.
_NEVER_MERGED = {
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"),
    *("ADAPTION_PROMPT", "POLY", "XLORA", "SHADOW"),
    *("alora_invocation_tokens", "arrow_config", "layer_replication"),
}


class PeftSettings:
    """The content of an ``adapter_config.json``.

    ``spellings`` holds the names that the adapter has for modules, if the patterns of its settings
    may refer to them.

    Args:
      file: the file.

    Raises:
      CheckpointError: the adapter is not a LoRA, or has a setting that is not supported or a value
        of a wrong type.
    """

    def __init__(self, file: CheckedPath):
        self.file = file
        self._found: dict[tuple[str, str], str | None] = {}
        self.about: Json = read_json(file)
        self.spellings: dict[str, str] = {}
        self._check_initialisation()
        others = [
            k
            for k, v in self.about.items()
            if k not in WITHOUT_EFFECT + _READ and v and (k, v) != ("bias", "none")
        ]
        kind = self.about.get("peft_type")
        if kind != "LORA" or others:
            wrong = ", ".join(
                [f"peft_type {spelt(kind)}", *(f"{key} {spelt(self.about[key])}" for key in others)]
            )
            way_out = (
                "Merge it into its model with PEFT (merge_and_unload), and grow the merged model"
            )
            if _NEVER_MERGED & {str(kind), *others}:
                way_out = (
                    "PEFT cannot merge it either: grow the model alone, and train a new adapter"
                )
            raise CheckpointError(f"{file} is not a LoRA that can be read here: {wrong}. {way_out}")
        self.task = _TASKS.get(str(self.about.get("task_type")))
        self.saved_modules = (*self._names("modules_to_save"), *(self.task[1] if self.task else ()))
        self._rank = _positive_number(file, "r", self.about.get("r"), int)
        self._alpha = _positive_number(file, "lora_alpha", self.about.get("lora_alpha"))
        self._ranks = self._patterns("rank_pattern", int)
        self._alphas = self._patterns("alpha_pattern", int, float)
        self._targets = self._modules("target_modules")
        self._excluded = self._modules("exclude_modules")
        self._layers = self._indices()
        stacks = self.about.get("layers_pattern")
        names = (stacks,) if isinstance(stacks, str) else self._names("layers_pattern")
        self._stacks = [
            self._pattern("layers_pattern", name, r"(?:^|.*?\.)", r"\.(\d+)\.")
            for name in names or [_ANY_STACK]
        ]
        self._by_root = self._boolean("use_rslora")
        self.dora = self._boolean("use_dora")

    def learn(self, modules: Iterable[str]) -> None:
        """Match all expressions with all modules at once, in a process with limited time.

        An expression may never end.

        Raises:
          UntrustedError: an expression takes too much time.
        """
        patterns = {*self._ranks, *self._alphas, *(self._stacks if self._layers else ())}
        patterns |= {p for p in (self._targets, self._excluded) if isinstance(p, re.Pattern)}
        names = dict.fromkeys(modules)
        names |= dict.fromkeys(self.spellings.get(name, "") for name in list(names))
        ends = [of for of in (self._targets, self._excluded) if isinstance(of, tuple)]
        each = len(patterns) + sum(map(len, [*ends, self.saved_modules]))
        file_limits().check(f"{self.file}, for all modules,", entries=each * len(names))
        wanted = [(p.pattern, name) for p in patterns for name in names]
        wanted = [pair for pair in wanted if pair not in self._found]
        if wanted:
            what = f"{self.file}: an expression for modules"
            self._found |= dict(zip(wanted, run_limited(_MATCH, wanted, what), strict=True))

    def _match(self, pattern: re.Pattern[str], module: str) -> str | None:
        """The last group of a match at the beginning of a name; None if there is no match."""
        if (pattern.pattern, module) not in self._found:
            self.learn([module])
        return self._found[pattern.pattern, module]

    def _matches(self, of: re.Pattern[str] | tuple[str, ...], module: str) -> bool:
        """Whether a pattern matches a name, or one of the given names is its end."""
        if isinstance(of, re.Pattern):
            return self._match(of, module) is not None
        return any(f".{module}".endswith(f".{name}") for name in of)

    def rank(self, module: str) -> int:
        """Return the rank of the LoRA of a module."""
        ranks = (rank for pattern, rank in self._ranks.items() if self._matches(pattern, module))
        return next(ranks, self._rank)

    def scale(self, module: str) -> float:
        """Return the factor of the product of the factors of a module."""
        alphas = (
            alpha for pattern, alpha in self._alphas.items() if self._matches(pattern, module)
        )
        alpha = next(alphas, self._alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._by_root else rank)

    def targets(self, module: str) -> bool:
        """Whether a module of a layer has a LoRA."""
        return self._targets_named(module) or self._targets_named(self.spellings.get(module, ""))

    def _targets_named(self, module: str) -> bool:
        if self._matches(self._excluded, module) or self.saves(module):
            return False
        if isinstance(self._targets, re.Pattern) or not self._layers:
            return self._matches(self._targets, module)
        layers = (self._match(stack, module) for stack in self._stacks)
        layer = next(filter(None, layers), None)
        return (
            self._matches(self._targets, module)
            and layer is not None
            and int(layer) in self._layers
        )

    def saves(self, module: str) -> bool:
        """Whether the adapter holds a trained copy of the complete module."""
        return any(f".{name}." in f".{module}." for name in self.saved_modules)

    def _check_initialisation(self) -> None:
        how = self.about.get("init_lora_weights", True)
        if how not in _INITIALISATIONS:
            raise CheckpointError(
                f"{self.file}: init_lora_weights is {spelt(how)}. This method changes the weights of the base model before it "
                "trains, so the adapter alone does not contain the complete change. Convert the adapter with PEFT "
                "(save_pretrained with path_initial_model_for_weight_conversion), or merge it into its model "
                "(merge_and_unload)"
            )

    def _boolean(self, key: str) -> bool:
        value = self.about.get(key) or False
        if type(value) is not bool:
            raise CheckpointError(
                f"{self.file}: {key} is {spelt(value)}, but should be true or false"
            )
        return value

    def _patterns(self, key: str, *kinds: type) -> dict[re.Pattern[str], Any]:
        """Return the values of a key by the patterns that the ends of module names match."""
        found = self.about.get(key) or {}
        if not isinstance(found, dict):
            raise CheckpointError(
                f"{self.file}: {key} is {spelt(found)}, but should be an object of patterns and numbers"
            )
        return {
            self._pattern(key, pattern, r"(.*\.)?(", ")$"): _positive_number(
                self.file, f"{key}[{spelt(pattern)}]", value, *kinds
            )
            for pattern, value in found.items()
        }

    def _pattern(self, key: str, text: Any, before: str = "", after: str = "") -> re.Pattern[str]:
        try:
            re.compile(text)
            # Flags have to stay at the beginning.
            flags = re.match(r"(?:\(\?[aimsux]+\))?", text)
            start = flags[0] if flags else ""
            return re.compile(f"{start}{before}{text[len(start) :]}{after}")
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{self.file}: {key} has {spelt(text)}, which is not a regular expression: {error}"
            ) from None

    def _modules(self, key: str) -> re.Pattern[str] | tuple[str, ...]:
        """Return the modules of a key: a pattern of complete names, or the ends of names."""
        of = self.about.get(key)
        if isinstance(of, str):
            return self._pattern(key, ".*" if of == "all-linear" else of, "(?:", r")\Z")
        return self._names(key)

    def _names(self, key: str) -> tuple[str, ...]:
        names = self.about.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"{self.file}: {key} is {spelt(names)}, but should be a list of names"
            )
        return tuple(names)

    def _indices(self) -> frozenset[int]:
        """Return the layers that have a LoRA; an empty set means all layers."""
        found = self.about.get("layers_to_transform")
        layers = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(layer) is int for layer in layers):
            raise CheckpointError(
                f"{self.file}: layers_to_transform is {spelt(found)}, but should be a list of layer "
                "indices"
            )
        return frozenset(layers)


_ANY_STACK = r".*?\.[^.]*"
_MATCH = """
import re
def group(found):
    return None if found is None else next((g for g in reversed(found.groups()) if g), "")
print(json.dumps([group(re.match(*pair)) for pair in request["value"]]))
"""


def _positive_number(file: CheckedPath, key: str, value: Any, *kinds: type) -> Any:
    if type(value) not in (kinds or (int, float)) or not 0 < value < 1 << 31:
        raise CheckpointError(f"{file}: {key} is {spelt(value)}, but should be a positive number")
    return value
