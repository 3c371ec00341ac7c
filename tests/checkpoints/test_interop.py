"""Checkpoints on disk agree with `transformers` and with `grow` in memory, and errors are reported."""

import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints import CONFIG, change, saved, tensors

from jaxgrow import checkpoints, grow, operators, sharding
from jaxgrow.checkpoints import CheckpointError, Grown, Interpolated, Loaded, Output, orbax
from jaxgrow.growth.maps import AxisMap
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.growth.merge import interpolate

SIZES = {"layers": 4, "embed": 12, "heads": 4, "mlp": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Save a checkpoint that no test changes."""
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def store(folder: Path, found: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(found, folder / "model.safetensors")


@cache
def axes(config):
    return config.axes()


# --- streaming equals growing in memory ---


GROWTHS = {
    "stack": operators.stack(SIZES, {"layers": 7}),
    "llama_pro": operators.llama_pro(SIZES, {"layers": 6}),
    "coalesce": operators.coalesce(SIZES, heads=((0, 2), (1, 3)), layers=((0, 3), (1,), (2,))),
    "decoalesce": operators.decoalesce(
        {n: 2 * s for n, s in SIZES.items()}, heads="far", layers="far"
    ),
    "hypercloning": operators.hypercloning(SIZES, {"embed": 24, "heads": 8, "mlp": 40}),
    "aki": operators.aki(SIZES, {"layers": 6, "heads": 6, "embed": 18}, seed=1),
    "staged": operators.staged(SIZES, {"embed": 24, "heads": 8, "mlp": 40}),
    "dense": {"layers": AxisMap(*[np.linspace(-1, 1, 20).reshape(5, 4)] * 2)},
}
DEEPER = operators.stack(SIZES, {"layers": 5})


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, "float32") for name in GROWTHS), ("coalesce", "bfloat16"), ("dense", "bfloat16"),
])  # fmt: skip
def test_streamed_growth_is_growth_in_memory(tmp_path, name, dtype):
    source = saved(tmp_path / "a", dtype=dtype)
    checkpoints.transform(source, Output(tmp_path / "b", shard=3000), GROWTHS[name])
    config, params = checkpoints.load(tmp_path / "b")
    expected = grow(GROWTHS[name], tiny.params(CONFIG, dtype=dtype), axes(CONFIG))
    assert config == CONFIG.resized(GROWTHS[name])
    # Streaming layer by layer may change the order of sums.
    exact = name in ("stack", "hypercloning", "decoalesce", "llama_pro")
    chex.assert_trees_all_equal_dtypes(params, expected)
    near = dict(rtol=1e-6 if dtype == "float32" else 1e-2, atol=1e-6)
    chex.assert_trees_all_close(params, expected, **(dict(rtol=0, atol=0) if exact else near))


def test_interpolation_is_that_of_the_library(tmp_path):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1, dtype="float64")
    both = Interpolated(checkpoints.open_checkpoint(a), checkpoints.open_checkpoint(b), 0.25)
    expected = interpolate(checkpoints.load(a)[1], checkpoints.load(b)[1], 0.25)
    chex.assert_trees_all_equal(both.params(), expected)
    chex.assert_trees_all_equal_dtypes(both.params(), tiny.params(CONFIG, dtype="float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_is_saved_is_loaded_to_the_bit(tmp_path, dtype):
    for config in (CONFIG, replace(CONFIG, tied=False)):
        params = tiny.params(config, dtype=dtype)
        checkpoints.save(tmp_path / "a", config, params, overwrite=True)
        found, again = checkpoints.load(tmp_path / "a")
        assert found == config
        chex.assert_trees_all_equal(again, params)
        chex.assert_trees_all_equal_dtypes(again, params)


def test_mixed_dtypes_stay_and_lie_where_the_library_reads_them(tmp_path):
    params = tiny.params(CONFIG, dtype="bfloat16")
    params["final_norm"] = jax.tree.map(lambda x: x.astype(np.float32), params["final_norm"])
    key = params["blocks"]["attention"]["key"]
    key["bias"] = key["bias"].astype(np.float32)
    checkpoints.save(tmp_path / "a", CONFIG, params)
    found = tensors(tmp_path / "a")
    assert found["transformer.ln_f.weight"].dtype == np.float32
    # A fused tensor has a single dtype, which must hold all of its parts.
    assert found["transformer.h.0.attn.c_attn.bias"].dtype == np.float32
    assert found["transformer.wte.weight"].dtype == jnp.bfloat16
    wide = [jax.tree.map(np.float32, x) for x in (checkpoints.load(tmp_path / "a")[1], params)]
    chex.assert_trees_all_equal(*wide)


def test_only_the_layers_that_a_map_names_are_read(folder, monkeypatch):
    read, source = [], checkpoints.open_checkpoint(folder)
    once = source.read
    monkeypatch.setattr(source, "read", lambda *a: read.append(a) or once(*a))
    growth = operators.coalesce(SIZES, layers=((0, 3), (1, 2)))
    Grown(source, growth).read("blocks/mlp/up/kernel", 0)
    assert read == [("blocks/mlp/up/kernel", 0), ("blocks/mlp/up/kernel", 3)]


def test_what_only_moves_is_copied_byte_by_byte(tmp_path, folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was computed")

    monkeypatch.setattr(checkpoints.open_checkpoint(folder).__class__, "read", refuse)
    growth = operators.midas(SIZES, {"layers": 6})
    checkpoints.transform(folder, tmp_path / "b", growth)
    old, new = tensors(folder), tensors(tmp_path / "b")
    name = "transformer.h.{}.attn.c_attn.weight"
    for i, j in enumerate([0, 1, 0, 1, 2, 3]):
        np.testing.assert_array_equal(new[name.format(i)], old[name.format(j)])


def test_tensors_without_the_model_prefix_are_found(tmp_path):
    """The published GPT-2 has such names and also stores its masks."""
    folder = saved(tmp_path / "a")
    bare = {name.removeprefix("transformer."): x for name, x in tensors(folder).items()}
    bare |= {f"h.{i}.attn.bias": np.ones((1, 1, 7, 7), np.float32) for i in range(4)}
    params = checkpoints.load(folder)[1]
    store(folder, bare)
    chex.assert_trees_all_equal(checkpoints.load(folder)[1], params)
    checkpoints.transform(folder, tmp_path / "b", DEEPER)
    assert "transformer.h.4.attn.c_attn.bias" in tensors(tmp_path / "b")


def test_a_tied_head_is_dropped_if_equal_and_refused_otherwise(tmp_path):
    folder = saved(tmp_path / "a")
    found = tensors(folder)
    head = found["transformer.wte.weight"].copy()
    store(folder, found | {"lm_head.weight": head})
    checkpoints.transform(folder, tmp_path / "b", DEEPER)
    assert "lm_head.weight" not in tensors(tmp_path / "b")
    head[5, 5] += 1  # in the middle
    store(folder, found | {"lm_head.weight": head})
    says = r"ties lm_head.weight to .*wte.weight, but both are stored, and they differ"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.open_checkpoint(folder)
    change(folder, tie_word_embeddings=False)
    checkpoints.transform(folder, tmp_path / "c", DEEPER)
    np.testing.assert_array_equal(tensors(tmp_path / "c")["lm_head.weight"], head)


# --- other files of the folder ---


def test_unknown_keys_and_files_are_kept_and_growth_recorded(tmp_path, folder):
    about = {"operator": "stack", "target": {"layers": 5}}
    checkpoints.transform(folder, tmp_path / "b", DEEPER, about)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "b"))
    assert after == before | {"n_layer": 5} and after["their_own"] == {"key": [1, 2]}
    assert (tmp_path / "b/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
    assert {key: record[key] for key in about} == about
    assert record["sources"] == [checkpoints.open_checkpoint(folder).fingerprint()]
    assert record["config"]["layers"] == 5


def test_the_fingerprint_is_of_the_numbers_not_of_the_files(tmp_path, folder):
    found = [saved(tmp_path / "sharded", shard=2000), saved(tmp_path / "other", seed=1), folder]
    sharded, other, same = (checkpoints.open_checkpoint(f).fingerprint() for f in found)
    assert sharded == same != other


@pytest.mark.parametrize("at_once", [1, 2**28])
def test_the_fingerprint_of_orbax_is_the_same_in_parts(tmp_path, folder, at_once, monkeypatch):
    hf = checkpoints.open_checkpoint(folder)
    checkpoints.write(hf, Output(tmp_path / "b", "orbax"))
    monkeypatch.setattr(orbax, "_AT_ONCE", at_once)
    source, read = checkpoints.open_checkpoint(tmp_path / "b"), []
    load = orbax.ocp.load
    monkeypatch.setattr(orbax.ocp, "load", lambda *a: read.append(a) or load(*a))
    found = source.fingerprint()
    assert len(read) == (len(source.leaves) if at_once == 1 else 1)
    source.params()
    assert source.fingerprint() == found


def test_save_like(tmp_path, folder):
    wide = replace(CONFIG, mlp=24)
    checkpoints.save(tmp_path / "b", wide, tiny.params(wide, dtype="float32"), like=folder)
    assert json.loads((tmp_path / "b/config.json").read_text())["their_own"] == {"key": [1, 2]}
    assert (tmp_path / "b/tokenizer.json").exists()
    assert checkpoints.load(tmp_path / "b")[0] == wide


@pytest.mark.parametrize(
    "without", [["n_inner"], ["n_inner", "tie_word_embeddings", "layer_norm_epsilon"]]
)
def test_n_inner_may_be_null_and_defaults_left_out(tmp_path, without):
    config = replace(CONFIG, mlp=48)
    folder = saved(tmp_path / "a", config)
    file = folder / "config.json"
    kept = {k: x for k, x in json.loads(file.read_text()).items() if k not in without}
    file.write_text(json.dumps(kept | ({"n_inner": None} if len(without) == 1 else {})))
    assert checkpoints.load(folder)[0] == config


# --- errors ---


def test_missing_unknown_and_misshapen_tensors_are_listed(tmp_path):
    folder, wte = saved(tmp_path / "a"), np.ones((11, 13), np.float32)
    found = tensors(folder) | {"transformer.wte.weight": wte, "transformer.extra": wte}
    del found["transformer.h.2.ln_1.bias"]
    store(folder, found)
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(folder)
    text = str(error.value)
    assert "missing: transformer.h.2.ln_1.bias" in text
    assert "unknown: transformer.extra in model.safetensors" in text
    assert (
        "wte.weight in model.safetensors has shape (11, 13), but config.json requires (11, 12)"
        in text
    )
    assert "(axes: vocab embed)" in text


@pytest.mark.parametrize(("values", "message"), [
    ({"architectures": ["T5Model"]}, r'is \["T5Model"\], which is not supported.* `jaxgrow architectures` lists'),
    ({"architectures": None}, r"architectures is null.* Write its class there, one of GPT2LMHeadModel, GPT2For"),
    ({"architectures": None, "model_type": "t5"}, "architectures is null, which is not supported"),
    ({"model_type": "gpt_bigcode"}, 'model_type is "gpt_bigcode", but jaxgrow supports GPT2LMHeadModel only with "gpt2"'),
    ({"n_layer": None}, "n_layer is null, but should be an integer"),
    ({"n_layer": "4"}, 'n_layer is "4", but should be an integer'),
    ({"n_layer": True}, "n_layer is true, but should be an integer"),
    ({"n_layer": 10**30}, "n_layer is 10+, but a size must be an integer from 1"),
    ({"n_layer": 10**9}, "1000000000 layers, but the folder has only 52 tensors"),
    ({"n_head": 5}, "hidden size 12 is not divisible by 5 heads"),
    ({"vocab_size": -3}, "vocab_size is -3, but a size must be"),
    ({"vocab_size": 12}, r"transformer.wte.weight .* shape \(11, 12\), but config.json requires \(12, 12\)"),
    ({"layer_norm_epsilon": "x"}, 'layer_norm_epsilon is "x", but should be a number'),
    ({"activation_function": "relu"},
     'activation_function is "relu", but jaxgrow supports GPT2LMHeadModel only with "gelu_new" or'),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    # The tensors are those of a GPT-2.
    ({"quantization_config": {"bits": 4}}, "dequantize"),
])  # fmt: skip
def test_configs_that_are_wrong_or_not_computed(tmp_path, values, message):
    folder = saved(tmp_path / "a")
    change(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_a_config_that_is_no_json_object(tmp_path, text):
    folder = saved(tmp_path / "a")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoints.open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../a/model.safetensors", "/etc/passwd", "..", "", "a\\b", "x.bin"]
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, name):
    folder = saved(tmp_path / "a", shard=2000)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["transformer.wte.weight"] = name
    file.write_text(json.dumps(index))
    says = (
        r"not the name of a file in this folder|not a \.safetensors file. Download the index again"
    )
    with pytest.raises(CheckpointError, match=says):
        checkpoints.open_checkpoint(folder)


def test_outside_links_are_refused_and_cache_links_followed(tmp_path):
    folder = saved(tmp_path / "models--x" / "snapshots" / "1")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    before = checkpoints.load(folder)[1]
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    chex.assert_trees_all_equal(checkpoints.load(folder)[1], before)
    checkpoints.transform(folder, tmp_path / "b", DEEPER)
    assert not any(f.is_symlink() for f in (tmp_path / "b").iterdir())
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        elsewhere = (blobs / name).rename(tmp_path / name)
        (folder / name).unlink()
        (folder / name).symlink_to(elsewhere)
        with pytest.raises(CheckpointError, match=f"{name} is a link to .*, outside the folder"):
            checkpoints.transform(folder, tmp_path / "c", DEEPER)
    assert not (tmp_path / "c").exists()


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    folder = saved(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin\. Pickled .*save_pretrained"):
        checkpoints.open_checkpoint(folder)


def test_shards_that_disagree_with_their_index(tmp_path):
    folder = saved(tmp_path / "a", shard=2000)
    first = min(folder.glob("model-*"))
    (folder / "copy").write_bytes(first.read_bytes())
    first.unlink()
    with pytest.raises(CheckpointError, match=f"Download {first.name}, which the index names"):
        checkpoints.open_checkpoint(folder)
    # The index decides: the tensors that it assigns to the first file are not there.
    first.write_bytes(max(folder.glob("model-*")).read_bytes())
    with pytest.raises(CheckpointError, match=r"missing: transformer\.wte\.weight"):
        checkpoints.open_checkpoint(folder)
    (folder / "copy").rename(first)
    checkpoints.open_checkpoint(folder)


def test_weights_of_a_dtype_that_nobody_computes_with(tmp_path):
    folder = saved(tmp_path / "a")
    store(folder, tensors(folder) | {"transformer.ln_f.bias": np.ones(12, np.int8)})
    says = r"'transformer.ln_f.bias' has dtype I8; convert it to one of F64"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.open_checkpoint(folder)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    source = checkpoints.open_checkpoint(saved(tmp_path / "a"))
    os.truncate(tmp_path / "a/model.safetensors", 5000)
    for read in (source.params, lambda: checkpoints.transform(source, tmp_path / "b", DEEPER)):
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            read()
    assert not (tmp_path / "b").exists()


def test_mismatched_growths_and_unknown_models_are_refused(tmp_path, folder):
    source, params = checkpoints.open_checkpoint(folder), tiny.params(CONFIG)
    with pytest.raises(CheckpointError, match="axis 'layers' has size 4, but its map takes 3 to 6"):
        checkpoints.transform(folder, tmp_path / "b", operators.stack({"layers": 3}, {"layers": 6}))
    says = r"no setting for head_dim 3 .it would be 6.; embed=12 or heads=8 fits, or --to orbax"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.transform(folder, tmp_path / "b", operators.hypercloning(SIZES, {"embed": 24}))
    one = SparseMap(np.zeros((1, 1), int), np.ones((1, 1)), 4 * 12)
    with pytest.raises(CheckpointError, match="layer by layer"):
        Grown(source, {("layers", "embed"): AxisMap(one, one, joint=((1, 1), (4, 12)))})
    other = replace(CONFIG, mlp=8)
    with pytest.raises(CheckpointError, match="the two models differ: mlp 20 and 8"):
        Interpolated(source, Loaded(other, tiny.params(other)), 0.5)
    params = {**params, "final_norm": {"scale": np.ones(12)}, "x": 1.0}
    with pytest.raises(CheckpointError, match=r"missing: final_norm/bias(.|\n)*unknown: x"):
        checkpoints.save(tmp_path / "b", CONFIG, params)
    assert not list(tmp_path.iterdir())


def test_damaged_orbax_folders(tmp_path, folder):
    checkpoints.write(checkpoints.open_checkpoint(folder), Output(tmp_path / "o", "orbax"))
    record = (tmp_path / "o/jaxgrow.json").read_text()
    for text, message in (
        ("{}", "'config' does not describe a model"),
        (record.replace('"mlp": 20', '"mlp": 21'), "should have"),
    ):
        (tmp_path / "o/jaxgrow.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load(tmp_path / "o")
    (tmp_path / "o/jaxgrow.json").write_text(record)
    checkpoints.load(tmp_path / "o")
    files = [file for file in (tmp_path / "o/params").rglob("*") if file.is_file()]
    arrays = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(arrays.read_bytes())
    content[len(content) // 2] ^= 1
    arrays.write_bytes(content)
    says = r"params is damaged: .* has changed; restore it from another copy"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.load(tmp_path / "o")


@pytest.mark.parametrize("layers", [False, True], ids=["rules", "layers divided, too"])
def test_onto_a_mesh_a_model_is_read_and_grown_in_parts(folder, monkeypatch, layers):
    """Values and shardings equal a model that is read completely, grown, and then sharded."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    rules = {**sharding.RULES, **({"layers": "fsdp", "embed": "data"} if layers else {})}
    config, params = checkpoints.load(folder)
    growth = operators.fpi(SIZES, {"heads": 6, "mlp": 30})
    grown = {"as it is": params, "grown": grow(growth, params, axes(config))}
    monkeypatch.setattr(checkpoints.Source, "params", None)
    source = checkpoints.open_checkpoint(folder)
    for name, found in {"as it is": source, "grown": Grown(source, growth)}.items():
        parts = found.shard(mesh, rules)
        whole = sharding.shard_params(grown[name], axes(config), mesh, rules)
        chex.assert_trees_all_equal(jax.device_get(parts), jax.device_get(whole))
        for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
            assert a.sharding == b.sharding
    if not layers:
        chex.assert_trees_all_equal(checkpoints.load(folder, mesh)[1], source.shard(mesh))


@pytest.mark.extra
def test_loading_a_part_needs_little_more_host_memory(tmp_path):
    """Memory is measured by NumPy's allocations, for one of four devices that share the model."""
    config = replace(CONFIG, layers=8, embed=64, mlp=4096)
    whole = Loaded(config, jax.device_get(jax.jit(config.init)(jax.random.key(0))))
    leaf = whole.leaves["blocks/mlp/up/kernel"]
    index = (slice(None), slice(0, 16), slice(None))
    tracemalloc.start()
    (part,) = whole._slices("blocks/mlp/up/kernel", [index])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.nbytes == leaf.size / 4 and peak < leaf.size / 4 + 1.1 * leaf.size / 8


@pytest.mark.extra
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process"
)
def test_reading_stays_small(tmp_path):
    """The peak memory for stacking a 50 MB model, without libraries, is a fraction of its size."""
    config = replace(CONFIG, layers=4, embed=512, heads=8, head_dim=64, mlp=2048)
    shapes = tiny.shapes(config)
    one = jax.tree.map(lambda x: np.broadcast_to(np.float32(1), x.shape), shapes)
    checkpoints.save(tmp_path / "a", config, one)
    code = (
        "import json, pathlib, re, sys; from jaxgrow.cli.program import main\n"
        "small, large, out = sys.argv[1:]\n"
        "grow = lambda src, dst: main(['grow', src, dst, '--method', 'stack', '--layers', '8'])\n"
        # not getrusage, which starts at the memory of the parent process
        "status = pathlib.Path('/proc/self/status')\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', status.read_text())[1])\n"
        "main(['grow', small, out + '0', '--method', 'stack', '--layers', '8'])\n"
        "before = peak(); grow(large, out); print(json.dumps((peak() - before) * 1024))"
    )
    saved(tmp_path / "small")
    command = [sys.executable, "-c", code, *(str(tmp_path / n) for n in ("small", "a", "b"))]
    root = Path(checkpoints.__file__).parents[2]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    size = (tmp_path / "b/model.safetensors").stat().st_size
    assert size > 90e6
    assert int(out.splitlines()[-1]) < 0.25 * size
