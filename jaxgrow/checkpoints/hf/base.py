"""How does a Hugging Face architecture store a model? Names, layouts and settings are data here."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from jaxgrow.axes.size_error import SizeError
from jaxgrow.checkpoints.hf.labels import class_count, numbered_labels, problem_keys
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json, field_types

_KINDS: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
}
#: Which keys of a ``config.json`` repeat others, such as lists with an entry for each layer.
#: "contradictions" returns messages about keys that do not agree; "own names" adds the keys of an
#: architecture for which there is a synonym; "old lists" removes lists for another number of layers;
#: "corrected" corrects the keys of a new ``config.json``; "removed" returns notes about keys that were
#: removed.
REPEATED_KEYS: Registry[Callable[..., Any]] = Registry("repeated keys")
Heads: TypeAlias = Literal["divide embed", "must divide embed", "free"]


def _head_dim(values: Json) -> int:
    """Return the size of a head that follows from the other sizes.

    Raises:
      ValueError: the heads do not divide ``embed``.
    """
    embed = values["embed"]
    heads = values["heads"]
    if embed % heads:
        raise ValueError(
            f"hidden size {embed} is not divisible by {heads} heads, and head_dim, the size of a "
            "head, is missing"
        )
    return embed // heads


def key_of(keys: Mapping[str, str], value: str) -> str | None:
    """Return the first key of a value, such as the name of an activation."""
    return next((key for key, found in keys.items() if found == value), None)


# The keys of ``config.json`` about the classes of a head.
_LABELS = {"classes": problem_keys, "spans": numbered_labels, "token_classes": numbered_labels}


def with_head(body: "Family", architecture: str, head: str, **more: object) -> "Family":
    """Return the architecture with the body of another one, and with another head.

    Args:
      body: an architecture whose head has no classes.
      architecture: the name of the result.
      head: its head.
      more: further fields of the result.
    """
    if (about := _LABELS.get(head)) is not None:
        more["inferred"] = lambda hf_config: body.inferred(hf_config) | class_count(hf_config)
        more["derived"] = lambda config: body.derived(config) | about(config)
    fixed = {**body.fixed, "head": head}
    return replace(body, architecture=architecture, fixed=fixed, **more)


def without_head(tokens: "Family", architecture: str = "") -> "Family":
    """Return the architecture with the body of ``tokens`` that returns its last hidden states."""

    def names(config: Config) -> dict[str, TensorLayout]:
        return {
            path: replace(stored, name=stored.name.removeprefix(tokens.prefix))
            for path, stored in tokens.names(config).items()
            if path != "head_kernel"
        }

    return with_head(
        tokens,
        architecture or re.sub("(ForCausalLM|LMHeadModel)$", "Model", tokens.architecture),
        "states",
        names=names,
        prefix="",
        stray=tokens.prefix,
        ignored=(*tokens.ignored, "lm_head.*", "embed_out.*"),
    )


class NotStoredError(ValueError):
    """An architecture has no settings for some fields of a config.

    Args:
      message: the message.
      fields: the fields.
    """

    def __init__(self, message: str, fields: tuple[str, ...]):
        super().__init__(message)
        self.fields = fields


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture: how its ``config.json`` and tensors map to a config and leaves.

    Args:
      architecture: its name in ``config.json``.
      model_type: its ``model_type`` in ``config.json``.
      config: the class of its configs in jaxgrow.
      fields: a dict from keys of ``config.json`` to fields of the config.
      names: a function from a config to a dict from the path of each leaf to its `TensorLayout`.
      fixed: fields of the config that have one value for the whole architecture. Models with
        another value are stored as another architecture.
      settings: keys of ``config.json``, and the values that jaxgrow supports. The first value is
        the default of a missing key. Other values are errors.
      inferred: a function from ``config.json`` to fields of the config that do not correspond to
        one key.
      unsaid: keys that are written if there is no ``config.json`` to follow.
      always: a function from the config to keys that are written even if the ``config.json`` to
        follow has another value, because they describe tensors that are not stored.
      derived: a function from the config to keys that follow from it. They are written but not
        read.
      ignored: name patterns of tensors without learned values, which a file may have.
      copies: a function from the config to a dict from tensor names to leaves. These tensors repeat
        the leaf, and are written for programs that expect them.
      stray: a prefix that some files have before all tensor names of a model without a head.
      seen: a function from the config and the tensor names to the config, for fields that
        ``config.json`` does not determine.
      renamed: a dict from parts of tensor names in some files to the parts that are read.
      modules: a dict from parts of tensor names to the parts that the modules of transformers 5
        have instead. Adapters are named after modules.
      folded: fields of the config whose effect is folded into the weights if the architecture does
        not have the setting.
      absent: the meaning of a key of ``fields`` that is missing or null: a value, or a function of
        the other fields.
      mixture: whether it has experts.
      prefix: the prefix of tensor names that is missing in checkpoints of the model without its
        head.
      heads: which sizes the heads may have. With "divide embed", their size is embed / heads. With
        "must divide embed", any size is possible, but `transformers` loads the model only if the
        number of heads divides embed. With "free", any size is possible. The value may also be a
        function from a config to one of these.
      variant: a function from ``config.json`` to the family that stores the same architecture under
        other names, or None if the names are those of this family.
    """

    architecture: str
    model_type: str
    config: type[Config]
    fields: Mapping[str, str]
    names: Callable[[Any], dict[str, TensorLayout]]
    fixed: Json = field(default_factory=dict)
    settings: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    inferred: Callable[[Json], Json] = lambda hf_config: {}
    unsaid: Json = field(default_factory=dict)
    always: Callable[[Any], Json] = lambda config: {}
    derived: Callable[[Any], Json] = lambda config: {}
    ignored: tuple[str, ...] = ()
    copies: Callable[[Config], dict[str, str]] = lambda config: {}
    stray: str = ""
    seen: Callable[[Any, Collection[str]], Any] = lambda config, tensors: config
    renamed: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    absent: Json = field(default_factory=dict)
    mixture: bool = False
    prefix: str = ""
    heads: Heads | Callable[[Any], Heads] = "divide embed"
    variant: Callable[[Json], "Family | None"] = lambda hf_config: None

    def has_head(self, config: Config) -> bool:
        """Whether the architecture has the head of a config."""
        return self.fixed.get("head", config.predicts) == config.predicts

    @property
    def layers_key(self) -> str:
        """The key of the number of layers in ``config.json``."""
        return next((key for key, name in self.fields.items() if name == "layers"), "")

    def current(self, name: str) -> str:
        """Return the current name of a tensor from its name in a file."""
        name = name.removeprefix(self.stray)
        for old, new in self.renamed.items():
            name = name.replace(old, new)
        return name

    def from_hf(self, hf_config: Json) -> Config:
        """Return the config that a ``config.json`` describes.

        Raises:
          ValueError: keys are missing or have the wrong type, the sizes do not form a model, or
            settings are not supported. One message lists them all.
        """
        wrong = REPEATED_KEYS["contradictions"](hf_config, self.layers_key, self.fields)
        hf_config = REPEATED_KEYS["own names"](hf_config, self.fields)
        values, follow = self._own_fields(hf_config, wrong)
        wrong += self._unsupported(hf_config)
        if not wrong:
            values |= {name: value(values) for name, value in follow.items()}
            values |= self._inferred(hf_config, wrong)
        if wrong:
            raise ValueError("; ".join(wrong))
        if "head_dim" not in values and "head_dim" not in self.fixed:
            values["head_dim"] = _head_dim(values)
        try:
            return self.config(**values, **self.fixed)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{self.config.__name__}: ")) from error

    def _own_fields(
        self, hf_config: Json, wrong: list[str]
    ) -> tuple[Json, dict[str, Callable[[Json], object]]]:
        """Read the keys of ``fields``, and append messages about them to ``wrong``.

        Returns:
          The values, and functions of these values for absent keys.
        """
        values: Json = {}
        follow: dict[str, Callable[[Json], object]] = {}
        for key, name in self.fields.items():
            value = hf_config.get(key)
            if value is None and key in self.absent:
                value = self.absent[key]
                if callable(value):
                    follow[name] = value
                    continue
            values[name] = self._typed(name, value, key, wrong)
        return values, follow

    def _unsupported(self, hf_config: Json) -> list[str]:
        """Return a message about each setting that is not supported."""
        settings = {
            **self.settings,
            # The automatic classes of `transformers` build the model of this type, whatever the
            # architecture is.
            "model_type": (self.model_type,),
            # `transformers` reads this key for every model, whether or not its config class has it.
            "is_causal": (self.config.causal,),
        }
        return [
            self._other(key, hf_config[key], allowed)
            for key, allowed in settings.items()
            if hf_config.get(key, allowed[0]) not in allowed
        ]

    def _inferred(self, hf_config: Json, wrong: list[str]) -> Json:
        """Return the fields from ``inferred``, and append messages about them to ``wrong``."""
        try:
            inferred = self.inferred(hf_config)
        except KeyError as error:
            raise ValueError(
                f"{error.args[0]} is missing, which a {self.architecture} needs"
            ) from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a value has the wrong type: {error}") from None
        return {name: self._typed(name, value, name, wrong) for name, value in inferred.items()}

    def _other(self, key: str, value: object, allowed: Sequence[object]) -> str:
        """The message about a setting that is not supported."""
        others = " or ".join(map(spelt, allowed))
        return (
            f"{key} is {spelt(value)}, but jaxgrow supports {self.architecture} only with {others}"
        )

    def _typed(self, name: str, value: object, key: str, wrong: list[str]) -> object:
        """Return the value of a field of the config, and append to ``wrong`` if it is not valid."""
        kind = field_types(self.config)[name]
        # Larger integers do not fit into float32.
        if type(value) is int and kind is float and abs(value) < 1 << 127:
            value = float(value)
        if isinstance(kind, type) and type(value) is not kind:
            wrong.append(f"{key} is {spelt(value)}, but should be {_KINDS[kind]}")
        elif type(value) is int and not 0 < value < 1 << 31:
            wrong.append(
                f"{key} is {spelt(value)}, but a size must be an integer from 1 to {(1 << 31) - 1}"
            )
        return value

    def heads_rule(self, config: Config) -> Heads:
        """Return which sizes the heads of a model may have, as ``heads``."""
        return self.heads(config) if callable(self.heads) else self.heads

    def _storable(self, config: Config) -> None:
        """Check the size of the heads.

        Raises:
          SizeError: the architecture does not support heads of this size.
        """
        embed = config.embed
        heads = config.heads
        size = config.head_dim
        rule = self.heads_rule(config)
        if rule == "divide embed" and embed != heads * size:
            wrong = (
                f"{self.architecture} has no setting for head_dim {size} (it would be "
                f"{embed / heads:g})"
            )
            fits = [("embed", heads * size)]
            fits += [("heads", embed // size)] if embed % size == 0 else []
        elif rule == "must divide embed" and embed % heads:
            wrong = (
                f"transformers loads a {self.architecture} only if its {heads} heads divide its "
                f"hidden size {embed}"
            )
            fits = [("embed", embed // heads * heads), ("embed", -(-embed // heads) * heads)]
        else:
            return
        way_out = f"{' or '.join(['{}'] * len(fits))} fits, or " if fits else ""
        raise SizeError(f"{wrong}; {way_out}--to orbax writes any model", *fits)

    def to_hf(self, config: Config, like: Json | None = None) -> Json:
        """Return the ``config.json`` of a config.

        Args:
          config: the config of the model.
          like: a ``config.json`` to follow. Its keys are kept, unless the model differs from the
            model that it describes.

        Raises:
          ValueError: the architecture has no such model, or ``like`` has a list for another number
            of layers that jaxgrow does not read.
        """
        self._storable(config)
        every = self._every(config)
        if like is None:
            unsaid = {key: allowed[0] for key, allowed in self.settings.items()} | dict(self.unsaid)
            out = unsaid | every | self.always(config)
        else:
            now = REPEATED_KEYS["old lists"](
                like, self.layers_key, config.depth, every, self.architecture
            )
            out = {**now, **self._changed(config, like, now, every), **self.always(config)}
            out = REPEATED_KEYS["corrected"](out, like, every, config.layer_kinds)
        back = self.from_hf(out).run_as(config)
        self._check_read_back(config, back)
        return out

    def _check_read_back(self, config: Config, back: Config) -> None:
        """Check that a config is read back from its ``config.json``.

        Args:
          config: the config.
          back: the config that is read back.

        Raises:
          ValueError: they differ. It is a `SizeError` if they differ only in sizes that the
            architecture derives from other sizes, such as ``kv_heads`` from ``heads``.
        """
        differ = self._differing(config, back)
        about = ", ".join(
            f"{name} {getattr(config, name)} (it would be {getattr(back, name)})" for name in differ
        )
        wrong = f"{self.architecture} has no setting for {about}"
        if differ and set(differ) <= config.sizes().keys():
            fits = [(name, getattr(back, name)) for name in differ]
            way_out = ", ".join(["{}"] * len(fits))
            raise SizeError(f"{wrong}; {way_out} fits, or --to orbax writes any model", *fits)
        if differ:
            raise NotStoredError(f"{wrong}; --to orbax writes any model", tuple(differ))

    def following(self, config: Config) -> dict[str, str]:
        """The axes whose size is that of another axis, because no key describes them.

        For example, every query head of a GPT-NeoX has its own key/value head.
        """
        has_key = "num_key_value_heads" in self._every(config)
        return {} if has_key or "kv_heads" not in config.sizes() else {"kv_heads": "heads"}

    def _every(self, config: Config) -> Json:
        """All keys that describe a config."""
        fields = {key: getattr(config, name) for key, name in self.fields.items()}
        return (
            {"architectures": [self.architecture], "model_type": self.model_type}
            | fields
            | self.derived(config)
        )

    def _changed(
        self,
        config: Config,
        like: Json,
        now: Json,
        every: Json,
    ) -> Json:
        """The keys of ``every`` that differ from the explicit or implied values in ``like``.

        ``now`` is ``like`` without the lists of another number of layers.
        """
        try:
            was = self._every(self.from_hf(like)) | {
                key: like.get(key) for key in ("architectures", "model_type")
            }
        except ValueError:
            # ``like`` is another model, so its settings may have another meaning.
            return every
        if was["model_type"] != self.model_type:
            return every
        changed = {
            key: value for key, value in every.items() if key not in was or was[key] != value
        }
        try:
            same = not self._differing(config, self.from_hf({**now, **changed}).run_as(config))
        except ValueError:
            same = False
        # The default of a missing key may depend on a key that has changed.
        return changed if same else {**every, **self._own(like, every, was)}

    def _differing(self, config: Config, back: Config) -> list[str]:
        """The fields, among those in ``config.json``, in which two configs differ."""
        names = [f.name for f in dataclasses.fields(config) if f.name not in self.folded]
        return [name for name in names if getattr(config, name) != getattr(back, name)]

    @staticmethod
    def _own(like: Json, every: Json, was: Json) -> Json:
        """Keys that the user chose and the model does not determine, such as labels."""
        names = ("id2label", "label2id", "problem_type")
        return {
            key: like[key]
            for key in names
            if key in like and key in every and every[key] == was.get(key)
        }
