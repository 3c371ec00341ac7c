"""LoRA in a plan: a phase that trains an adapter of a model that stands still, and one that merges it into the model.

The adapter is saved with the run, to be kept where its model is known, or grown with it (`jaxgrow.lora`).
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgrow import flops, lora
from jaxgrow.axes import Params
from jaxgrow.lora import LoRA
from jaxgrow.models import Config, from_json
from train.errors import UserError
from train.files import appears_whole
from train.plan.phase import Context, Models
from train.plan.training import Train
from train.plan.transforms import Transform
from train.state.heads import split
from train.state.made import ByLoRA
from train.state.model import Model, plain


@dataclass(frozen=True)
class Adapt(Train):
    """Trains a LoRA of the model ``name``, and its head; only these have gradients and optimizer state."""

    lora: LoRA = field(default_factory=LoRA)
    fixed_flops = 0.0  # type: ignore[assignment]  # Muon is for the matrices of the layers, which stand still here

    def __post_init__(self):
        super().__post_init__()
        if heads := split({module.partition("/")[0]: 0 for module in lora.kernels(self.lora, self.config.axes())})[1]:
            raise ValueError(
                f"the LoRA is for {', '.join(heads)}, but a head trains as it is: leave it out of its targets"
            )

    def flops(self, tokens: int, layers: float | None = None) -> float:
        return flops.train(self.config, tokens, self.positions, layers, lora=self.lora, **self._savings)

    def start(self, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> Model:
        model = models[self.name]
        if model.made is None:
            body, head = split(model.params)
            adapter = lora.init(self.lora, split(self.config.axes())[0], self.config.sizes(), key)
            model = Model(adapter | head, None, self.config, model.sensitivity, body, ByLoRA(self.lora))
        return model if model.opt is not None else replace(model, opt=tx.init(model.params))

    def run(self, context: Context) -> Model:
        model = super().run(context)
        context.keep("lora.npz", lambda path: save(path, self, split(model.params)[0]))
        return model


@dataclass(frozen=True)
class Merge(Transform):
    """The model ``name``, with the LoRA that an `Adapt` left in it merged into its kernels."""

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def writes(self) -> str:
        return self.name

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        model = models[self.name]
        return Model(plain(model), None, model.config)


class Adapter(NamedTuple):
    """What a run saves of its LoRA, without the head."""

    config: Config  # of the model
    lora: LoRA
    params: Params  # as of `jaxgrow.lora.init`


def save(path: Path, phase: Adapt, adapter: Params) -> None:
    """Writes the adapter of an `Adapt`; the file appears whole or not at all."""
    about = {"model": phase.config.as_json(), "lora": asdict(phase.lora)}
    flat: dict[str, Any] = {"about": json.dumps(about)}
    flat |= {"/".join(key): np.asarray(x) for key, x in flatten_dict(adapter).items()}
    with appears_whole(path) as part, part.open("wb") as file:
        np.savez(file, **flat)


def load(path: Path) -> Adapter:
    """The adapter that `save` wrote.

    Raises:
      UserError: the file is missing, damaged, or holds something else.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        own = about["lora"]
        params = unflatten_dict(arrays, sep="/")
        return Adapter(from_json(about["model"]), LoRA(**own | {"targets": tuple(own["targets"])}), params)
    except FileNotFoundError:
        raise UserError(f"there is no LoRA in {path}; a run that trains one writes lora.npz") from None
    except Exception as error:
        raise UserError(f"{path} holds no LoRA that can be read: {type(error).__name__}: {error}") from error
