"""How a Hugging Face architecture stores a model: names, layouts and settings, as data."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from einops import rearrange

from jaxgrow.axes.names import Names, axis, cut, is_layers, kind, reads
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models import Config
from jaxgrow.peft.lora import RANK

_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list",
}
_IN = "_in"  # for ".in", which einops would not take
Heads: TypeAlias = Literal["divide embed", "must divide embed", "free"]


@dataclass(frozen=True)
class Stored:
    """Where a leaf is stored.
    ``Stored("h.{layers}.attn.c_attn.weight", "embed (3 heads head_dim)", part=0)`` is a query
    kernel: one tensor a layer, the first of three that lie side by side.
    """

    # Of the tensor; with ``{layers}``, one for each layer of a stacked leaf; with ``{experts}``,
    # for each expert of it.
    name: str
    # The kinds of its axes, as in einops, without that of layers; a number is the parts of a fused
    # tensor; of a kernel from ``embed`` to ``embed``, what it reads ends in ``_in``.
    layout: str
    part: int | None = None
    # Of parts that lie one after the other along the first axis, what each has there:
    # ``("heads head_dim", "mlp")``.
    beside: tuple[str, ...] = ()
    # What is stored is ``times * leaf + plus``: a Gemma's norms are stored less one. Then leaves
    # are float32 or better.
    times: float = 1.0
    plus: float = 0.0
    first: int = (
        0  # the first layer that has it; those below it compute nothing by theirs, which are ones
    )

    def layers(self, of: Sequence[int | None]) -> Sequence[int | None]:
        """Those of a leaf's layers that are stored."""
        return of[self.first :]

    @property
    def moved(self) -> bool:
        return (self.times, self.plus) != (1.0, 0.0)

    def of_experts(self, sizes: Mapping[str, int]) -> list[str]:
        """The name, for each expert, where each has a tensor of its own."""
        if "{experts}" not in self.name:
            return [self.name]
        return [self.name.replace("{experts}", str(i)) for i in range(sizes["experts"])]

    def ours(self, tensor: np.ndarray, names: Names, sizes: Mapping[str, int]) -> np.ndarray:
        """The leaf (of one layer), with its axes ``names``, as it lies in the tensor: a view where that is possible.

        Raises:
          ValueError: the tensor has another shape than ``sizes`` make.
        """
        if tensor.shape != self.shape(names, sizes):
            raise ValueError(
                f"{self.name} has shape {tensor.shape}, but should have {self.shape(names, sizes)}"
            )
        if self.moved:
            wide = tensor if tensor.dtype == np.float64 else tensor.astype(np.float32)
            tensor = ((wide - self.plus) / self.times).astype(wide.dtype)
        return self._view(tensor, names, sizes)

    def _view(self, tensor: np.ndarray, names: Names, sizes: Mapping[str, int]) -> np.ndarray:
        parts, plain = self._parts(names)
        known = {n: sizes[axis] for n, axis in plain.items()}
        if self.beside:
            tensor = tensor[self._slice(sizes)]
        if parts is None:
            return rearrange(tensor, f"{self.layout} -> {' '.join(plain)}", **known)
        split = self.layout.replace(str(parts), "parts")
        return rearrange(tensor, f"{split} -> parts {' '.join(plain)}", parts=parts, **known)[
            self.part
        ]

    def theirs(
        self,
        leaf: np.ndarray,
        names: Names,
        sizes: Mapping[str, int],
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """The tensor of the leaf (of one layer): the whole of it, or ``into`` with this part filled in."""
        parts, plain = self._parts(names)
        if self.moved:
            leaf = (self.times * leaf + self.plus).astype(leaf.dtype)
        if parts is None and not self.beside:
            return rearrange(leaf, f"{' '.join(plain)} -> {self.layout}")
        if into is None:
            into = np.zeros(self.shape(names, sizes), leaf.dtype)
        self._view(into, names, sizes)[...] = leaf  # a view: axes are only divided and exchanged
        return into

    def shape(self, names: Names, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape."""
        _, plain = self._parts(names)
        axes = [a.strip("() ") for a in _top(self.layout)]
        assert {n for a in axes for n in a.split() if not n.isdigit()} == set(plain), (self, names)
        shape = [_product(a, sizes, plain) for a in axes]
        return (sum(_product(a, sizes) for a in self.beside) or shape[0], *shape[1:])

    def factors(self, names: Names) -> tuple["Stored", "Stored"]:
        """Where the factors of a LoRA of this kernel are stored: [rank, inputs], and [outputs, rank].

        The outputs are divided among kernels, ordered and multiplied as those of the kernel itself.
        """
        kernel = cut(names)
        read, written = ({kind(axis(n)) for n in of} for of in (kernel.read, kernel.written))
        marked = {n + _IN for n in read} | (read - written)
        axes = _top(self.layout)
        inputs = [a for a in axes if marked & set(a.strip("() ").split())]
        outputs = [a for a in axes if a not in inputs]
        module = self.name.removesuffix(".weight")
        first = Stored(f"{module}.lora_A.weight", " ".join([RANK, *inputs]).replace(_IN, ""))
        return first, replace(
            self, name=f"{module}.lora_B.weight", layout=" ".join([*outputs, RANK])
        )

    def _slice(self, sizes: Mapping[str, int]) -> slice:
        """Where this part lies."""
        assert self.part is not None
        begin = sum(_product(a, sizes) for a in self.beside[: self.part])
        return slice(begin, begin + _product(self.beside[self.part], sizes))

    def _parts(self, names: Names) -> tuple[int | None, dict[str, str]]:
        """The part of a fused tensor, if it is one, and the leaf's axes by their names in the layout."""
        apart = "experts" if "{experts}" in self.name else None
        own = [n for n in names if not is_layers(axis(n)) and axis(n) != apart]
        plain = {kind(axis(n)): axis(n) for n in own}
        if len(plain) < len(own):
            plain = {kind(axis(n)) + _IN * reads(n): axis(n) for n in own}
        numbers = [
            int(n) for n in self.layout.replace("(", " ").replace(")", " ").split() if n.isdigit()
        ]
        return (numbers[0] if numbers and self.part is not None else None), plain


def _product(axes: str, sizes: Mapping[str, int], plain: Mapping[str, str] | None = None) -> int:
    """Of ``"3 heads head_dim"``; ``plain``: the axes that these kinds are."""
    return math.prod(
        int(n) if n.isdigit() else sizes[(plain or {}).get(n, n)] for n in axes.split()
    )


def _top(layout: str) -> list[str]:
    """``["embed", "(3 heads head_dim)"]``."""
    out, depth = [], 0
    for word in layout.replace("(", "( ").replace(")", " )").split():
        depth += word == "("
        if depth and out and out[-1].startswith("(") and not out[-1].endswith(")"):
            out[-1] += " " + word
        else:
            out.append(word)
        depth -= word == ")"
    return out


def linear(ours: str, theirs: str, outputs: str, inputs: str = "embed") -> dict[str, Stored]:
    """Where a kernel that lies output first, and its bias, are stored."""
    return {
        f"{ours}/kernel": Stored(f"{theirs}.weight", f"{outputs} {inputs}"),
        f"{ours}/bias": Stored(f"{theirs}.bias", outputs),
    }


def layer_norms(names: Mapping[str, str]) -> dict[str, Stored]:
    """Where the scales and biases of LayerNorms are stored; ``names``: ours, and the module's."""
    out = {}
    for ours, theirs in names.items():
        out |= {
            f"{ours}/scale": Stored(f"{theirs}.weight", "embed"),
            f"{ours}/bias": Stored(f"{theirs}.bias", "embed"),
        }
    return out


@dataclass(frozen=True)
class Family:
    """An architecture: ``config.json`` and tensors, against a config and leaves of ours."""

    architecture: str  # as in ``config.json``
    model_type: str
    config: type[Config]
    fields: Mapping[str, str]  # their key: our field
    names: Callable[[Any], dict[str, Stored]]  # of a config: our leaf, and where it is stored
    # What of our config the architecture leaves no choice of: our field: value. A config with
    # another is stored elsewhere.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # What we compute: their key, and the values that mean it, the first one where it is left out.
    # Others are refused.
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Fields of ours that no single key of theirs is, from their whole ``config.json``.
    inferred: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda theirs: {}
    # What is written where there is no ``config.json`` to follow.
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    # What is written whatever was there, because we store no tensors for anything else: their key:
    # value.
    always: Mapping[str, Any] = field(default_factory=dict)
    # What follows from our config and is written, but not read: their key: value.
    derived: Callable[[Any], dict[str, Any]] = lambda config: {}
    # Tensors that hold nothing that was learned, as patterns of names: they may be there.
    ignored: tuple[str, ...] = ()
    # Tensors that only repeat a leaf of ours, written for those who look for them: their name: our
    # leaf.
    copies: Callable[[Config], dict[str, str]] = lambda config: {}
    # A prefix that some files put before the names of all tensors of a model without a head.
    stray: str = ""
    # The config, after a look at the names of the tensors, where ``config.json`` does not say
    # everything.
    seen: Callable[[Any, Collection[str]], Any] = lambda config, tensors: config
    # How names end in older files: how they end now.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # What parts of names are called in the modules of transformers 5, where files keep the older
    # names. Adapters go by modules.
    modules: Mapping[str, str] = field(default_factory=dict)
    # Fields of ours that are folded into weights where they are not what the architecture computes.
    folded: tuple[str, ...] = ()
    # What a key of ``fields`` means where it is left out or null: a value, or a function of our
    # fields that are there.
    absent: Mapping[str, Any] = field(default_factory=dict)
    mixture: bool = False  # whether it has experts
    # What the tensors of the model without its head are named without, in checkpoints that were
    # saved so.
    prefix: str = ""
    # Of how many units a head is: embed / heads, and nothing else; any number, but `transformers`
    # loads no embed that the heads do not divide; any number.
    heads: Heads | Callable[[Any], Heads] = "divide embed"

    def has_head(self, config: Config) -> bool:
        """Whether it predicts what the model does."""
        return self.fixed.get("head", config.predicts) == config.predicts

    def current(self, name: str) -> str:
        """The name of a tensor today, whatever it was in the file."""
        name = name.removeprefix(self.stray)
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def in_memory(self, name: str) -> str:
        """The name of a stored tensor in the model that transformers 5 makes of the file."""
        for old, new in self.modules.items():
            name = name.replace(old, new)
        return name

    def ours(self, theirs: Mapping[str, Any]) -> Config:
        """The config of a ``config.json``.

        Raises:
          ValueError: keys that are missing or of another type, sizes that make no model, settings
            that we do not compute; all in one message.
        """
        values: dict[str, Any] = {}
        follow: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
        wrong = []
        for key, name in self.fields.items():
            value = theirs.get(key)
            if value is None and key in self.absent:
                value = self.absent[key]
                if callable(value):
                    follow[name] = value
                    continue
            values[name] = self._typed(name, value, key, wrong)
        for key, allowed in self.settings.items():
            if theirs.get(key, allowed[0]) not in allowed:
                wrong.append(self._other(key, theirs[key], allowed))
        # `transformers` reads this key for every model, whether or not its config class defines it.
        if theirs.get("is_causal", self.config.causal) != self.config.causal:
            wrong.append(self._other("is_causal", theirs["is_causal"], (self.config.causal,)))
        if theirs.get("quantization_config") is not None:
            wrong.append("quantization_config is set: dequantize the model first")
        if not wrong:
            values |= {name: value(values) for name, value in follow.items()}
            try:
                inferred = self.inferred(theirs)
            except KeyError as error:
                raise ValueError(f"{error.args[0]} is missing") from None
            except (TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"values that cannot be read: {error}") from None
            values |= {
                name: self._typed(name, value, name, wrong) for name, value in inferred.items()
            }
        if wrong:
            raise ValueError("; ".join(wrong))
        if "head_dim" not in values:
            if values["embed"] % values["heads"]:
                raise ValueError(f"{values['embed']} units are no {values['heads']} equal heads")
            values["head_dim"] = values["embed"] // values["heads"]
        try:
            return self.config(**values, **self.fixed)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{self.config.__name__}: ")) from error

    def _other(self, key: str, value: Any, allowed: Sequence[Any]) -> str:
        """The message about a setting that is not computed here."""
        others = " or ".join(map(spelt, allowed))
        return (
            f"{key} is {spelt(value)}, but {self.architecture} is computed here only with {others}"
        )

    def _typed(self, name: str, value: Any, key: str, wrong: list[str]) -> Any:
        """The value of a field of ours, or a line more in ``wrong``."""
        kind = next(f.type for f in dataclasses.fields(self.config) if f.name == name)
        if type(value) is int and kind is float and abs(value) < 1 << 127:  # float32's
            value = float(value)
        if isinstance(kind, type) and type(value) is not kind:
            wrong.append(f"{key} is {spelt(value)}, but should be {_KINDS[kind]}")
        elif type(value) is int and not 0 < value < 1 << 31:
            wrong.append(
                f"{key} is {spelt(value)}, but a size is a whole number from 1 to {(1 << 31) - 1}"
            )
        return value

    def _storable(self, config: Config) -> None:
        """
        Raises:
          ValueError: heads of a size that this architecture does not have.
        """
        embed, heads, size = config.embed, config.heads, config.head_dim
        rule = self.heads(config) if callable(self.heads) else self.heads
        if rule == "divide embed" and embed != heads * size:
            fits = f"heads={embed // size} fits, or " if embed % size == 0 else ""
            wrong = f"{self.architecture} has no setting for head_dim {size} (it would be {embed / heads:g})"
        elif rule == "must divide embed" and embed % heads:
            wrong = f"transformers loads no {self.architecture} whose {heads} heads do not divide its {embed} units"
            fits = f"embed={embed // heads * heads} or embed={-(-embed // heads) * heads} fits, or "
        else:
            return
        raise ValueError(f"{wrong}; {fits}--to orbax writes any model")

    def theirs(self, config: Config, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The ``config.json`` of a config.

        Args:
          config: of the model.
          like: a ``config.json`` to follow. Its keys stay as they are, unless the model differs
            from the one that it describes.

        Raises:
          ValueError: the architecture has no such model.
        """
        self._storable(config)
        every = self._every(config)
        if like is None:
            unsaid = {key: allowed[0] for key, allowed in self.settings.items()} | dict(self.unsaid)
            out = unsaid | every | dict(self.always)
        else:
            out = {**like, **self._changed(config, like, every), **self.always}
        back = self.ours(out).run_as(config)
        differ = [
            f"{f.name} {getattr(config, f.name)} (it would be {getattr(back, f.name)})"
            for f in dataclasses.fields(config)
            if f.name not in self.folded and getattr(config, f.name) != getattr(back, f.name)
        ]
        if differ:
            raise ValueError(
                f"{self.architecture} has no setting for {', '.join(differ)}; --to orbax writes any model"
            )
        return out

    def _every(self, config: Config) -> dict[str, Any]:
        """All keys that describe a config."""
        fields = {key: getattr(config, name) for key, name in self.fields.items()}
        return (
            {"architectures": [self.architecture], "model_type": self.model_type}
            | fields
            | self.derived(config)
        )

    def _changed(
        self, config: Config, like: Mapping[str, Any], every: dict[str, Any]
    ) -> dict[str, Any]:
        """The keys of ``every`` that have another value than ``like`` gives them, spelt out or not."""
        try:
            was = self._every(self.ours(like)) | {
                key: like.get(key) for key in ("architectures", "model_type")
            }
        except ValueError:  # another model, whose settings mean something else
            return every
        if was["model_type"] != self.model_type:
            return every
        changed = {
            key: value for key, value in every.items() if key not in was or was[key] != value
        }
        try:
            same = self.ours({**like, **changed}).run_as(config) == config
        except ValueError:
            same = False
        # A key that is left out may follow from one that has changed.
        return changed if same else {**every, **self._own(like, every, was)}

    @staticmethod
    def _own(like: Mapping[str, Any], every: dict[str, Any], was: dict[str, Any]) -> dict[str, Any]:
        """What the user chose and the model does not say, such as the labels of classes."""
        names = ("id2label", "label2id", "problem_type")
        return {
            key: like[key]
            for key in names
            if key in like and key in every and every[key] == was.get(key)
        }
