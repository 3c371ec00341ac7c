"""Small runs of real trainers and libraries, for `test_third_party`.

Each function trains a small decoder on one fixed batch and returns the loss before each step. It
saves a checkpoint after step 3. With ``begin=3``, it restores this step from the folder and
continues. The model and the checkpoint code come from the package.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

SMALL = {
    "vocab": 13,
    "context": 7,
    "embed": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "mlp": 32,
    "layers": 2,
}
TOKENS = np.random.default_rng(0).integers(1, SMALL["vocab"], (2, SMALL["context"]))
# The folder of the steps, below the folder of the run.
STEPS = {"gemma": "checkpoints"}
TX = optax.adamw(3e-3)


def cross_entropy(logits: jax.Array) -> jax.Array:
    """The mean loss of the next tokens of the batch."""
    of_each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:])
    return of_each.mean()


def tunix(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """A Llama 3 of Tunix, with its checkpoint manager."""
    manager = pytest.importorskip(
        "tunix.sft.checkpoint_manager", reason="pip install -e '.[third-party-test]'"
    )
    from flax import nnx
    from tunix_models import llama_of_nnx

    model = llama_of_nnx(sizes)()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    checkpoints = manager.CheckpointManager(str(folder))
    places = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    mask = np.tril(np.ones((len(TOKENS), TOKENS.shape[1], TOKENS.shape[1]), bool))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return cross_entropy(model(TOKENS, places, None, mask)[0])

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    if begin:
        assert checkpoints.maybe_restore(model, optimizer)[0] == begin
    losses = []
    for i in range(begin, begin + steps):
        losses.append(float(step(model, optimizer)))
        if i == 2:
            checkpoints.save(3, model, optimizer, force=True)
    checkpoints.close()
    return losses


def levanter(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """A Llama of levanter, with its `TrainerState`."""
    package = "pip install --pre marin-levanter"
    found = pytest.importorskip("levanter.checkpoint", reason=package)
    haliax = pytest.importorskip("haliax", reason=package)
    import equinox
    from levanter.layers.attention_mask import AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from levanter.trainer_state import TrainerState

    config = LlamaConfig(
        max_seq_len=sizes["context"],
        hidden_dim=sizes["embed"],
        intermediate_dim=sizes["mlp"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        gradient_checkpointing=False,
    )
    vocab = haliax.Axis("vocab", sizes["vocab"])
    model = LlamaLMHeadModel.init(vocab, config, key=jax.random.PRNGKey(0))
    state = TrainerState.init(TX, model, key=jax.random.PRNGKey(1))
    tokens = haliax.named(jnp.asarray(TOKENS), ("batch", "position"))

    @equinox.filter_jit
    def step(state):
        def loss(model):
            logits = model(tokens, attn_mask=AttentionMask.causal())
            return cross_entropy(logits.rearrange(("batch", "position", "vocab")).array)

        value, gradients = equinox.filter_value_and_grad(loss)(state.model)
        return value, state.take_step(gradients, key=state.training_key)[0]

    if begin:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        path = str(folder / f"step-{begin}")
        state = found.load_checkpoint(state, path, axis_mapping={}, mesh=mesh)
        assert int(state.step) == begin
    losses = []
    for i in range(begin, begin + steps):
        value, state = step(state)
        losses.append(float(value))
        if i == 2:
            found.save_checkpoint(
                state.saveable_state, 3, str(folder / "step-3"), is_temporary=False
            )
    return losses


def gemma(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """A small Gemma 3, with the train state and the checkpointer of Kauldron."""
    package = "pip install gemma"
    gm = pytest.importorskip("gemma.gm", reason=package)
    kd = pytest.importorskip("kauldron.kd", reason=package)
    from gemma.gm.nn import _config as configs

    config = configs.TransformerConfig(
        num_embed=sizes["vocab"],
        embed_dim=sizes["embed"],
        hidden_dim=sizes["mlp"],
        num_heads=sizes["heads"],
        head_dim=sizes["head_dim"],
        num_kv_heads=sizes["kv_heads"],
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=configs.make_attention_layers_types(
            gm.nn.Gemma3_270M.config.attention_types[:6], num_layers=sizes["layers"]
        ),
        sliding_window_size=4,
        transpose_gating_einsum=True,
    )
    model = gm.nn.Transformer(config=config, tokens="batch.input", dtype=jnp.float32)
    params = model.init(jax.random.key(0), TOKENS)["params"]
    state = kd.train.TrainState(step=0, params=params, collections={}, opt_state=TX.init(params))
    checkpointer = kd.ckpts.Checkpointer(workdir=folder, save_interval_steps=1)

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            return cross_entropy(model.apply({"params": params}, TOKENS).logits)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    if begin:
        state = checkpointer.restore(state)
        assert int(state.step) == begin
    losses, params, opt_state = [], state.params, state.opt_state
    for i in range(begin, begin + steps):
        value, params, opt_state = step(params, opt_state)
        losses.append(float(value))
        if i == 2:
            state = dataclasses.replace(state, step=3, params=params, opt_state=opt_state)
            checkpointer.save(state, step=3)
            checkpointer.wait_until_finished()
    return losses


def nanodo(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """The model of nanodo, its optimizer, and its checkpoint manager."""
    found = pytest.importorskip("nanodo.model", reason="nanodo, from its repository")
    from flax.training.train_state import TrainState
    from orbax import checkpoint as ocp

    letters = {"D": "embed", "H": "heads", "L": "context", "N": "layers", "V": "vocab", "F": "mlp"}
    config = found.DoConfig(
        **{letter: sizes[name] for letter, name in letters.items()}, fsdp_enabled=False
    )
    model = found.TransformerDo(config)
    params = model.init(jax.random.key(0), TOKENS)["params"]
    # nanodo wraps every optimizer in this way, also without gradient accumulation.
    tx = optax.MultiSteps(TX, 1)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    manager = ocp.CheckpointManager(folder, item_names=("state",))

    @jax.jit
    def step(state):
        def loss(params):
            return cross_entropy(model.apply({"params": params}, TOKENS))

        value, gradients = jax.value_and_grad(loss)(state.params)
        return value, state.apply_gradients(grads=gradients)

    if begin:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state))
        state = manager.restore(begin, args=args)["state"]
        assert int(state.step) == begin
    losses = []
    for i in range(begin, begin + steps):
        value, state = step(state)
        losses.append(float(value))
        if i == 2:
            manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
            manager.wait_until_finished()
    return losses


def bonsai(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """Qwen 3 of Bonsai, with the optimizer of Flax NNX and Orbax."""
    found = pytest.importorskip("bonsai.models.qwen3.modeling", reason="pip install jax-bonsai")
    from flax import nnx
    from orbax import checkpoint as ocp

    config = found.ModelConfig(
        num_layers=sizes["layers"],
        vocab_size=sizes["vocab"],
        emb_dim=sizes["embed"],
        mlp_dim=sizes["mlp"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        rope_theta=10_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = found.Qwen3(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            length = TOKENS.shape[1]
            cache = found.init_cache(config, len(TOKENS), length, 0, dtype=jnp.float32)
            return cross_entropy(model(TOKENS, cache=cache, segment_ids=jnp.ones_like(TOKENS)))

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    path, checkpointer = folder / "3", ocp.StandardCheckpointer()
    tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    if begin:
        restored = checkpointer.restore(path, tree)
        nnx.update(model, restored["model"])
        nnx.update(optimizer, restored["optimizer"])
    losses = []
    for i in range(begin, begin + steps):
        losses.append(float(step(model, optimizer)))
        if i == 2:
            tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            checkpointer.save(path, tree)
            checkpointer.wait_until_finished()
    return losses


def penzai(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """A Llama of Penzai with its `StatefulTrainer`; parameters are saved by their labels."""
    found = pytest.importorskip(
        "penzai.models.transformer.variants.llamalike_common", reason="pip install penzai"
    )
    from flax import traverse_util
    from orbax import checkpoint as ocp
    from penzai import pz
    from penzai.toolshed import basic_training

    config = found.LlamalikeTransformerConfig(
        num_kv_heads=sizes["kv_heads"],
        query_head_multiplier=sizes["heads"] // sizes["kv_heads"],
        embedding_dim=sizes["embed"],
        projection_dim=sizes["head_dim"],
        mlp_hidden_dim=sizes["mlp"],
        num_decoder_blocks=sizes["layers"],
        vocab_size=sizes["vocab"],
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = found.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))

    def loss_fn(model, state, rng):
        inputs = pz.nx.wrap(jnp.asarray(TOKENS)).tag("batch", "seq")
        positions = pz.nx.wrap(jnp.arange(TOKENS.shape[1])).tag("seq")
        logits = model(inputs, token_positions=positions).unwrap("batch", "seq", "vocabulary")
        value = cross_entropy(logits)
        return value, state, {"loss": value}

    trainer = basic_training.StatefulTrainer.build(
        root_rng=jax.random.key(1), model=model, optimizer_def=TX, loss_fn=loss_fn
    )

    def is_parameter(x):
        return isinstance(x, pz.ParameterValue)

    def arrays(tree):
        """Each parameter, or moment of it, as an array under its label."""
        leaves = jax.tree.leaves(tree, is_leaf=is_parameter)
        named = {x.label: x.value.unwrap(*x.value.named_shape) for x in leaves}
        return traverse_util.unflatten_dict(named, sep="/")

    def filled(tree, by_label):
        """The inverse of `arrays`."""
        flat = traverse_util.flatten_dict(by_label, sep="/")

        def put(x):
            value = pz.nx.wrap(flat[x.label]).tag(*x.value.named_shape)
            return dataclasses.replace(x, value=value)

        return jax.tree.map(put, tree, is_leaf=is_parameter)

    def saved():
        adam = trainer.state.value.opt_state[0]
        params = pz.freeze_params(pz.unbind_params(trainer.model)[1])
        moments = {"mu": arrays(adam.mu), "nu": arrays(adam.nu), "count": adam.count}
        return {"params": arrays(params), "opt_state": moments, "step": trainer.state.value.step}

    path, checkpointer = folder / "3", ocp.StandardCheckpointer()
    if begin:
        tree = checkpointer.restore(path, saved())
        params = pz.freeze_params(pz.unbind_params(trainer.model)[1])
        for now, new in zip(
            pz.unbind_params(trainer.model)[1], filled(params, tree["params"]), strict=True
        ):
            now.value = new.value
        state, moments = trainer.state.value, tree["opt_state"]
        adam = state.opt_state[0]
        adam = adam._replace(
            count=moments["count"],
            mu=filled(adam.mu, moments["mu"]),
            nu=filled(adam.nu, moments["nu"]),
        )
        trainer.state.value = type(state)(
            step=tree["step"], opt_state=(adam, *state.opt_state[1:]), loss_fn_state=None
        )
    losses = []
    for i in range(begin, begin + steps):
        losses.append(float(trainer.step()["loss"]))
        if i == 2:
            checkpointer.save(path, saved())
            checkpointer.wait_until_finished()
    return losses


def easydel(folder: Path, sizes: dict[str, int], steps: int, begin: int = 0) -> list[float]:
    """A Llama of EasyDeL, with its `EasyDeLState`."""
    # Otherwise, EasyDeL sets XLA flags that JAX 0.10 does not know.
    os.environ["EASYDEL_AUTO"] = "0"
    found = pytest.importorskip("easydel", reason="pip install --no-deps easydel ejkernel")
    from flax import nnx

    renamed = {
        "hidden_size": "embed",
        "intermediate_size": "mlp",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "max_position_embeddings": "context",
    }
    # EasyDeL loads an optimizer state only if the devices of the tests divide the vocabulary.
    settings = {"vocab_size": 16, **{key: sizes[name] for key, name in renamed.items()}}
    float32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    if begin:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        state = found.EasyDeLState.load_state(folder, tx_template=TX, **float32).replace(tx=TX)
        assert int(state.step) == begin
    else:
        config = found.LlamaConfig(**settings)
        model = found.LlamaForCausalLM(config=config, rngs=nnx.Rngs(0), **float32)
        state = found.EasyDeLState.create(model=model, tx=TX, init_opt_state=True)

    @jax.jit
    @jax.value_and_grad
    def step(params):
        return cross_entropy(state.merge(params)(input_ids=TOKENS).logits)

    losses = []
    for i in range(begin, begin + steps):
        with state.mesh:
            value, gradients = step(state.graphstate)
        losses.append(float(value))
        state = state.apply_gradients(grads=gradients)
        if i == 2:
            state.save_state(folder, step=3)
    return losses
