"""Adapters in a plan: a phase that trains one of a model that stands still, and one that makes a plain model of both.

A LoRA is merged into the model; a bottleneck cannot be, and stays in it, as its config says
(`jaxgrow.peft.adapters`). Either is saved with the run, to be kept where its model is known, grown
with it, trained on, or, several of them, fused.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgrow import flops
from jaxgrow.axes import Params
from jaxgrow.models import Adapter, Config, from_json
from jaxgrow.optim import muon
from jaxgrow.peft import adapters, lora
from jaxgrow.peft.lora import LoRA
from train.common.errors import UserError
from train.common.files import read_arrays, write_arrays
from train.engine.state.assembly import ByAdapter, ByLoRA
from train.engine.state.heads import split
from train.engine.state.model import Model, plain
from train.plan.phase import Context, Models
from train.plan.training import Train
from train.plan.transforms import Transform, differing


@dataclass(frozen=True)
class Adapt(Train):
    """Trains an adapter of the model ``name``, and its head; only these have gradients and optimizer state.

    Of adapters that are fused, which stand still, it trains what composes them. A model that has
    the adapter goes on with it.
    """

    adapter: LoRA | Adapter = field(default_factory=LoRA)
    saved: tuple[
        str, ...
    ] = ()  # files: of the adapter that it goes on from, or of those that are fused

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.adapter, LoRA):
            modules = lora.kernels(self.adapter, self.config.axes())
            if heads := split({module.partition("/")[0]: 0 for module in modules})[1]:
                raise ValueError(
                    f"the LoRA is for {', '.join(heads)}, but a head trains as it is: leave it out of its targets"
                )
        elif self.config.adapter is not None and (
            self.config.adapter != self.adapter or self.saved
        ):
            raise ValueError(
                f"the model has an adapter: to train it on, ask for {self.config.adapter}, and for none that is saved"
            )
        elif (
            self.adapter.fused is not None
            and self.config.adapter is None
            and len(self.saved) != self.adapter.fused
        ):
            raise ValueError(
                f"{self.adapter.fused} adapters are fused, which runs have trained, but saved names {len(self.saved)} files"
            )

    @cached_property
    def fixed_flops(self) -> float:  # type: ignore[override]
        """Muon is for the matrices that the run's model has: for an adapter that was there."""
        if (
            self.optim.name != "muon"
            or isinstance(self.adapter, LoRA)
            or self.config.adapter is None
        ):
            return 0.0
        return muon.flops(ByAdapter(self.adapter).axes(self.config), self.config.sizes())

    def flops(self, tokens: int, layers: float | None = None, at_once: int | None = None) -> float:
        return flops.train(
            self.config,
            tokens,
            self.window,
            layers,
            adapter=self.adapter,
            at_once=at_once,
            **self._savings,
        )

    def start(
        self,
        models: Models,
        tx: optax.GradientTransformation,
        key: jax.Array,
        saved: Sequence[Params] = (),
    ) -> Model:
        model = models[self.name]
        if model.made is None:
            model = self._beside(model, key, saved)
        return model if model.opt is not None else replace(model, opt=tx.init(model.params))

    def _beside(self, model: Model, key: jax.Array, saved: Sequence[Params]) -> Model:
        """The model that stands still, with an adapter: what it has, what is ``saved``, or a fresh one."""
        body, head = split(model.params)
        if isinstance(self.adapter, LoRA):
            fresh = lora.init(self.adapter, split(self.config.axes())[0], self.config.sizes(), key)
            own = saved[0] if saved else fresh
            return Model(
                own | head, None, self.config, model.sensitivity, body, ByLoRA(self.adapter)
            )
        config, made = replace(self.config, adapter=self.adapter), ByAdapter(self.adapter)
        if self.config.adapter is None:
            own = adapters.init(config, key)
            if saved:
                own = saved[0] if self.adapter.fused is None else adapters.fused(saved, own)
            body = adapters.attach(body, own)
        body, own = made.apart(body)
        return Model(own | head, None, config, model.sensitivity, body, made)

    def given(self, context: Context) -> tuple[Any, ...]:
        return (
            (loaded(self.saved, self.config)[1],)
            if self.saved and context.models[self.name].made is None
            else ()
        )

    def run(self, context: Context) -> Model:
        model = super().run(context)
        keep_adapter(context, model)
        return model


def keep_adapter(context: Context, model: Model) -> None:
    """Saves the adapter of a model in the folder of the run."""
    if isinstance(model.made, ByLoRA):
        name, adapter, own = "lora.npz", model.made.lora, split(model.params)[0]
    else:
        assert isinstance(model.made, ByAdapter)
        name, adapter, own = "adapter.npz", model.made.adapter, adapters.detach(plain(model))[1]
    context.keep(name, lambda path: save(path, Saved(model.config, adapter, own)))


@dataclass(frozen=True)
class Merge(Transform):
    """The model ``name``, with what an `Adapt` left beside it: a LoRA in its kernels, any other adapter in its layers."""

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


class Saved(NamedTuple):
    """What a run saves of its adapter, without the head."""

    config: Config  # of the model
    adapter: LoRA | Adapter
    params: Params  # as of `jaxgrow.peft.lora.init` or `jaxgrow.peft.adapters.init`


def save(path: Path, saved: Saved) -> None:
    """Writes the adapter of an `Adapt`; the file appears whole or not at all."""
    about: dict[str, Any] = {"model": saved.config.as_json()}  # which has its adapter
    about |= {"lora": asdict(saved.adapter)} if isinstance(saved.adapter, LoRA) else {}
    write_arrays(path, about, {"/".join(key): x for key, x in flatten_dict(saved.params).items()})


def load(path: Path) -> Saved:
    """The adapter that `save` wrote.

    Raises:
      UserError: the file is missing, damaged, or holds something else.
    """

    def made(about: dict[str, Any], arrays: dict[str, Any]) -> Saved:
        config, own = from_json(about["model"]), about.get("lora")
        adapter = (
            config.adapter if own is None else LoRA(**own | {"targets": tuple(own["targets"])})
        )
        if adapter is None:
            raise ValueError("its model has no adapter")
        return Saved(config, adapter, unflatten_dict(arrays, sep="/"))

    return read_arrays(
        path, made, "adapter", "a run that trains one writes lora.npz or adapter.npz"
    )


def loaded(files: Sequence[str], config: Config) -> tuple[LoRA | Adapter, list[Params]]:
    """What to train of a model of ``config``, and the parameters to begin with: the adapter of one
    file, to go on from, or several, to be fused.

    Raises:
      UserError: as `load`, or they are of another model, or cannot be fused.
    """
    every = [load(Path(file)) for file in files]
    for file, saved in zip(files, every, strict=True):
        if wrong := differing(saved.config, config):
            there = ", ".join(f"{axis} {saved.config.integers()[axis]}" for axis in wrong)
            raise UserError(
                f"{file} is of a model of {there}, but this one has {', '.join(f'{a} {n}' for a, n in wrong.items())}; grow it "
                "with its model (jaxgrow.peft.lora.growth, jaxgrow.peft.adapters.growth)"
            )
    first, *others = (saved.adapter for saved in every)
    if others:
        if (
            isinstance(first, LoRA)
            or first.fused is not None
            or any(other != first for other in others)
        ):
            raise UserError(
                f"adapters that are fused are bottlenecks, all alike, but these are {', '.join(map(str, (first, *others)))}"
            )
        first = replace(first, fused=len(every))
    return first, [saved.params for saved in every]
