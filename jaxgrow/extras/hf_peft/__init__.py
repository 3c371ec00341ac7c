"""How are LoRAs read and written in the layout of Hugging Face's PEFT?

A LoRA in this layout has the files ``adapter_config.json`` and ``adapter_model.safetensors``. A
LoRA that was trained with PEFT can be read, grown with its model, and written again::

    own = peft.read_peft("their-lora", config)
    peft.write_peft("grown-lora", own.grown(growth))

The factors of the kernel of one layer are ``base_model.model.<module>.lora_A.weight`` [rank,
inputs] and ``.lora_B.weight`` [outputs, rank]. PyTorch computes ``x W.T + scale x A.T B.T`` with
them. The modules are named as in the base model (`jaxgrow.checkpoints.hf.registry`), and the
outputs of a fused tensor are divided among the kernels as in the base model. `factor_layouts`
derives the layout of the factors from the layout of the weight.

A `jaxgrow.extras.peft.lora.LoRA` has one rank and one scale. When a module with a smaller rank is
read (``rank_pattern``, ``layers_to_transform``), its factors are padded with zeros. Another scale is
multiplied into ``b`` (``alpha_pattern``, ``use_rslora``). `write_peft` removes zeros, and writes
differing ranks as ``rank_pattern``. The magnitudes of a DoRA are kept as gains
(`jaxgrow.extras.hf_peft.dora`), for which the kernels of the base model are read.
"""

from jaxgrow.checkpoints.io.files import ADAPTER
from jaxgrow.extras.hf_peft.peft_adapter import PeftAdapter
from jaxgrow.extras.hf_peft.places import CONFIG, WEIGHTS
from jaxgrow.extras.hf_peft.reading import read_peft, read_peft_beside
from jaxgrow.extras.hf_peft.saving import module_ranks, write_into, write_peft

__all__ = [
    "ADAPTER",
    "CONFIG",
    "WEIGHTS",
    "PeftAdapter",
    "module_ranks",
    "read_peft",
    "read_peft_beside",
    "write_into",
    "write_peft",
]
