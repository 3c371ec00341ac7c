"""Every architecture, saved by `transformers`, is converted, read in parts, compared and printed."""

import json

import numpy as np
import pytest
from checkpoints import contents, tensors
from transformers_models import assert_alike, cases, cases_by_type, made, ours, run, to

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES

pytestmark = pytest.mark.interop
# The commands for a folder in shards, and for two folders, do not depend on the architecture. These
# have fused kernels, experts, post-norms, images, and stages.
SOME = ["GPT2LMHeadModel", "MixtralForCausalLM", "BertForMaskedLM", "ViTForImageClassification"]
SOME += ["Swinv2ForImageClassification"]


@cases_by_type
def test_to_orbax_and_back_to_the_bit(tmp_path, architecture, which):
    made(tmp_path / "a", architecture, which)
    run("convert", tmp_path / "a", tmp_path / "orbax", "--to", "orbax")
    run("convert", tmp_path / "orbax", tmp_path / "b", "--to", "hf")
    run("convert", tmp_path / "a", tmp_path / "c", "--to", "hf")
    before, after, direct = (contents(tmp_path / name) for name in "abc")
    config = checkpoints.open_checkpoint(tmp_path / "a").config
    leaves = checkpoints.open_checkpoint(tmp_path / "a").leaves
    family, sizes = FAMILIES[architecture], config.sizes()
    names = family.names(config)
    places = [(s, i) for p, s in names.items() for i in s.layers(leaves[p].layers)]
    stored = {n.format(layers=i) for s, i in places for n in s.of_experts(sizes)}
    first, last = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert last.keys() == stored | family.copies(config).keys() and stored <= first.keys()
    # Gemma stores norm scales minus one. Adding and subtracting one rounds them to 1.2e-7 in
    # float32 and loses nothing in bfloat16.
    rounded = {s.name.format(layers=i) for s in names.values() if s.moved for i in (0, 1)}
    assert rounded or after["model.safetensors"] == direct["model.safetensors"]
    for name in stored:
        atol = 1.2e-7 if name in rounded else 0
        np.testing.assert_allclose(last[name], first[name], rtol=0, atol=atol, err_msg=name)
    assert json.loads(after["config.json"]) == json.loads(direct["config.json"])
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])


@pytest.mark.parametrize("architecture", SOME)
def test_sharded_by_transformers_and_here(tmp_path, architecture):
    made(tmp_path / "a", architecture, max_shard_size="3KB")
    run("convert", tmp_path / "a", tmp_path / "b", "--shard-size", "4KB")
    for name in "ab":
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        assert_alike(tmp_path / name)


@cases
def test_a_model_of_ours_becomes_one_of_theirs(tmp_path, architecture, which):
    """Save without an existing ``config.json``."""
    config, params = checkpoints.load(made(tmp_path / "a", architecture, which))
    # Such models classify by the last token, if the padding token is known.
    settings = {"pad_token_id": 1} if config.predicts == "classes" and config.causal else {}
    checkpoints.save(tmp_path / "b", config, params, settings=settings)
    assert checkpoints.load(tmp_path / "b")[0] == config
    found = assert_alike(tmp_path / "b")
    np.testing.assert_allclose(found, ours(tmp_path / "a"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", SOME)
def test_report_and_inspect(tmp_path, architecture, capsys):
    config = checkpoints.open_checkpoint(made(tmp_path / "a", architecture)).config
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "llama_pro", "--layers", to(config, 3))
    capsys.readouterr()
    run("report", tmp_path / "a", tmp_path / "b")
    assert "max |a - b|" in (said := capsys.readouterr().out)
    if not config.pre_norm:  # a block that adds nothing still applies its norm
        return
    assert float(said.split("max |a - b| ")[1].split(",")[0]) < 1e-5
    run("inspect", tmp_path / "b")
    assert "blocks/attention/query/kernel" in capsys.readouterr().out
