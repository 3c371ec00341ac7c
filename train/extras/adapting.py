"""How does a plan train an adapter of a frozen model, and merge it into the model?

A LoRA is merged into the kernels. A bottleneck adapter cannot be merged, and stays in the model, as
its config records (`jaxgrow.extras.peft.adapters`). Both kinds are saved with the run. A saved
adapter can be stored for use with its model, grown with the model, or trained further.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgrow import typed
from jaxgrow.axes import Axes, Params, Tree
from jaxgrow.extras.peft import adapters, lora
from jaxgrow.extras.peft.adapter_flops import adapter_train_flops
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.models import Adapter, Config, from_json
from jaxgrow.optim import muon
from train.common.errors import UserError
from train.common.files import write_arrays
from train.extras.learned_maps import read_arrays
from train.plan.phase import Context, Models
from train.plan.training import Train
from train.plan.transforms import differing
from train.state.model import KeptFile, TrainState, plain, split_head


@dataclass(frozen=True)
class BesideLoRA:
    """LoRA: the adapter and the head are trained, and the body is frozen."""

    lora: LoRA

    def axes(self, config: Config) -> Axes:
        body, head = split_head(config.axes())
        return lora.lora_axes(self.lora, body) | head

    def base_axes(self, config: Config) -> Axes:
        return split_head(config.axes())[0]

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        adapter, head = split_head(trained)
        return lora.attach_lora(base | head, adapter, self.lora)

    def plain(self, config: Config, trained: Tree, base: Params) -> Params:
        adapter, head = split_head(trained)
        return lora.merge_lora(base | head, adapter, self.lora)

    def kept_file(self, model: TrainState) -> KeptFile:
        return _adapter_file("lora.npz", model, self.lora, split_head(model.params)[0])


@dataclass(frozen=True)
class BesideAdapters:
    """Bottleneck adapters: the adapters and the head are trained, and the body is frozen."""

    adapter: Adapter

    def axes(self, config: Config) -> Axes:
        body, head = split_head(config.axes())
        return adapters.detach_adapters(body)[1] | head

    def base_axes(self, config: Config) -> Axes:
        return adapters.detach_adapters(split_head(config.axes())[0])[0]

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        own, head = split_head(trained)
        return adapters.attach_adapters(base, own) | head

    plain = parameters

    def kept_file(self, model: TrainState) -> KeptFile:
        own = adapters.detach_adapters(plain(model))[1]
        return _adapter_file("adapter.npz", model, self.adapter, own)


def _adapter_file(
    name: str, model: TrainState, adapter: LoRA | Adapter, params: Params
) -> KeptFile:
    def write(path: Path, params: Params) -> None:
        save_adaptation(path, SavedAdapter(model.config, adapter, params))

    return name, params, write


@dataclass(frozen=True)
class Adapt(Train):
    """Trains an adapter of the model ``name`` and its head. The rest of the model is frozen.

    Only the adapter and the head have gradients and optimizer state. If the model already has the
    adapter, its training continues.
    """

    adapter: LoRA | Adapter = field(default_factory=LoRA)
    saved: str | None = None  # the file of the adapter to continue from

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.adapter, LoRA):
            modules = lora.lora_kernels(self.adapter, self.config.axes())
            if heads := split_head({module.partition("/")[0]: 0 for module in modules})[1]:
                raise ValueError(
                    f"the targets of the LoRA include {', '.join(heads)}, but heads are trained "
                    "without LoRA: remove them from the targets"
                )
        elif self.config.adapter is not None and (
            self.config.adapter != self.adapter or self.saved
        ):
            raise ValueError(
                f"the model already has an adapter: to train it further, set "
                f"adapter={self.config.adapter}, and leave saved empty"
            )

    def fixed_flops(self, accumulate: int = 1) -> float:
        """FLOPs of Muon for each step. Muon applies to the matrices of the run's model.

        These include the matrices of an adapter only if the model already had it.
        """
        if (
            self.optim.name != "muon"
            or isinstance(self.adapter, LoRA)
            or self.config.adapter is None
        ):
            return 0.0
        return muon.muon_flops(BesideAdapters(self.adapter).axes(self.config), self.config.sizes())

    def flops(self, tokens: int, layers: float | None = None, at_once: int | None = None) -> float:
        return adapter_train_flops(
            self.adapter,
            self.config,
            tokens,
            self.window,
            layers,
            at_once=at_once,
            **self._savings,
        )

    def start(
        self,
        models: Models,
        tx: optax.GradientTransformation,
        key: jax.Array,
        saved: Params | None = None,
    ) -> TrainState:
        model = models[self.name]
        if model.parametrisation is None:
            model = self._beside(model, key, saved)
        return model if model.opt is not None else replace(model, opt=tx.init(model.params))

    def _beside(self, model: TrainState, key: jax.Array, saved: Params | None) -> TrainState:
        """Return the frozen model with its own adapter, the one in ``saved``, or a fresh one."""
        body, head = split_head(model.params)
        config, own = self.config, saved
        if isinstance(self.adapter, LoRA):
            by = BesideLoRA(self.adapter)
            if own is None:
                own = lora.init_lora(self.adapter, by.base_axes(config), config.sizes(), key)
        else:
            by = BesideAdapters(self.adapter)
            config = replace(config, adapter=self.adapter)
            if self.config.adapter is not None:
                body, own = adapters.detach_adapters(body)
            elif own is None:
                own = adapters.init_adapters(config, key)
        return TrainState(own | head, None, config, model.sensitivity, body, by)

    def given(self, context: Context) -> tuple[Params, ...]:
        if self.saved is not None and context.models[self.name].parametrisation is None:
            return (adapter_for(self.saved, self.config)[1],)
        return ()


class SavedAdapter(NamedTuple):
    """The adapter that a run saves, without the head."""

    config: Config  # config of the model
    adapter: LoRA | Adapter
    params: Params  # in the form of `jaxgrow.extras.peft.lora.init_lora` or `jaxgrow.extras.peft.adapters.init_adapters`


def save_adaptation(path: Path, saved: SavedAdapter) -> None:
    """Write the adapter of an `Adapt` atomically."""
    # The config of the model includes a bottleneck adapter.
    about: dict[str, Any] = {"model": saved.config.as_json()}
    about |= {"lora": asdict(saved.adapter)} if isinstance(saved.adapter, LoRA) else {}
    write_arrays(path, about, {"/".join(key): x for key, x in flatten_dict(saved.params).items()})


def load_adaptation(path: Path) -> SavedAdapter:
    """Read the adapter that `save_adaptation` wrote.

    Raises:
      UserError: the file is missing, damaged, or has other content.
    """

    def parsed(about: dict[str, Any], arrays: dict[str, Any]) -> SavedAdapter:
        config = from_json(about["model"])
        own = about.get("lora")
        adapter = config.adapter if own is None else typed.build_dataclass(LoRA, own)
        if adapter is None:
            raise ValueError("its model has no adapter")
        return SavedAdapter(config, adapter, unflatten_dict(arrays, sep="/"))

    return read_arrays(
        path, parsed, "adapter", "a run that trains one writes lora.npz or adapter.npz"
    )


def adapter_for(file: str, config: Config) -> tuple[LoRA | Adapter, Params]:
    """Read an adapter for a model.

    Args:
      file: the file of the adapter.
      config: config of the model.

    Returns:
      The adapter to train, and its parameters.

    Raises:
      UserError: the file cannot be read (see `load_adaptation`), or its adapter is for a model of other sizes.
    """
    saved = load_adaptation(Path(file))
    try:
        wrong = differing(saved.config, config)
    except ValueError as error:
        raise UserError(f"the adapter of {file} is for another model: {error}") from error
    if wrong:
        there = ", ".join(f"{axis} {saved.config.integers()[axis]}" for axis in wrong)
        raise UserError(
            f"the adapter of {file} is for a model with {there}, but this model has "
            f"{', '.join(f'{a} {n}' for a, n in wrong.items())}; grow the adapter with its model ("
            "jaxgrow.extras.peft.lora.lora_growth, jaxgrow.extras.peft.adapters.adapter_growth)"
        )
    return saved.adapter, saved.params
