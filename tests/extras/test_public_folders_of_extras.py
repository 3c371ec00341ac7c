"""Folders of mixtures of experts and of decoders without a head, in the forms that users publish."""

import numpy as np
import pytest
from checkpoints import change
from families import BODIES
from published import assert_params, called, content, published, refused, store, stored

from jaxgrow.checkpoints import FAMILIES, open_checkpoint

EXPERTS = ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM"]


def fuse(found, transposed=False, ending="", stacked=False):
    """The tensors with the experts of each layer in one tensor, as the modules of transformers 5."""
    found, fused = dict(found), {}
    for name in [name for name in found if ".experts.0." in name]:
        every = [found.pop(name.replace("experts.0", f"experts.{i}")) for i in range(4)]
        mlp, part = name.replace("block_sparse_moe", "mlp").split(".experts.0.")
        part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part[:2], part[:-7])
        fused[mlp, part] = np.stack(every)
    for mlp in {mlp for mlp, _ in fused} if not stacked else ():
        both = [fused.pop((mlp, part)) for part in ("gate_proj", "up_proj")]
        fused[mlp, "gate_up_proj"] = np.concatenate(both, 1)
    for (mlp, part), x in fused.items():
        x = np.ascontiguousarray(x.swapaxes(1, 2)) if transposed else x
        found[f"{mlp}.experts.{part}{ending}"] = x
    return {name.replace("block_sparse_moe", "mlp"): x for name, x in found.items()}


@pytest.mark.parametrize(("architecture", "ending"), [
    *((architecture, "") for architecture in EXPERTS), ("MixtralForCausalLM", ".weight"),
])  # fmt: skip
def test_fused_experts_are_read(tmp_path, architecture, ending, capsys):
    folder = published(tmp_path / "a", architecture)
    params, found = open_checkpoint(folder).params(), fuse(stored(folder), ending=ending)
    store(folder, {f"module.{name}": x for name, x in found.items()})
    assert_params(folder, params)
    store(folder, found)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert len([name for name in stored(tmp_path / "b") if ".experts.3." in name]) == 24
    name = f"model.layers.0.mlp.experts.down_proj{ending}"
    store(folder, stored(folder) | {name: np.zeros((4, 3, 3), np.float32)})
    error = refused(capsys, "inspect", folder)
    assert "has shape (4, 3, 3), but config.json requires (4, 16, " in error
    assert "(axes: experts embed mlp)" in error


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mlp", [12, 8, 16])
def test_both_orders_of_fused_experts_are_read(tmp_path, stacked, mlp, capsys):
    """Square kernels: those of gate and up with 2 x 8 rows, those of down with 16 columns."""
    folder = published(tmp_path / "a", "Qwen3MoeForCausalLM", moe_intermediate_size=mlp)
    params, found = open_checkpoint(folder).params(), stored(folder)
    for transposed in (False, True) if not (stacked and mlp == 16) else (False,):
        store(folder, fuse(found, transposed, stacked=stacked))
        assert_params(folder, params)
    called(capsys, "convert", folder, tmp_path / "b", "--shard-size", "1GB")
    for name, x in stored(tmp_path / "b").items():
        np.testing.assert_array_equal(x, found[name], err_msg=name)


def test_gpt_oss_is_read_in_both_orders(tmp_path):
    folder = published(tmp_path / "a", "GptOssForCausalLM")
    params, found = open_checkpoint(folder).params(), stored(folder)
    for name, x in found.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            found[name] = np.ascontiguousarray(x.swapaxes(1, 2))
    store(folder, found)
    assert_params(folder, params)


# One architecture for each prefix.
@pytest.mark.parametrize("architecture", {FAMILIES[a].prefix: a for a in BODIES}.values())
@pytest.mark.parametrize("bare", [False, True])
def test_a_body_under_the_name_of_a_language_model_opens_as_a_body(
    tmp_path, architecture, bare, capsys
):
    folder = published(tmp_path / "a", architecture, tie_word_embeddings=False)
    found = stored(folder)
    (head,) = {"lm_head.weight", "embed_out.weight"} & found.keys()
    del found[head]
    prefix = FAMILIES[architecture].prefix
    store(folder, {name.removeprefix(prefix if bare else ""): x for name, x in found.items()})
    source = open_checkpoint(folder)
    assert source.config.predicts == "states"
    body = BODIES[architecture]
    assert source.notes == (f"{head} is missing, so the model is read as a {body}, without a head",)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert content(tmp_path / "b")["architectures"] == [body]
    assert not [name for name in stored(tmp_path / "b") if name.startswith(prefix)]
    # A tied head has no tensor.
    change(folder, tie_word_embeddings=True)
    assert open_checkpoint(folder).config.predicts == "tokens"
