"""Why is an architecture not supported, or a model not stored by any architecture?"""

from collections.abc import Sequence

from jaxgrow.checkpoints.hf.base import NotStoredError
from jaxgrow.checkpoints.hf.registry import DIAGNOSES, FAMILIES
from jaxgrow.checkpoints.hf.storage import body_of, named_architecture
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.models import Config
from jaxgrow.typed import Json

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


DIAGNOSES.add("unsupported", unsupported_architecture)
DIAGNOSES.add("not stored", not_stored)
