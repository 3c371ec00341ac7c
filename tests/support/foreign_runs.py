"""Small checkpoints in the layouts of other trainers, written without their packages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

SIZES = E, L, H, K, D, M, V = 8, 2, 4, 2, 3, 10, 7


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _write_arrays(arrays: dict[str, np.ndarray], driver: str, store: dict[str, str]) -> None:
    for path, x in arrays.items():
        spec = {"driver": driver, "kvstore": {**store, "path": f"{store.get('path', '')}{path}/"}}
        ts.open(spec, create=True, shape=x.shape, dtype=x.dtype).result().write(x).result()


def levanter_params() -> dict[str, np.ndarray]:
    below = "transformer/layers/stacked/"
    return {
        "embeddings/token_embeddings/weight": drawn(V, E),
        "lm_head/weight": drawn(V, E),
        "transformer/norm/weight": drawn(E),
        f"{below}input_layernorm/weight": drawn(L, E),
        f"{below}self_attn/q_proj/weight": drawn(L, K, H // K, D, E),
        f"{below}self_attn/k_proj/weight": drawn(L, K, D, E),
        f"{below}self_attn/v_proj/weight": drawn(L, K, D, E),
        f"{below}self_attn/o_proj/weight": drawn(L, E, H, D),
        f"{below}mlp/up_proj/weight": drawn(L, M, E),
        f"{below}mlp/down_proj/weight": drawn(L, E, M),
    }


def levanter_step(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Write a step of levanter: an OCDBT database of all arrays, without Orbax's metadata."""
    folder.mkdir(parents=True)
    _write_arrays(arrays, "zarr3", {"driver": "ocdbt", "base": f"file://{folder.resolve()}/"})
    entries = [
        {"path": p, "shape": x.shape, "dtype": x.dtype.name, "chunk_shape": x.shape}
        for p, x in arrays.items()
    ]
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "arrays": entries}))
    (folder / "metadata.json").write_text(json.dumps({"step": 3}))
    return folder


def easydel_run(folder: Path) -> Path:
    """Write a checkpoint of EasyDeL: a zarr folder for each array, and an index."""
    params = {
        "model/embed_tokens/embedding": drawn(V, E),
        "model/norm/kernel": drawn(E),
        "lm_head/kernel": drawn(E, V),
    }
    for i in range(L):
        params[f"model/layers/{i}/self_attn/q_proj/kernel"] = drawn(E, H * D)
        params[f"model/layers/{i}/self_attn/k_proj/kernel"] = drawn(E, K * D)
        params[f"model/layers/{i}/self_attn/o_proj/kernel"] = drawn(H * D, E)
        params[f"model/layers/{i}/mlp/up_proj/kernel"] = drawn(E, M)
    arrays = {f"model/{path}": x for path, x in params.items()}
    arrays |= {f"tx/0/mu/{path}/value": x for path, x in params.items()}
    _write_arrays(arrays, "zarr", {"driver": "file", "path": f"{folder}/"})
    entries = [{"path": p, "shape": x.shape, "dtype": x.dtype.name} for p, x in arrays.items()]
    (folder / "tensorstore_index.json").write_text(json.dumps({"prefixes": {"all": entries}}))
    (folder / "config.json").write_text(json.dumps({"head_dim": D}))
    return folder


def maxtext_params(
    scan: int | None, sizes: tuple[int, ...] = SIZES, tied: bool = False
) -> dict[str, Any]:
    """Return the parameters of MaxText, whose layers are stacked along the axis ``scan``, if any."""
    embed, count, heads, kv_heads, head_dim, mlp, vocab = sizes
    rng = np.random.default_rng(0)

    def put(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), "float32")

    def layer(put: Callable[..., jax.Array]) -> dict[str, Any]:
        kernels = {"query": (embed, heads, head_dim), "out": (heads, head_dim, embed)}
        kernels |= dict.fromkeys(("key", "value"), (embed, kv_heads, head_dim))
        up, down = (embed, mlp), (mlp, embed)
        return {
            "pre_self_attention_layer_norm": {"scale": put(embed)},
            "self_attention": {name: {"kernel": put(*shape)} for name, shape in kernels.items()},
            "mlp": {n: {"kernel": put(*s)} for n, s in (("wi_0", up), ("wi_1", up), ("wo", down))},
        }

    def stacked(*shape: int) -> jax.Array:
        return put(*shape[:scan], count, *shape[scan:])

    every = {f"layers_{i}": put for i in range(count)} if scan is None else {"layers": stacked}
    layers = {name: layer(of) for name, of in every.items()}
    head = {} if tied else {"logits_dense": {"kernel": put(embed, vocab)}}
    decoder = {"decoder_norm": {"scale": put(embed)}, **head, **layers}
    return {"params": {"token_embedder": {"embedding": put(vocab, embed)}, "decoder": decoder}}


def titan_shapes(fused: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of torchtitan 0.2, or of 0.3 with the modules of a fused kernel."""
    qkv = "attention/qkv_linear/" if fused else "attention/"
    layer = {
        f"{qkv}wq/weight": (H * D, E),
        f"{qkv}wk/weight": (K * D, E),
        f"{qkv}wv/weight": (K * D, E),
        "attention/wo/weight": (E, H * D),
        "feed_forward/w1/weight": (M, E),
        "feed_forward/w2/weight": (E, M),
        "feed_forward/w3/weight": (M, E),
        "attention_norm/weight": (E,),
        "ffn_norm/weight": (E,),
    }
    layers = {f"layers/{i}/{path}": shape for i in range(L) for path, shape in layer.items()}
    head = "lm_head" if fused else "output"
    outside = {"tok_embeddings/weight": (V, E), "norm/weight": (E,), f"{head}/weight": (V, E)}
    return outside | layers
