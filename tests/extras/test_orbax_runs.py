"""Orbax checkpoints of other trainers grow leaf by leaf as trees in memory do.

The references are `grow` and `grow_optimizer` in memory. The trees have the layout of MaxText,
Tunix and nanodo. `test_third_party` uses the real packages.
"""

import json
import re
import weakref
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from foreign_runs import maxtext_params
from orbax.checkpoint import v1 as ocp

from jaxgrow import grow, grow_optimizer, operators, stack_layers, unstack_layers
from jaxgrow.axes import path
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.cli.program import main
from jaxgrow.extras.integrations import command, copying, formats, orbax_run
from jaxgrow.extras.integrations.formats import FORMATS, MAXTEXT, TUNIX
from jaxgrow.extras.integrations.orbax_tree import OrbaxTree, Writer
from jaxgrow.untrusted import UntrustedError

E, L, H, K, D, M, V = 12, 3, 4, 2, 5, 20, 11
WIDE = {"embed": 24, "heads": 8, "kv_heads": 4, "mlp": 40}
WIDER = "--method hypercloning --embed 24 --heads 8 --kv-heads 4 --mlp 40 --optimizer"
DEEPER = "--method stack --layers 6"
TX = optax.adamw(1e-3)
maxtext = partial(maxtext_params, sizes=(E, L, H, K, D, M, V))
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@jax.jit
def state_of(params: dict):
    """Return the optimizer state after two steps."""
    state = TX.init(params)
    for size in (1.0, 0.5):
        _, state = TX.update(jax.tree.map(lambda x, s=size: s * x, params), state, params)
    return state


def written(folder: Path, params: dict, state=None, step: int = 3) -> Path:
    state = state_of(params) if state is None else state
    tree = {"params": params, "opt_state": state, "step": jax.numpy.int32(step)}
    with ocp.training.Checkpointer(folder) as checkpoints:
        checkpoints.save_checkpointables(step, {"items": tree})
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a run of MaxText that no test changes."""
    return written(tmp_path_factory.mktemp("trained") / "run", maxtext(1))


def grown(source: Path, target: Path, words: str, *more: object) -> int:
    """Run ``jaxgrow grow`` and return its status."""
    return main(["grow", str(source), str(target), *words.split(), *map(str, more)])


def axes_of(run, params: dict) -> dict:
    """Return the axis names of the parameters of a run of MaxText."""
    return jax.tree_util.tree_map_with_path(
        lambda p, _: run.axes[path(p).removeprefix("params/")], params
    )


def restored(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays as Orbax itself reads them."""
    with ocp.training.Checkpointer(folder) as checkpoints:
        tree = checkpoints.load_checkpointables()["items"]
    return {path(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_layers_are_taken_from_a_list(tmp_path, trained):
    assert grown(trained, tmp_path / "b", "--layers-from 2,0") == 0
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
    assert record["arguments"]["sources"] == [2, 0] and record["sizes"]["layers"] == 2
    old, new = restored(trained), restored(tmp_path / "b")
    for name, x in old.items():  # the parameters and their moments
        expected = x[:, [2, 0]] if "decoder/layers/" in name else x
        np.testing.assert_array_equal(new[name], expected, name)


@pytest.mark.parametrize(("scan", "policy"), [
    (1, "exact"),  # MaxText's default is 1
    pytest.param(0, "exact", marks=pytest.mark.slow),
    pytest.param(None, "copy", marks=pytest.mark.slow),
], ids=lambda x: {0: "axis 0", 1: "axis 1", None: "unscanned"}.get(x, x))  # fmt: skip
def test_a_maxtext_tree_grows_as_in_memory(tmp_path, scan, policy):
    params = maxtext(scan)
    state = state_of(params)
    folder, layers = written(tmp_path / "a", params, state), "layers_{}"
    run = command.open_run(folder, None, None)
    assert run.format is MAXTEXT and run.prefix == "params/params/"
    names = ("embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "vocab")
    assert run.sizes() == dict(zip(names, (E, L, H, K, D, M, V), strict=True))
    if scan is None:
        params, state = stack_layers(params, layers), stack_layers(state, layers)
    axes, pattern = axes_of(run, params), layers if scan is None else None
    for source, target, words, operator, new in (
        (folder, tmp_path / "b", WIDER, operators.hypercloning, WIDE),
        (tmp_path / "b", tmp_path / "c", "--method llama_pro --layers 6 --optimizer",
            operators.llama_pro, {"layers": 6}),
    ):  # fmt: skip
        assert grown(source, target, words, policy) == 0
        growth = operator(command.open_run(source, None, None).sizes(), new)
        state = grow_optimizer(TX, state, growth, params, axes, policy, layers=pattern)
        params = grow(growth, params, axes)
    if scan is None:
        params, state = unstack_layers(params, layers), unstack_layers(state, layers)
    expected = {"params": params, "opt_state": state, "step": 3}
    flat = {path(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    found = restored(tmp_path / "c")
    assert {p: x.shape for p, x in found.items()} == {p: x.shape for p, x in flat.items()}
    for name, x in flat.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-7, err_msg=name)
    settings = json.loads((tmp_path / "c" / "jaxgrow.json").read_text())["settings"]
    assert settings["base_num_decoder_layers"] == 6 and settings["base_emb_dim"] == 24


def accumulated(folder: Path, every: int, steps: int):
    """Write a run that accumulates gradients; return its optimizer, parameters, state and folder."""
    tx = optax.MultiSteps(TX, every).gradient_transformation()
    params = maxtext(1)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        _, state = update(params, state, params)
    return tx, params, state, written(folder, params, state)


def test_accumulated_gradients_grow_as_gradients(tmp_path):
    """The state of nanodo, and of Tunix with gradient accumulation, is one of `MultiSteps`."""
    tx, params, state, source = accumulated(tmp_path / "a", 2, 3)
    assert grown(source, tmp_path / "b", WIDER, "exact") == 0
    run = command.open_run(source, None, None)
    growth = operators.hypercloning(run.sizes(), WIDE)
    state = grow_optimizer(tx, state, growth, params, axes_of(run, params), "exact")
    found = restored(tmp_path / "b")
    for p, x in jax.tree_util.tree_leaves_with_path({"opt_state": state}):
        np.testing.assert_allclose(found[path(p)], x, rtol=1e-5, atol=1e-7, err_msg=path(p))


@pytest.mark.parametrize("name", ["ema", "opt_state/z"])
def test_a_copy_or_an_average_of_the_parameters_grows_like_them(tmp_path, name):
    """An average sorts before the parameters, and `drop` sets only moments to zero."""
    params = maxtext(1)
    if name == "opt_state/z":
        of = {"opt_state": optax.contrib.schedule_free_sgd(1e-3).init(params)}
    else:
        of = {name: params, "opt_state": state_of(params)}
    tree = {"params": params, **of}
    with ocp.training.Checkpointer(tmp_path / "a") as checkpoints:
        checkpoints.save_checkpointables(3, {"items": tree})
    run = command.open_run(tmp_path / "a", None, None)
    assert run.prefix == "params/params/"
    for policy in ("copy", "drop", "exact"):
        assert grown(tmp_path / "a", tmp_path / policy, WIDER, policy) == 0
        found = restored(tmp_path / policy)
        averages = [path for path in found if path.startswith(f"{name}/")]
        assert len(averages) == len(jax.tree.leaves(params))
        for average in averages:
            of = "params/" + average.removeprefix(f"{name}/")
            np.testing.assert_array_equal(found[average], found[of], err_msg=average)


def test_an_average_of_updates_is_a_moment_and_an_average_alone_is_a_model():
    paths = ("opt_state/0/ema/", "ema/params/", "opt_state/0/nu/", "model_averaging/params/")
    assert [formats.gradient_power(path) for path in paths] == [1, 0, 2, 0]
    paths = [start + mark for start in ("ema/", "opt_state/mu/") for mark in MAXTEXT.marks]
    assert MAXTEXT.prefix(dict.fromkeys(paths)) == "ema/"


def test_dropped_micro_batches_begin_anew(tmp_path):
    """Otherwise, `MultiSteps` would divide the new gradients by a number that includes the old ones."""
    *_, source = accumulated(tmp_path / "a", 3, 4)
    assert grown(source, tmp_path / "b", WIDER, "drop") == 0
    found = restored(tmp_path / "b")
    assert all(not x.any() for name, x in found.items() if name.startswith("opt_state/"))
    assert found["step"] == 3 and found["params/params/decoder/logits_dense/kernel"].any()


def in_flax_names(tmp_path: Path, tx: optax.GradientTransformation) -> tuple[Path, Path, dict]:
    """A run whose blocks and final norm both have the name that Flax gives to the first norm."""
    rng = np.random.default_rng(0)

    def put(*shape):
        return jax.numpy.asarray(rng.normal(size=shape), "float32")

    def norm():
        return {"LayerNorm_0": {"scale": put(E)}}

    params = {"tokens": {"embedding": put(V, E)}, **norm()}
    params |= {f"blocks_{i}": {**norm(), "up": {"kernel": put(E, M)}} for i in range(2)}
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    ocp.save(tmp_path / "a", {"params": params, "opt_state": state})
    rows = {
        "tokens/embedding": ["vocab", "embed"],
        "LayerNorm_0/scale": ["embed.in.norm.scale"],
        "*/LayerNorm_0/scale": ["embed.norm.scale"],
        "*/kernel": ["embed.in", "mlp"],
    }
    about = {"names": rows, "layers": "blocks_{}", "params": "tokens/embedding"}
    (tmp_path / "names.json").write_text(json.dumps(about))
    return tmp_path / "a", tmp_path / "names.json", {"params": params, "opt_state": state}


def test_a_module_in_a_layer_may_have_the_name_of_one_outside(tmp_path):
    source, names, old = in_flax_names(tmp_path, optax.scale_by_adam())
    run = command.open_run(source, None, names)
    templates = [place.template for _, place in run.states]
    assert len(templates) == len(set(templates)) == 2 * len(run.places)
    (tmp_path / "b").mkdir()
    growth = operators.interleave(run.sizes(), {"layers": 4})
    orbax_run.grow_run(run, growth, "copy", tmp_path / "b")
    tree = OrbaxTree(tmp_path / "b")
    for i in range(4):
        found = tree.read(f"opt_state/mu/blocks_{i}/LayerNorm_0/scale")
        expected = old["opt_state"].mu[f"blocks_{i // 2}"]["LayerNorm_0"]["scale"]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("change", "says"), [
    (lambda x: x.astype("complex64"), "does not consist of real numbers: .*nu.* complex64"),
    (lambda x: x.astype("int32"), "does not consist of real numbers: .*nu.* int32"),
    (lambda x: x * np.nan, "has NaN or infinite values"),
    (lambda x: -x - 1, "or negative second moments"),
    (lambda x: x[..., :1], "arrays whose axes are unknown"),
], ids=["complex", "integers", "NaN", "negative", "shape"])  # fmt: skip
def test_moments_that_are_no_real_numbers_are_an_error(tmp_path, capsys, change, says):
    params = maxtext(1)
    scale, *rest = state_of(params)
    state = (scale._replace(nu=jax.tree.map(change, scale.nu)), *rest)
    folder = written(tmp_path / "a", params, state)
    assert grown(folder, tmp_path / "b", DEEPER, "--optimizer", "exact") == 1
    found = capsys.readouterr().err
    assert re.fullmatch(f"error: .*{says}.*\n", found), found
    assert not (tmp_path / "b").exists()
    if "Use --optimizer drop" in found:
        assert grown(folder, tmp_path / "b", DEEPER, "--optimizer", "drop") == 0


def test_a_state_of_some_layers_only_is_refused(tmp_path):
    def first(params):
        return {name: name == "blocks_0" for name in params}

    source, names, _ = in_flax_names(tmp_path, optax.masked(optax.scale_by_adam(), first))
    run = command.open_run(source, None, names)
    with pytest.raises(CheckpointError, match=r"blocks_0/up/kernel .* for all layers or for none"):
        orbax_run.growth_jobs(run, operators.stack(run.sizes(), {"layers": 4}), "copy")
    with pytest.raises(ValueError, match="policy must be 'drop', 'copy' or 'exact', not 'exat'"):
        orbax_run.growth_jobs(run, {}, "exat")


def test_paths_may_contain_what_has_a_meaning_in_a_url(tmp_path):
    """CI systems, for example, name the folder of a branch ``feature%2Fname``."""
    folder, target = written(tmp_path / "a%2Fb", maxtext(1), {}), tmp_path / "#1 ?"
    assert grown(folder, target, DEEPER) == 0
    old, new = restored(folder), restored(target)
    name = "params/params/decoder/layers/mlp/wo/kernel"
    np.testing.assert_array_equal(new[name], np.tile(old[name], (1, 2, 1)))


def test_a_run_in_a_read_only_folder_grows_into_a_writable_one(tmp_path):
    folder, target = written(tmp_path / "a", maxtext(1), {}), tmp_path / "b"
    (folder / "3" / "iterator_0").mkdir()
    (folder / "3" / "iterator_0" / "state.json").write_text("{}")
    every = [folder, *folder.rglob("*")]
    for one in every:
        one.chmod(one.stat().st_mode & ~0o222)
    try:
        assert grown(folder, target, DEEPER) == 0
    finally:
        for one in every:
            one.chmod(one.stat().st_mode | 0o200)
    assert (target / "3" / "iterator_0" / "state.json").read_text() == "{}"
    assert all(one.stat().st_mode & 0o200 for one in target.rglob("*"))


def test_a_grown_checkpoint_of_parameters_alone_grows_again(tmp_path):
    """Its item ``params`` and its record also occur in the folders of this library."""
    with ocp.training.Checkpointer(tmp_path / "a") as checkpoints:
        checkpoints.save_checkpointables(3, {"params": maxtext(1)})
    assert grown(tmp_path / "a/3", tmp_path / "b", DEEPER) == 0
    assert grown(tmp_path / "b", tmp_path / "c", "--method stack --layers 12") == 0
    assert command.open_run(tmp_path / "c", None, None).sizes()["layers"] == 12


def test_a_damaged_file_is_an_error(tmp_path, capsys):
    """An interrupted copy of a checkpoint, for example, lacks the end of a file."""
    folder = written(tmp_path / "a", maxtext(1), {})
    file = max(folder.glob("3/items/ocdbt.process_0/d/*"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert grown(folder, tmp_path / "b", DEEPER) == 1
    error = capsys.readouterr().err
    assert "cannot be read, because a file is missing or damaged" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_links_to_steps_are_not_copied(tmp_path):
    """A copy would hold the model before its growth."""
    folder, target = written(tmp_path / "a", maxtext(1), {}), tmp_path / "b"
    (folder / "latest").symlink_to("3")
    (folder / "deleted").symlink_to("2")
    (folder / "logs").mkdir()
    (folder / "logs" / "train.log").write_text("")
    assert grown(folder, target, DEEPER) == 0
    assert {path.name for path in target.iterdir()} == {"3", "logs", "jaxgrow.json"}
    assert (target / "logs" / "train.log").is_file()


@pytest.mark.parametrize(("embed", "factor"), [(3 * E // 2, 2 / 3), (2 * E, None)])
def test_lemon_tells_how_the_eps_of_norms_changes(tmp_path, trained, capsys, embed, factor):
    """Only an uneven width changes it, and only the trainer's config can apply the change."""
    dry = f"--method lemon --dry-run --embed {embed}"
    assert grown(trained, tmp_path / "b", dry) == 0
    out = capsys.readouterr().out
    assert ("eps of all norms: set it to 0.6666667 times" in out) == (factor is not None)
    assert grown(trained, tmp_path / "b", dry, "--json") == 0
    assert json.loads(capsys.readouterr().out).get("norm_eps_factor") == factor


def test_inspect_names_what_it_recognises(tmp_path, capsys):
    folder = written(tmp_path / "a", maxtext(1, tied=True))
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "format maxtext" in out and "opt_state/0/mu/params, opt_state/0/nu/params" in out
    assert "embed.in.norm.scale" in out and "unchanged by a growth: opt_state/0/count, step" in out
    assert main(["inspect", str(folder / "3" / "items"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    names = ("emb_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_decoder_layers")
    sizes = {f"base_{name}": size for name, size in zip(names, (E, H, K, M, L), strict=True)}
    assert about["settings"] == sizes | {"head_dim": D}


def test_one_leaf_is_in_memory_at_a_time(tmp_path, trained, monkeypatch):
    seen, read, write = [], OrbaxTree.read, Writer.write

    def reading(self, name):
        assert not [r for r in seen if r() is not None], f"beside {name} there are other leaves"
        x = read(self, name)
        seen.append(weakref.ref(x))
        return x

    def writing(self, name, x, like):
        seen.append(weakref.ref(x))
        write(self, name, x, like)

    monkeypatch.setattr(OrbaxTree, "read", reading)
    monkeypatch.setattr(Writer, "write", writing)
    run = command.open_run(trained, None, None)
    (tmp_path / "b").mkdir()
    orbax_run.grow_run(run, operators.hypercloning(run.sizes(), WIDE), "exact", tmp_path / "b")
    assert len(seen) == 2 * len(run.tree.arrays)


def test_several_processes_write_one_checkpoint(tmp_path, trained, monkeypatch):
    calls, run = [], command.open_run(trained, None, None)
    growth = operators.hypercloning(run.sizes(), WIDE)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    orbax_run.grow_run(run, growth, "copy", tmp_path / "one")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(orbax_run.multihost_utils, "sync_global_devices", calls.append)
    orbax_run.grow_run(run, growth, "copy", tmp_path / "two", process=1)
    assert not (tmp_path / "two" / "3" / "items" / "_METADATA").exists()
    orbax_run.grow_run(run, growth, "copy", tmp_path / "two", process=0)
    assert calls == ["grow_run"] * 2
    monkeypatch.undo()
    one, two = restored(tmp_path / "one"), restored(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(two[name], x, err_msg=name)
    parts = sorted(p.name for p in (tmp_path / "two" / "3" / "items").glob("ocdbt.process_*"))
    assert parts == ["ocdbt.process_0", "ocdbt.process_1"]


def test_chunks_follow_the_shards():
    """Eight shards along an axis remain eight shards."""
    from jaxgrow.extras.integrations.orbax_tree import Array, _new_chunk

    old = Array((16, 3), np.dtype("float32"), (2, 3))
    assert _new_chunk(old, (32, 3)) == (4, 3) and _new_chunk(old, (17, 6)) == (2, 6)


def test_other_programs_have_a_file_of_names(tmp_path, capsys):
    params = {"a": {"up": jax.numpy.ones((4, 6)), "down": jax.numpy.ones((6, 4))}}
    ocp.save(tmp_path / "a", {"weights": params, "mu": params})
    assert main(["inspect", str(tmp_path / "a")]) == 1
    assert "a checkpoint of an unknown format" in capsys.readouterr().err
    names = {"names": {"a/up": ["embed.in", "mlp"], "*down": ["mlp.in", "embed"]}, "params": "a/up"}
    (tmp_path / "names.json").write_text(json.dumps(names))
    more = ("--names", str(tmp_path / "names.json"))
    assert grown(tmp_path / "a", tmp_path / "b", "--method hypercloning --mlp 12", *more) == 0
    shapes = {p: a.shape for p, a in OrbaxTree(tmp_path / "b").arrays.items()}
    assert shapes == {p: (4, 12) if p.endswith("up") else (12, 4) for p in shapes}
    assert len(shapes) == 4
    (tmp_path / "names.json").write_text("{}")
    with pytest.raises(CheckpointError, match='must contain "names"'):
        formats.from_file(tmp_path / "names.json")


def test_what_does_not_fit_is_refused(tmp_path, trained, capsys):
    params, wide = maxtext(1), "--method hypercloning --embed"
    params["params"]["decoder"]["layers"]["mlp"]["odd"] = {"kernel": jax.numpy.ones((E, L, M))}
    assert main(["inspect", str(written(tmp_path / "a", params, {}))]) == 1
    assert "decoder/layers/mlp/odd/kernel (12, 3, 20)" in capsys.readouterr().err
    for words, status, says in (
        (f"{wide} 13", 1, "needs a multiple of 12"),
        (f"{wide} 24 --format tunix", 1, "does not have format tunix"),
        (f"{wide} 24 --optimizer asymmetric", 2, ""),
        (f"{wide} 24 --dry-run", 0, ""),
    ):
        assert grown(trained, tmp_path / "c", words) == status
        assert says in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_an_option_that_would_have_no_effect_is_refused(tmp_path, trained, capsys):
    weights = (
        "--dtype bfloat16",
        "--to hf",
        "--shard-size 1GB",
        "--noise 0",
        "--seed 1",
        "--loop 0-1x2",
    )
    for option in (*weights, "--lora l", "--lora-only", "--optimizer-state o"):
        assert grown(trained, tmp_path / "b", f"--method hypercloning --embed 24 {option}") == 2
        assert not (tmp_path / "b").exists()
        assert option.split()[0] + ":" in capsys.readouterr().err


# Two or three leaves that a format is recognised by.
TREES = {
    "maxtext": "params/params/decoder/decoder_norm/scale params/params/token_embedder/embedding",
    "tunix": "embedder/input_embedding/value final_norm/w/value layers/0/attn/q_proj/w/value",
    "nanodo": "params/embed/embedding params/pos_embed/embedding params/out_ln/scale",
    "levanter": "model/transformer/norm/weight model/embeddings/token_embeddings/weight",
    "gemma": "params/embedder/input_embedding params/final_norm/scale params/layer_0/attn/attn_vec_einsum/w",
    "easydel": "model/model/norm/kernel model/model/embed_tokens/embedding",
    "bonsai": "model/embedder/embedding/value model/final_norm/scale/value model/lm_head/kernel/value",
    "penzai": "params/transformer/embedder.embeddings params/transformer/final_norm/scale.weights",
    "torchtitan": "model/tok_embeddings/weight model/norm/weight",
}


def test_formats_do_not_claim_each_other():
    found = {name: formats.recognise_format(dict.fromkeys(t.split())) for name, t in TREES.items()}
    assert {name: of and of.name for name, of in found.items()} == {n: n for n in FORMATS}
    assert TUNIX.prefix({}) is None


def test_a_file_that_is_replaced_after_the_check_is_not_followed(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "a").write_text("public")
    (tmp_path / "secret").write_text("secret")
    inside = copying.lies_inside

    def replaced(real: Path, root: Path) -> bool:
        found = inside(real, root)
        real.unlink()
        real.symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(copying, "lies_inside", replaced)
    with pytest.raises(UntrustedError):
        copying.copy_tree(home, tmp_path / "copy", home)
    assert not (tmp_path / "copy" / "a").exists()
