"""Which settings of PEFT's ``adapter_config.json`` change the function of a LoRA?

The tensors of the file decide which modules have a LoRA, and its rank. The settings about them are
therefore not read, such as ``target_modules`` and ``rank_pattern``.
"""

import math
import re
from typing import TypeVar

from jaxgrow.checkpoints.io.files import CheckpointError, read_json, spelt
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath, file_limits

T = TypeVar("T")
# These keys describe the training or the origin of an adapter, or its tensors.
WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
    *("runtime_config", "r", "rank_pattern", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
    # These have an effect only with their initialisation.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
_READ = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "modules_to_save")
# With these initialisations the base model keeps its weights. All others subtract the initial
# product of the factors from the weights.
_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
# PEFT saves the heads of these tasks with the adapter, even if modules_to_save does not name them.
# The values are the kind of head and its modules.
_TASKS = {
    "SEQ_CLS": ("classes", ("classifier", "score")),
    "QUESTION_ANS": ("spans", ("qa_outputs",)),
}


class PeftSettings:
    """The content of an ``adapter_config.json``.

    ``task`` is the kind of head that the adapter holds and the names of its modules, or None.

    Args:
      file: the file.

    Raises:
      CheckpointError: the adapter is not a LoRA, or has a setting that is not supported or a value
        of a wrong type.
    """

    def __init__(self, file: CheckedPath):
        self.file = file
        self.about: Json = read_json(file)
        others = [
            key
            for key, value in self.about.items()
            if key not in WITHOUT_EFFECT + _READ and value and (key, value) != ("bias", "none")
        ]
        if self.about.get("init_lora_weights", True) in _INITIALISATIONS:
            others = [key for key in others if key != "init_lora_weights"]
        if others or self.about.get("peft_type") != "LORA":
            wrong = [f"{key} {spelt(self.about.get(key))}" for key in ("peft_type", *others)]
            raise CheckpointError(
                f"{file} is not a LoRA that can be read here: {', '.join(wrong)}. Merge it into its model with PEFT "
                "(merge_and_unload), and grow the merged model"
            )
        self.task = _TASKS.get(str(self.about.get("task_type")))
        saved = self._typed("modules_to_save", list, [])
        self._saved = (*map(str, saved), *(self.task[1] if self.task else ()))
        self.dora = self._typed("use_dora", bool, False)
        self._by_root = self._typed("use_rslora", bool, False)
        self._alphas: Json = {
            **self._typed("alpha_pattern", dict, {}),
            "": self.about.get("lora_alpha"),
        }
        # They are compared with the name of every module, of which a model has up to a thousand.
        file_limits().check(str(file), entries=1000 * (len(self._saved) + len(self._alphas)))
        for name, alpha in self._alphas.items():
            if type(alpha) not in (int, float) or not 0 < alpha < 1 << 31:
                key = f"alpha_pattern[{spelt(name)}]" if name else "lora_alpha"
                raise CheckpointError(
                    f"{file}: {key} is {spelt(alpha)}, but should be a positive number"
                )
            if not re.fullmatch(r"[\w.-]*", name):
                raise CheckpointError(
                    f"{file}: alpha_pattern has {spelt(name)}, but only names of modules are read. Merge the LoRA into its "
                    "model with PEFT (merge_and_unload), and grow the merged model"
                )

    def _typed(self, key: str, kind: type[T], default: T) -> T:
        value = self.about.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{self.file}: {key} is {spelt(value)}, but should be a {kind.__name__}"
            )
        return value

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of the product of the factors of a module."""
        alpha = next(
            a for name, a in self._alphas.items() if f".{module}".endswith(f".{name}") or not name
        )
        return alpha / (math.sqrt(rank) if self._by_root else rank)

    def saves(self, module: str) -> bool:
        """Whether the adapter holds a trained copy of the complete module."""
        return any(f".{name}." in f".{module}." for name in self._saved)
