"""The Hugging Face architectures that can be read and written.

If several architectures can store the same model, the pre-training architecture comes first.
"""

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.bert import (
    DISTILBERT,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaForTokenClassification,
    XLMRobertaModel,
)
from jaxgrow.checkpoints.hf.deberta import DEBERTA
from jaxgrow.checkpoints.hf.gpt2 import GPT2ForSequenceClassification, GPT2LMHeadModel
from jaxgrow.checkpoints.hf.llama import GRANITE, LLAMA
from jaxgrow.checkpoints.hf.modernbert import MODERNBERT
from jaxgrow.checkpoints.hf.opt import OPTForCausalLM, OPTForSequenceClassification
from jaxgrow.checkpoints.hf.swin import Swinv2ForImageClassification
from jaxgrow.checkpoints.hf.vit import (
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2ForImageClassification,
    Dinov2Model,
    SiglipVisionModel,
    ViTForImageClassification,
    ViTModel,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        BertForMaskedLM,
        RobertaForMaskedLM,
        XLMRobertaForMaskedLM,
        MODERNBERT[0],
        DISTILBERT[0],
        DEBERTA[0],
        GPT2LMHeadModel,
        *LLAMA[::2],
        GRANITE,
        OPTForCausalLM,
        ViTForImageClassification,
        DeiTForImageClassification,
        DeiTForImageClassificationWithTeacher,
        Dinov2ForImageClassification,
        Swinv2ForImageClassification,
        BertForSequenceClassification,
        RobertaForSequenceClassification,
        XLMRobertaForSequenceClassification,
        MODERNBERT[1],
        DISTILBERT[1],
        DEBERTA[1],
        GPT2ForSequenceClassification,
        *LLAMA[1::2],
        OPTForSequenceClassification,
        BertForQuestionAnswering,
        RobertaForQuestionAnswering,
        MODERNBERT[2],
        DISTILBERT[2],
        DEBERTA[2],
        BertForTokenClassification,
        RobertaForTokenClassification,
        XLMRobertaForTokenClassification,
        MODERNBERT[3],
        DISTILBERT[3],
        DEBERTA[3],
        BertModel,
        RobertaModel,
        XLMRobertaModel,
        MODERNBERT[4],
        DISTILBERT[4],
        DEBERTA[4],
        ViTModel,
        Dinov2Model,
        CLIPVisionModel,
        CLIPVisionModelWithProjection,
        SiglipVisionModel,
    )
}
