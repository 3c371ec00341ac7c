"""How much longer does it take to open a model or a token cache, because the files are checked?

    python benchmarks/checks.py [--gigabytes 5] [--tokens 1] [--rounds 99] [--json FILE]

The model is a Llama of about ``--gigabytes`` in shards of safetensors. Its tensors are zeros, which
need no space on the disk. Opening it, as `jaxgrow inspect` does, is compared with opening it without
the checks of names, links and kinds of files, and with what every reader must do: parse the index
and the header of each shard with the `safetensors` library. Opening finds all pages in memory, and
is measured in processor time.

The token cache has ``--tokens`` gigabytes. Verifying its checksums, as a run does when it opens it
first, is compared with reading the same files. Both find the pages in memory, so a disk that is
slower than the memory makes the ratio smaller.
"""

import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alternate, environment, parser, ratios, save, shown, summary
from jaxgrow import untrusted
from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.checkpoints.io.checksums import damage, seal
from jaxgrow.tables import align_columns
from jaxgrow.untrusted import CheckedPath
from train.extras.cache import SUMS

SHARD = 1 << 30
HIDDEN, MLP, VOCAB, HEADS = 2048, 5632, 32000, 16


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    square, up = (HIDDEN, HIDDEN), (MLP, HIDDEN)
    inside = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    inside |= {
        "mlp.gate_proj.weight": up,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": up[::-1],
    }
    inside |= {"input_layernorm.weight": up[1:], "post_attention_layernorm.weight": up[1:]}
    found = {f"model.layers.{i}.{name}": s for i in range(layers) for name, s in inside.items()}
    found |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return found | {"lm_head.weight": (VOCAB, HIDDEN)}


def write_model(folder: Path, size: int) -> None:
    """Write a model of about ``size`` bytes, whose values are holes in the files."""
    layer = sum(2 * prod(s) for name, s in shapes(1).items() if "layers" in name)
    layers = max(1, round(size / layer))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(layers).items():
        if sum(2 * prod(s) for s in shards[-1].values()) > SHARD:
            shards.append({})
        shards[-1][name] = shape
    places = {}
    for i, shard in enumerate(shards, 1):
        file = folder / f"model-{i:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for name, shape in shard.items():
            begin, end = end, end + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            places[name] = file.name
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(file, 8 + len(text) + end)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    config |= {"hidden_size": HIDDEN, "intermediate_size": MLP, "vocab_size": VOCAB}
    config |= {"num_hidden_layers": layers, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5}
    config |= {"num_key_value_heads": HEADS, "max_position_embeddings": 2048, "rope_theta": 1e4}
    config |= {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def headers(folder: Path) -> None:
    """What every reader must do."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in {*index["weight_map"].values()}:
        with safe_open(str(folder / name), "np") as file:
            for tensor in file.keys():  # noqa: SIM118
                file.get_slice(tensor).get_shape()


@contextmanager
def unchecked() -> Iterator[None]:
    """Replace the checks of `jaxgrow.untrusted` in all modules within a block."""

    def proved(folder: Any, name: str = "", **options: Any) -> CheckedPath:
        if isinstance(folder, CheckedPath):
            return folder
        path = Path(folder, name)
        return untrusted._proved(path, path)

    def opened(path: Path, buffering: int = -1, **options: Any) -> Any:
        return open(path, "rb", buffering)

    instead: dict[Callable[..., Any], Callable[..., Any]] = {
        untrusted.checked_path: proved,
        untrusted.chosen_file: proved,
        untrusted.open_regular: opened,
    }
    used = [
        (module, check)
        for module in [*sys.modules.values()]
        for check in instead
        if getattr(module, "__name__", "").startswith("jaxgrow")
        and getattr(module, check.__name__, None) is check
    ]
    for module, check in used:
        setattr(module, check.__name__, instead[check])
    try:
        yield
    finally:
        for module, check in used:
            setattr(module, check.__name__, check)


def without(folder: Path) -> float:
    with unchecked():
        return timed(open_checkpoint, folder, time.process_time)


def read(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for file in folder.iterdir():
        with file.open("rb", 0) as opened:
            while opened.readinto(buffer):
                pass


def timed(function: Callable[[Path], Any], folder: Path, clock: Callable[[], float]) -> float:
    began = clock()
    function(folder)
    return clock() - began


def measure(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, Any]]:
    """Call functions in turn, which return seconds; the ratios are relative to the last one."""
    alternate(calls, 2)
    times = alternate(calls, rounds)
    last = times[[*calls][-1]]
    return {
        name: {"milliseconds": summary([1e3 * t for t in each]), "ratio": ratios(each, last)}
        for name, each in times.items()
    }


def main() -> None:
    p = parser(__doc__, rounds=99)
    p.add_argument("--gigabytes", type=float, default=5.0, help="size of the model")
    p.add_argument("--tokens", type=float, default=1.0, help="gigabytes of the token cache")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as home:
        model, cache = Path(home) / "model", Path(home) / "cache"
        model.mkdir()
        cache.mkdir()
        write_model(model, int(a.gigabytes * 1e9))
        (cache / "train").write_bytes(b"")
        os.truncate(cache / "train", int(a.tokens * 1e9))
        seal(cache, SUMS)
        sides = {
            "headers alone": lambda: timed(headers, model, time.process_time),
            "with checks": lambda: timed(open_checkpoint, model, time.process_time),
            "without": lambda: without(model),
        }
        found = measure(sides, a.rounds)
        sides = {
            "checksums": lambda: timed(
                lambda folder: damage(folder, SUMS), cache, time.perf_counter
            ),
            "reading": lambda: timed(read, cache, time.perf_counter),
        }
        found |= measure(sides, max(3, a.rounds // 9))
    rows = [(name, shown(of["milliseconds"]), shown(of["ratio"], 3)) for name, of in found.items()]
    print(align_columns(("", "milliseconds", "ratio"), rows))
    save(a.json, {"environment": environment("safetensors", "jax"), "sides": found})


if __name__ == "__main__":
    main()
