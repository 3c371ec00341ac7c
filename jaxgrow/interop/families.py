"""The architectures that are read and written; of several with the same model, the one as it was pre-trained comes first."""

from jaxgrow.interop.bert import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
)
from jaxgrow.interop.family import Family
from jaxgrow.interop.gpt2 import GPT2ForSequenceClassification, GPT2LMHeadModel
from jaxgrow.interop.llama import LLAMA
from jaxgrow.interop.modernbert import MODERNBERT
from jaxgrow.interop.swin import Swinv2ForImageClassification
from jaxgrow.interop.vit import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2ForImageClassification,
    ViTForImageClassification,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        BertForMaskedLM,
        RobertaForMaskedLM,
        XLMRobertaForMaskedLM,
        MODERNBERT[0],
        GPT2LMHeadModel,
        *LLAMA[::2],
        ViTForImageClassification,
        DeiTForImageClassification,
        DeiTForImageClassificationWithTeacher,
        Dinov2ForImageClassification,
        Swinv2ForImageClassification,
        BertForSequenceClassification,
        RobertaForSequenceClassification,
        XLMRobertaForSequenceClassification,
        MODERNBERT[1],
        GPT2ForSequenceClassification,
        *LLAMA[1::2],
        BertForQuestionAnswering,
        RobertaForQuestionAnswering,
        MODERNBERT[2],
    )
}
