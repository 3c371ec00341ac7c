"""The training step of GPT-2 124M in PyTorch, as a comparison for `benchmarks.one_gpu`.

The step is written as PyTorch's users write it: `torch.compile` of the model with its loss, scaled dot-product
attention, bfloat16 by autocast over float32 weights, gradient clipping, and the fused AdamW with weight decay
for matrices. The model has no dropout, and it has as many parameters as our GPT-2.
"""

import statistics
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.common import summary


def throughput(size: dict[str, int], batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Measure tokens per second of the complete training step on one device.

    Args:
      size: vocab, context, layers, embed, heads, mlp.
      batch: sequences of a step.
      steps: steps per timing.
      rounds: number of timings.

    Returns:
      The row of the result; without PyTorch, only the reason why nothing was measured.
    """
    if find_spec("torch") is None:
        return {"skipped": "PyTorch is not installed; pip install torch"}
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = gpt2(size).to(device)
    # Compilation on a CPU needs a C++ compiler and is not compared.
    compiled = torch.compile(model) if device == "cuda" else model
    step = _step(model, compiled, size, batch, device)
    start = time.perf_counter()
    losses = [step().item() for _ in range(3)]
    compiling = time.perf_counter() - start

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(steps - 1):
            step()
        step().item()  # waits for the device
        return (time.perf_counter() - start) / steps

    times = [seconds() for _ in range(rounds)]
    tokens = batch * size["context"]
    row = {
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_losses": losses,
        "first_steps_seconds": compiling,
        "milliseconds": 1e3 * statistics.median(times),
        "seconds": summary(times),
        "tokens_per_second": summary([tokens / t for t in times]),
    }
    if device == "cuda":
        row |= {
            "device": torch.cuda.get_device_name(),
            "peak": torch.cuda.max_memory_allocated() / 1e9,
        }
    return row


def _step(model: Any, compiled: Any, size: dict[str, int], batch: int, device: str) -> Any:
    """A function that runs one step on random tokens and returns the loss."""
    import torch  # pyright: ignore[reportMissingImports]

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    shape = (batch, size["context"] + 1)
    tokens = torch.randint(size["vocab"], shape, device=device)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def gpt2(size: dict[str, int]) -> Any:
    """A GPT-2 with tied embeddings and its loss, as a `torch.nn.Module`."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    width, heads = size["embed"], size["heads"]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, size["mlp"]), nn.Linear(size["mlp"], width)

        def forward(self, x_BTD: Any) -> Any:
            batch, length, _ = x_BTD.shape
            qkv = self.qkv(self.attention_norm(x_BTD)).split(width, -1)
            q, k, v = (x.view(batch, length, heads, -1).transpose(1, 2) for x in qkv)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x_BTD = x_BTD + self.out(y.transpose(1, 2).reshape(batch, length, width))
            hidden = nn.functional.gelu(self.up(self.mlp_norm(x_BTD)), approximate="tanh")
            return x_BTD + self.down(hidden)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(size["vocab"], width)
            self.positions = nn.Embedding(size["context"], width)
            self.layers = nn.ModuleList(Layer() for _ in range(size["layers"]))
            self.norm = nn.LayerNorm(width)
            for p in self.parameters():
                if p.ndim > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, ids_BT: Any, targets_BT: Any) -> Any:
            at = torch.arange(ids_BT.shape[1], device=ids_BT.device)
            x_BTD = self.tokens(ids_BT) + self.positions(at)
            for layer in self.layers:
                x_BTD = layer(x_BTD)
            logits = self.norm(x_BTD) @ self.tokens.weight.T
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten())

    return Model().train()
