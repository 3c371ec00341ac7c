"""How are the models of the Llama family (`jaxgrow.models.llama`) stored?

========== ========================================================================================
Llama      Llama 2, Llama 3, SmolLM 2
Qwen2      Qwen2, Qwen2.5: biases of queries, keys and values
Qwen3      norms of queries and keys
Mistral    a window in all layers
Gemma      scaled embeddings, GELU; norm scales are stored minus one
Gemma 2    norms before and after sublayers, a window in every other layer, soft-capped scores and
           logits
Gemma 3    norms before and after sublayers, a window in five of six layers, two kinds of rotary
           embeddings, norms of queries and keys, no soft caps (the text model only)
OLMo 2     norms after sublayers, norms over all queries and over all keys
Phi-3      Phi-3, Phi-4: fused kernels, a longer context by "longrope"
Mixtral    a mixture of experts in each layer; Qwen3-MoE has finer experts, whose gates do not have
           to add up to one
SmolLM 3   no rotary embeddings in every fourth layer
OLMo 1     LayerNorm without parameters
Qwen2-MoE  finer experts than Mixtral, and one expert that every token uses
Granite    factors of embeddings, scores, sublayers and logits; also the dense models of Granite 4
OLMoE      finer experts than Mixtral, norms over all queries and over all keys
gpt-oss    experts with biases and clamped units, attention sinks, a window in every other layer
GPT-NeoX   Pythia: LayerNorm, biases, parallel sublayers, partial rotary embeddings (a quarter of
           each head), queries, keys and values fused head by head
========== ========================================================================================

Each group of models has a file in this folder. `parts` has the names of the parts of a layer, and
`architectures` builds the two architectures of a model.
"""

from jaxgrow.checkpoints.hf.base import without_head
from jaxgrow.checkpoints.hf.families.llama.architectures import (
    MLP_BIAS,
    architectures,
    read_biased,
    written_biased,
)
from jaxgrow.checkpoints.hf.families.llama.gemma import GEMMA, GEMMA2, GEMMA3
from jaxgrow.checkpoints.hf.families.llama.gpt_neox import GPT_NEOX
from jaxgrow.checkpoints.hf.families.llama.gpt_oss import GPT_OSS
from jaxgrow.checkpoints.hf.families.llama.granite import GRANITE, GRANITE_4
from jaxgrow.checkpoints.hf.families.llama.mistral import MISTRAL, MIXTRAL
from jaxgrow.checkpoints.hf.families.llama.olmo import OLMO, OLMO2, OLMO3, OLMOE
from jaxgrow.checkpoints.hf.families.llama.phi3 import PHI3
from jaxgrow.checkpoints.hf.families.llama.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jaxgrow.checkpoints.hf.families.llama.smollm3 import SMOLLM3

LLAMA = architectures(
    "Llama",
    "llama",
    2048,
    read_biased,
    written_biased,
    fields=MLP_BIAS,
    heads="must divide embed",
)
# Each model has an architecture that predicts tokens, followed by one that predicts classes.
_LLAMA = (
    *LLAMA,
    *QWEN2,
    *MISTRAL,
    *QWEN3,
    *MIXTRAL,
    *QWEN3_MOE,
    *GEMMA,
    *GEMMA2,
    *GEMMA3,
    *OLMO,
    *QWEN2_MOE,
    *GPT_OSS,
    *OLMO2,
    *OLMO3,
    *PHI3,
    *SMOLLM3,
    *GPT_NEOX,
)

_TOKENS = (*_LLAMA[::2], OLMOE, GRANITE, GRANITE_4)
# Decoders without a head are published for embeddings of texts.
_BODIES = {"Gemma3ForCausalLM": "Gemma3TextModel"}
_STATES = tuple(without_head(f, _BODIES.get(f.architecture, "")) for f in _TOKENS)

FAMILIES = (*_TOKENS, *_LLAMA[1::2], *_STATES)
