"""A lower bound of the time of a compiled program.

The bound is the sum over its kernels of ``max(FLOPs / peak, bytes / bandwidth)``.

A kernel is an instruction that the device runs separately: a fusion, a matrix product, a copy, or a
library call. The bound assumes that compute and memory traffic within a kernel overlap perfectly,
and that intermediate results within a kernel cost nothing. Between kernels, all data go through
memory, as XLA's text states. The body of a loop counts once per iteration, and every branch of a
conditional counts as taken. Real kernels reach neither the peak nor the bandwidth, so no step of
this program is faster than the bound.

Asynchronous copies run beside other kernels and share the memory bandwidth with them. They lengthen
the bound only if all bytes of the program need more time than its kernels. On TPUs, XLA keeps some
arrays in the fast memory of the core (VMEM). Their bytes are not counted.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from train.extras.aot.hlo import (
    BYTES,
    COLLECTIVES,
    Computation,
    Instruction,
    array_bytes,
    array_shapes,
    parse_program,
    run_counts,
)

_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_PATH = re.compile(r'op_name="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:]\s*[\[{]([\d", ]*)[\]}]')
_CONVOLVED = re.compile(r"dim_labels=([\da-z]+)_([\da-z]+)->([\da-z]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^{}]*\})?")
_VMEM = re.compile(r"T\(.*S\(1\)")  # only TPUs have tiled layouts
_ATTENTION = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')

# Instructions that are not counted: they do not move data, or their work is in the computations
# that they call.
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "while",
        "conditional",
        "call",
    ]
)
# Calls on TPUs that neither compute nor move data.
_FREE_CALLS = re.compile(r'="(?:AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast)"')
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


class RooflineKernel(NamedTuple):
    """An instruction that a device runs as a separate kernel.

    Attributes:
      path: JAX's name of the place in the program that it comes from.
      flops: FLOPs of its matrix products in one run.
      moved: bytes that it reads from memory and writes to memory in one run.
      narrow: whether its products have 16-bit operands, for which the peak of the chip is stated.
      times: number of times that it runs in one run of the program.
      asynchronous: whether other kernels run at the same time.
    """

    path: str
    flops: float
    moved: float
    narrow: bool
    times: int
    asynchronous: bool = False


def program_kernels(text: str) -> list[RooflineKernel]:
    """Return every kernel of a compiled program.

    Args:
      text: XLA's text of the program.
    """
    programs = parse_program(text)
    times = run_counts(programs)
    inner = {name for c in programs.values() for i in c.lines for name in _within(i)}
    out = []
    for name, program in programs.items():
        if name in inner or not times[name]:
            continue
        for i in (i for i in program.lines if not _free(i)):
            flops, narrow = _products(i, program, programs)
            moved = _moved(i, program, programs)
            beside = i.kind.endswith("-start")
            out.append(
                RooflineKernel(_kernel_path(i, programs), flops, moved, narrow, times[name], beside)
            )
    return out


def flops_beside(text: str) -> dict[str, float]:
    """Return the FLOPs of the matrix products that a device computes during each exchange.

    Args:
      text: XLA's text of a scheduled program, in which instructions run in the order of the lines.

    Returns:
      FLOPs between the start and the end of each asynchronous exchange, by the name of the
      instruction that starts it.
    """
    programs = parse_program(text)
    out: dict[str, float] = {}
    for program in programs.values():
        running: set[str] = set()
        for i in program.lines:
            if i.kind.startswith(COLLECTIVES):
                running.difference_update(i.operands)
                if i.kind.endswith("-start"):
                    running.add(i.name)
                    out[i.name] = 0.0
            elif running and not _free(i):
                flops, _ = _products(i, program, programs)
                out |= {name: out[name] + flops for name in running}
    return out


def _within(instruction: Instruction) -> list[str]:
    """Names of the computations that are a part of this instruction and do not run separately."""
    return [] if instruction.kind == "call" else _CALLED.findall(instruction.text)


def _free(i: Instruction) -> bool:
    if i.kind in _FREE or i.kind.endswith("-done") or i.kind.startswith(COLLECTIVES):
        return True
    if i.kind == "custom-call" and _FREE_CALLS.search(i.text):
        return True
    return not i.operands and i.kind == "fusion" and array_bytes(i.shapes) < 64


def _kernel_path(i: Instruction, programs: Mapping[str, Computation]) -> str:
    """The path of an instruction, or of the first instruction with a path inside of a fusion."""
    if found := _PATH.search(i.text):
        return found[1]
    for name in _within(i):
        for inner in programs[name].lines if name in programs else ():
            if found := _PATH.search(inner.text):
                return found[1]
    return ""


# --- FLOPs ---


def _products(
    i: Instruction, where: Computation, programs: Mapping[str, Computation]
) -> tuple[float, bool]:
    """``(FLOPs of the matrix products, whether their operands have 16 bits)``."""
    if i.kind.startswith("fusion"):
        inside = [programs[name] for name in _within(i) if name in programs]
        each = [_products(j, program, programs) for program in inside for j in program.lines]
        each = [found for found in each if found[0]]
        return sum(f for f, _ in each), all(narrow for _, narrow in each)
    if i.kind == "custom-call" and (found := _ATTENTION.search(i.text)):
        return _attention_flops(i, where, [int(n.strip(' "')) for n in found[1].split(",")]), True
    if i.kind == "convolution":
        return _convolution(i, where), True
    if not (i.kind == "dot" or (i.kind == "custom-call" and "cublas" in i.text)):
        return 0.0, True
    contracted = _CONTRACTED.search(i.text)
    left = where.by_name.get(i.operands[0])
    if contracted is None or left is None:
        return 0.0, True
    dims = [int(d) for d in re.findall(r"\d+", contracted[1])]
    kind, shape = array_shapes(left.shapes)[0]
    result = math.prod(array_shapes(i.shapes)[0][1])
    return 2.0 * result * math.prod(shape[d] for d in dims), BYTES.get(kind, 4) <= 2


def _convolution(i: Instruction, where: Computation) -> float:
    """FLOPs of a convolution. XLA for TPUs writes every matrix product as one.

    Dimensions of a batch are then spatial dimensions with padding, and only the positions of the
    window that are inside of the operand count. The unit rounds float32 operands to 16 bits.
    """
    labels = _CONVOLVED.search(i.text)
    window = _WINDOW.search(i.text)
    operands = [where.by_name.get(name) for name in i.operands[:2]]
    if labels is None or None in operands:
        return 0.0
    left, right, out = (
        dict(zip(names, array_shapes(x.shapes)[0][1], strict=True))
        for names, x in zip(labels.groups(), (*operands, i), strict=True)
        if x is not None
    )
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    total = 2.0 * out["b"] * out["f"] * right["i"]
    for d, name in enumerate(sorted(filter(str.isdigit, labels[1]))):
        each = {key: value.split("x")[d] for key, value in given.items()}
        total *= _positions(left[name], right[name], out[name], each)
    return total


def _positions(size: int, window: int, results: int, given: dict[str, str]) -> int:
    """Number of pairs of a result and an element of the window that meet an element of an operand.

    Args:
      size: size of the operand along one dimension.
      window: size of the window.
      results: number of results.
      given: XLA's attributes of the window along this dimension.
    """
    stride, left, right = (int(given.get(k, 1)) for k in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(given.get("pad", "0_0").split("_")[0])
    at = np.arange(results)[:, None] * stride + np.arange(window) * right - before
    return int(((at >= 0) & (at <= (size - 1) * left) & (at % left == 0)).sum())


def _attention_flops(i: Instruction, where: Computation, scores: list[int]) -> float:
    """FLOPs of fused attention, from the shape of its scores [batch, heads, queries, keys].

    Causal attention computes half of the square. There are two products in the forward pass. There
    are five in the backward pass, one of which computes the scores again (Dao et al., 2022).
    """
    query = where.by_name[i.operands[0]]
    head_dim = math.prod(array_shapes(query.shapes)[0][1]) / math.prod(scores[:3])
    products = 5 if "Backward" in i.text else 2
    return products * 2.0 * math.prod(scores) * head_dim * (0.5 if "CAUSAL" in i.text else 1.0)


# --- bytes ---


def _moved(i: Instruction, where: Computation, programs: Mapping[str, Computation]) -> float:
    if i.kind.startswith("fusion"):
        return _of_fusion(i, where, programs)
    if i.kind == "dynamic-update-slice":
        written = array_bytes(where.by_name[i.operands[1]].shapes) if _main_bytes(i.shapes) else 0.0
        return _operand_bytes(where, i.operands[1]) + written
    if i.kind in _SLICES:
        return _main_bytes(i.shapes) + (
            array_bytes(i.shapes) if _operand_bytes(where, i.operands[0]) else 0.0
        )
    if i.kind == "slice-start":  # its type is ((operand), result, ..)
        operand, result = _ARRAY.findall(i.shapes)[:2]
        return _main_bytes(result) + (array_bytes(result) if _main_bytes(operand) else 0.0)
    if i.kind == "copy-start":  # its type is (result, operand, ..)
        return sum(_main_bytes(array) for array in _ARRAY.findall(i.shapes)[:2])
    return _main_bytes(i.shapes) + sum(_operand_bytes(where, name) for name in set(i.operands))


def _of_fusion(i: Instruction, where: Computation, programs: Mapping[str, Computation]) -> float:
    """Bytes that a fusion moves.

    It reads only the slices of an operand that it uses, and writes only the part that it updates.
    """
    inside, parameters = _inside(i, programs)
    read = sum(
        min(_operand_bytes(where, operand), _read_bytes(parameter, inside, programs))
        for operand, parameter in zip(i.operands, parameters, strict=False)
    )
    root = _behind(inside.root, inside)
    results = [root]
    if root.kind == "tuple":
        results = [_behind(inside.by_name[n], inside) for n in root.operands]
    # The type of an asynchronous fusion is ((operands), results, ..).
    skipped = len(i.operands) if i.kind == "fusion-start" else 0
    places = _ARRAY.findall(i.shapes)[skipped:]
    return read + sum(
        _written_bytes(result, inside, programs)
        for result, place in zip(results, places, strict=False)
        if _main_bytes(place)
    )


def _inside(
    i: Instruction, programs: Mapping[str, Computation]
) -> tuple[Computation, list[Instruction]]:
    """The computation of a fusion, and its parameters in the order of the operands."""
    (name,) = _within(i)
    inside = programs[name]
    parameters = (line for line in inside.lines if line.kind == "parameter")
    return inside, sorted(parameters, key=lambda p: p.number)


def _read_bytes(
    parameter: Instruction, inside: Computation, programs: Mapping[str, Computation]
) -> float:
    total = 0.0
    for name, user in _consumers(parameter, inside):
        if user.kind in _SLICES and user.operands[0] == name:
            total += array_bytes(user.shapes)
        elif user.kind == "fusion":  # TPUs have fusions within fusions
            nested, parameters = _inside(user, programs)
            total += sum(
                min(array_bytes(p.shapes), _read_bytes(p, nested, programs))
                for operand, p in zip(user.operands, parameters, strict=False)
                if operand == name
            )
        elif not (user.kind == "dynamic-update-slice" and user.operands[0] == name):
            return math.inf
    return total


def _consumers(instruction: Instruction, inside: Computation) -> Iterator[tuple[str, Instruction]]:
    """Yield ``(name that is read, instruction that reads it)``, through type conversions."""
    for user in inside.users.get(instruction.name, []):
        if user.kind in ("bitcast", "convert", "copy") and not user.root:
            yield from _consumers(user, inside)
        else:
            yield instruction.name, user


def _written_bytes(
    result: Instruction, inside: Computation, programs: Mapping[str, Computation]
) -> float:
    if result.kind == "dynamic-update-slice":
        return array_bytes(inside.by_name[result.operands[1]].shapes)
    if result.kind == "fusion":
        nested, _ = _inside(result, programs)
        return _written_bytes(_behind(nested.root, nested), nested, programs)
    return array_bytes(result.shapes)


def _behind(instruction: Instruction, inside: Computation) -> Instruction:
    while instruction.kind in ("bitcast", "convert") and instruction.operands[0] in inside.by_name:
        source = inside.by_name[instruction.operands[0]]
        if source.kind not in ("bitcast", "convert", "dynamic-update-slice"):
            break
        instruction = source
    return instruction


def _operand_bytes(where: Computation, name: str) -> float:
    found = where.by_name.get(name)
    return _main_bytes(found.shapes) if found else 0.0


def _main_bytes(shapes: str) -> float:
    """The bytes of the arrays of a type that are in the main memory of the device."""
    return sum(array_bytes(array) for array in _ARRAY.findall(shapes) if not _VMEM.search(array))


# --- time ---

# A kernel belongs to the first part with a word that its path contains.
PARTS = {
    "optimizer": ("optimizer",),
    "head": ("head", "logits", "vocabulary"),
    "attention": ("attention",),
    "MLP": ("mlp",),
    "copies of scans": (
        "dynamic_slice",
        "dynamic_update_slice",
        "dynamic_index",
        "dynamic_update_index",
    ),
}


def step_part(path: str) -> str:
    """Return the part of a step that a kernel belongs to: a key of `PARTS`, or "other".

    Args:
      path: path of the kernel.
    """
    for name, words in PARTS.items():
        if any(word in path.lower() for word in words):
            return name
    return "other"


@dataclass(frozen=True)
class Roofline:
    """The least number of seconds of one run of a program, by part of the step and in total."""

    parts: dict[str, float] = field(default_factory=dict)
    compute: float = 0.0  # seconds of the kernels that are limited by compute
    moved: float = 0.0  # bytes read and written

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def sum_kernels(found: list[RooflineKernel], peak: float, bandwidth: float) -> Roofline:
    """Return the least time of a program's kernels on a chip.

    Args:
      found: kernels of the program (`program_kernels`).
      peak: FLOP/s of matrix products of 16-bit numbers. Products of 32-bit numbers (TF32) run at
        half of it.
      bandwidth: bandwidth of the memory in bytes/s.
    """
    parts: dict[str, float] = defaultdict(float)
    compute = moved = 0.0
    for kernel in found:
        moved += kernel.times * kernel.moved
        if kernel.asynchronous:
            continue
        products = kernel.flops / (peak if kernel.narrow else peak / 2)
        memory = kernel.moved / bandwidth
        parts[step_part(kernel.path)] += kernel.times * max(products, memory)
        compute += kernel.times * products if products > memory else 0.0
    waiting = moved / bandwidth - sum(parts.values())
    if waiting > 1e-9:
        parts["asynchronous copies"] = waiting
    return Roofline(dict(sorted(parts.items(), key=lambda item: -item[1])), compute, moved)
