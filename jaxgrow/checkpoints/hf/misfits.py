"""Why do the tensors of a folder not fit the model of its ``config.json``?"""

from collections.abc import Collection, Mapping

from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.hf.tensor_names import layer_of
from jaxgrow.checkpoints.io.files import listed
from jaxgrow.checkpoints.io.safetensors import Tensor


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
