"""How are the heads of BERT stored that classify texts and tokens, and BERT without a head?"""

from collections.abc import Callable
from dataclasses import replace

from jaxgrow.checkpoints.hf.base import Family, with_head
from jaxgrow.checkpoints.hf.families.bert import BERT_BASE, LayoutsOf, bert_layouts
from jaxgrow.checkpoints.hf.registry import register_families
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout, linear_layouts
from jaxgrow.models.bert import BERTConfig
from jaxgrow.typed import Json


def pooled_head(pooler: str, classifier: str) -> LayoutsOf:
    """Return the names of a head that classifies the sequence by its pooled first token."""
    return lambda config: (
        linear_layouts("pooler", pooler, "embed", "embed_in")
        | linear_layouts("classifier", classifier, "classes")
    )


def _classifier(module: str) -> LayoutsOf:
    """Return the names of a head that classifies each token."""
    return lambda config: linear_layouts("classifier", module, "classes")


def states_head(config: BERTConfig) -> dict[str, TensorLayout]:
    """The head of a model without a task."""
    return linear_layouts("pooler", "pooler.dense", "embed", "embed_in") if config.pooler else {}


def task_families(
    base: Family,
    classes: tuple[LayoutsOf, Json],
    states: tuple[LayoutsOf, Json],
    named: Callable[[str, LayoutsOf], LayoutsOf] = bert_layouts,
) -> tuple[Family, ...]:
    """Return the architectures of a model that do not predict masked tokens.

    Args:
      base: an architecture with the name of the model, and with the name prefix of its body.
      classes: the names of the head that classifies texts, and its further fields of `Family`.
      states: the same for the model without a head, whose names have a prefix only in some files.
      named: the function from a name prefix and the names of a head to all names.
    """
    tasks = {
        "ForSequenceClassification": ("classes", *classes),
        "ForQuestionAnswering": ("spans", _classifier("qa_outputs"), {}),
        "ForTokenClassification": ("token_classes", _classifier("classifier"), {}),
        "Model": ("states", states[0], {"stray": base.stray, **states[1]}),
    }
    return tuple(
        with_head(
            base,
            f"{base.architecture}{task}",
            head,
            **{"names": named("" if head == "states" else base.stray, names), "stray": "", **more},
        )
        for task, (head, names, more) in tasks.items()
    )


# config.json does not state whether the model has a pooler.
STATES: Json = dict(
    seen=lambda config, tensors: replace(config, pooler="pooler.dense.weight" in tensors),
    folded=("pooler",),
)
register_families(
    *task_families(
        BERT_BASE,
        classes=(pooled_head("bert.pooler.dense", "classifier"), dict(ignored=("*.position_ids",))),
        states=(states_head, STATES | dict(ignored=("*.position_ids", "cls.*"))),
    )
)
