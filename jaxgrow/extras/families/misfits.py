"""Why is a folder not read, because of a misfit or missing support? Why is a model not stored?"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy

from jaxgrow.checkpoints.hf.base import NotStoredError
from jaxgrow.checkpoints.hf.registry import DIAGNOSES, FAMILIES
from jaxgrow.checkpoints.hf.storage import HuggingFace, named_architecture
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import listed, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor, absent_files, indexed_files
from jaxgrow.extras.families import layer_lists
from jaxgrow.extras.families.tensor_names import body_of, layer_of
from jaxgrow.models import Config
from jaxgrow.typed import Json
from jaxgrow.untrusted import CheckedPath


def tensors_without_values(stored: Mapping[str, Tensor]) -> str:
    """Return the reason why tensors have no values; "": all of them have some."""
    empty = [name for name, tensor in stored.items() if 0 in tensor.shape]
    if not empty:
        return ""
    return (
        f"these tensors have no values: {listed(empty, most=2)}. DeepSpeed saves such tensors under ZeRO stage 3. "
        "Convert the state with its zero_to_fp32.py, or save the model again with the setting "
        '"stage3_gather_16bit_weights_on_model_save": true'
    )


def other_depth(
    wrong: Collection[str],
    stored: Collection[str],
    places: Collection[TensorLayout],
    key: str,
    depth: int,
) -> str:
    """Return the message that only the number of layers is wrong; "": there are other reasons.

    Args:
      wrong: the names of tensors that only the files or only the model have.
      stored: the names of all tensors in the files.
      places: the layouts of the leaves of the model.
      key: the key of the number of layers.
      depth: the number of layers of the model.
    """
    layers = 1 + max((layer_of(name, places) for name in stored), default=-1)
    least = min((layer_of(name, places) for name in wrong), default=-1)
    if not layers or layers == depth or least < min(depth, layers):
        return ""
    fewer = f"; to keep {depth} of them, use `jaxgrow prune --layers {depth}` then"
    return (
        f"{key} is {depth}, but the folder has the tensors of {layers} layers. Set {key} to {layers}"
        f"{fewer if depth < layers else ''}"
    )


def cause_of_misfits(
    model: HuggingFace, file: CheckedPath, further: bool, named: list[str], wrong: dict[str, str]
) -> str:
    """Return the one reason of all misfits: no values, or one wrong number; "": not known."""
    known = {name: tensor for name, tensor in model.tensors.items() if name not in named}
    if empty := tensors_without_values(known):
        return empty
    of = (named, model.tensors, model.names.values(), model.family.layers_key, model.config.depth)
    if not wrong and (depth := other_depth(*of)):
        return depth
    sizes = {n for name in itertools.islice(wrong, 1) for n in model.tensors[name].shape}
    hf_config = model.hf_config or {}
    found: list[str] = []
    for key, size in itertools.product(hf_config.keys() & _size_keys(model), sizes):
        other = copy(model)
        other.hf_config = {**hf_config, key: size}
        with suppress(ValueError):
            other.find_names(other.read_config(file), further)
            if not any(other.misfits()):
                found.append(
                    f"{key} is {hf_config[key]}, but the weights have {size}: {next(iter(wrong.values()))}. Set {key} to "
                    f"{size}, or give the weights that belong to this config.json"
                )
    return found[0] if len(found) == 1 else ""


def _size_keys(model: HuggingFace) -> set[str]:
    """The keys of ``config.json`` that hold a size other than the number of layers."""
    layers, *groups = layer_lists.SYNONYMS
    return {*model.family.fields, *itertools.chain(*groups)} - {*layers}


def describe_misfits(model: HuggingFace, file: CheckedPath, further: bool) -> str:
    """Return the message that tensors are missing or unknown, or have another shape.

    It names their one cause if that is known, and otherwise the first tensors of each kind.
    """
    missing, unknown, wrong = model.misfits()
    download = ""
    if absent := absent_files(model.folder, indexed_files(model.folder)):
        download = f" Download {listed(absent)}, which the index names."
    elif cause := cause_of_misfits(model, file, further, [*missing, *unknown], wrong):
        return f"{model.folder}: {cause}"
    lines = [
        [f"missing: {name}" for name in missing],
        [f"unknown: {name} in {model.tensors[name].file.name}" for name in unknown],
        [*wrong.values()],
    ]
    every = listed(*lines, separator="\n  ", most=3)
    return (
        f"{model.folder}: the tensors do not fit the {model.family.architecture} of config.json.{download} Do both "
        f"belong to one model, and has it been saved completely?\n  {every}"
    )


def other_head(model: HuggingFace) -> str:
    """Return the message that a stored head differs from the embedding to which it is tied; "": none.

    transformers 4 ignores such a head, and transformers 5 unties it.
    """
    same = {"head_kernel": "token_embedding"}
    for path, place in model.untied_layouts().items():
        mine = model.names[same.get(path, path)]
        if place.name == mine.name or place.name not in model.tensors:
            continue
        head, tied = model.tensor(place, None), model.tensor(mine, None)
        if not head.equals(tied):
            return (
                f"config.json ties {head.name} to {tied.name}, but both are stored, and they differ. Set "
                f'"tie_word_embeddings" to false in config.json to keep the head, or remove {head.name} from '
                f"{head.file.name}"
            )
    return ""


# What to do about architectures of models of images and texts, and about architectures whose files
# also contain the head of another architecture.
_WAYS_OUT = {
    "CLIPModel": "Load its vision tower as CLIPVisionModelWithProjection in transformers, and save it",
    "SiglipModel": "Load its vision tower as SiglipVisionModel in transformers, and save it",
    "BertForPreTraining": 'It has another head in addition; write ["BertForMaskedLM"] there to read the model without it',
}


def unsupported_architecture(hf_config: Json) -> str:
    """Return the message that the architecture of a ``config.json`` is not supported."""
    kind = hf_config.get("model_type")
    alike = [name for name, family in FAMILIES.items() if family.model_type == kind]
    usual = "Write a supported class there"
    if alike:
        usual = f"Write its class there, one of {', '.join(alike)}"
    # Another supported head would have random weights.
    if alike and (body := body_of(kind)):
        usual += (
            f"; load a model with another head as {body.architecture} in transformers, and save it"
        )
    return (
        f"architectures is {spelt(hf_config.get('architectures'))}, which is not supported. "
        f"{_WAYS_OUT.get(named_architecture(hf_config), usual)}. `jaxgrow architectures` lists the supported ones"
    )


def not_stored(config: Config, wrong: Sequence[ValueError]) -> str:
    """Return the message that no architecture stores a model.

    Args:
      config: the config of the model.
      wrong: the errors of the architectures that have its head.
    """
    if len(wrong) == 1:
        return str(wrong[0])
    # The architecture that lacks the fewest settings.
    lacking = [error for error in wrong if isinstance(error, NotStoredError)]
    nearest = min(lacking, key=lambda error: len(error.fields), default=None)
    experts = " and has experts" if "experts" in config.sizes() else ""
    kind = f"{type(config).__name__} that predicts {config.predicts}{experts}"
    way_out = (
        f"The nearest one: {nearest or wrong[0]}"
        if wrong
        else "Write an Orbax checkpoint instead (--to orbax)"
    )
    return f"no architecture stores {'this' if wrong else 'a'} {kind}. {way_out}"


DIAGNOSES.add("empty", tensors_without_values)
DIAGNOSES.add("misfits", describe_misfits)
DIAGNOSES.add("other head", other_head)
DIAGNOSES.add("unsupported", unsupported_architecture)
DIAGNOSES.add("not stored", not_stored)
