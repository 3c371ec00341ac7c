"""Read XLA's text of a compiled program: its instructions, and the data that its devices exchange."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SHAPE = re.compile(r"\b(pred|bf16|[fsuc]\d+)(?:e\w+)?\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^ +(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$")
_NAMES = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_KERNEL = re.compile(r'custom_call_target="([^"]+)"')
_GROUPS = re.compile(
    r"replica_groups=(?:\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?|\{\{([\d,]+)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}?(?:,|$)")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")  # the format for TPUs


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shapes: str  # type of its result in XLA's notation
    kind: str
    operands: tuple[str, ...]  # names of the operands
    text: str  # text after the opening parenthesis
    root: bool

    @property
    def number(self) -> int:
        """The index of a parameter, or the value of a constant."""
        return int(self.text.split(")")[0])


@dataclass(frozen=True)
class Computation:
    """The instructions of a computation, in the order of their lines."""

    lines: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.lines}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        out: dict[str, list[Instruction]] = {}
        for instruction in self.lines:
            for name in instruction.operands:
                out.setdefault(name, []).append(instruction)
        return out

    @property
    def root(self) -> Instruction:
        return next(i for i in self.lines if i.root)


@lru_cache(maxsize=4)
def parse_program(text: str) -> Mapping[str, Computation]:
    """Return the computations of a program by name; the first one to run has the name ENTRY."""
    bodies: dict[str, list[Instruction]] = {}
    name = ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _HEAD.match(line)):
            name = "ENTRY" if head[1] else head[2]
        elif found := _LINE.match(line):
            root, target, shapes, kind, rest = found.groups()
            operands = tuple(_NAMES.findall(_arguments(rest)))
            instruction = Instruction(target, shapes, kind, operands, rest, bool(root))
            bodies.setdefault(name, []).append(instruction)
    return {name: Computation(tuple(body)) for name, body in bodies.items()}


def _arguments(rest: str) -> str:
    """The text before the closing parenthesis."""
    depth = 1
    for i, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:i]
    return rest


# --- how often computations run ---


def run_counts(program: Mapping[str, Computation]) -> Counter[str]:
    """Return how often each computation runs, with the trip counts of nested loops."""
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for i in program[name].lines if name in program else ():
            callees = _CALLS.findall(i.text)
            for branches in _BRANCHES.findall(i.text):
                callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
            trips = _trips(i, program) if i.kind == "while" else 1
            for callee in callees:
                visit(callee, count * trips)

    visit("ENTRY", 1)
    return times


def _trips(loop: Instruction, program: Mapping[str, Computation]) -> int:
    """The trip count of a loop.

    XLA states it, except for TPUs. There it follows from the increment and the limit of the loop's
    counter, which starts at 0.
    """
    if known := _TRIPS.search(loop.text):
        return int(known[1])
    called = dict(re.findall(r"(condition|body)=%?([\w.\-]+)", loop.text))
    condition, body = (program[called[part]] for part in ("condition", "body"))
    try:
        counter, end = (condition.by_name[name] for name in condition.root.operands)
        index = re.search(r"index=(\d+)", counter.text)
        grown = body.by_name[body.root.operands[int(index[1]) if index else 0]]
        operands = [body.by_name[name] for name in grown.operands]
        (by,) = (operand.number for operand in operands if operand.kind == "constant")
        return -(-end.number // by)
    except (KeyError, ValueError, IndexError):
        return _fused_trips(loop, program, condition.root)


def _fused_trips(loop: Instruction, program: Mapping[str, Computation], root: Instruction) -> int:
    """The trip count of a loop whose condition is a fusion of its counter and a constant.

    Pipelined loops on GPUs have this form. The counter grows by one in each iteration. If its first
    value is not found, it is assumed to be 0. A loop of unknown length counts once.
    """
    called = _CALLS.search(root.text) if root.kind == "fusion" else None
    fused = program[called[1]].lines if called else ()
    ends = [i.number for i in fused if i.kind == "constant"]
    if len(ends) != 1:
        return 1
    around = next(c.by_name for c in program.values() if c.by_name.get(loop.name) is loop)
    if loop.operands[0] not in around:
        return ends[0]
    first = around[around[loop.operands[0]].operands[0]]
    while first.kind in ("copy", "bitcast") and first.operands[0] in around:
        first = around[first.operands[0]]
    return ends[0] - (first.number if first.kind == "constant" else 0)


# --- exchanges between devices ---


class Collective(NamedTuple):
    """An exchange of data between devices, as seen by one of them.

    Attributes:
      kind: name of the collective, such as "all-reduce".
      size: bytes of the full array that is exchanged.
      devices: number of devices in the group.
      times: number of times that it runs in one run of the program.
      asynchronous: whether the device may compute during the exchange.
      local: number of devices of the group on one host; 0 if all of them are on one host.
      products: FLOPs of the matrix products that the device computes during one exchange.
    """

    kind: str
    size: float
    devices: int
    times: int
    asynchronous: bool = False
    local: int = 0
    products: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run of the program, with a ring of devices."""
        share = 1.0 if self.kind == "collective-permute" else (self.devices - 1) / self.devices
        return self.times * self.size * share * (2 if self.kind == "all-reduce" else 1)


def program_collectives(
    text: str, devices: int, hosts: int = 1, beside: Mapping[str, float] = MappingProxyType({})
) -> list[Collective]:
    """Return the collectives of a compiled program, assuming that every conditional branch runs.

    Args:
      text: XLA's text of the program.
      devices: number of devices.
      hosts: number of hosts, which all have the same number of devices.
      beside: FLOPs of the matrix products during an exchange, by the name of the instruction that
        starts it (`train.extras.aot.roofline.flops_beside`).
    """
    program = parse_program(text)
    counts = run_counts(program)
    out = []
    for name, computation in program.items():
        for i in computation.lines:
            kind, start = i.kind.removesuffix("-start"), i.kind.endswith("-start")
            if kind not in COLLECTIVES:
                continue
            group = _device_group(i.text, devices)
            moved = i.text if kind == "collective-permute" else ""
            local = _local(moved, group, devices // hosts)
            waits = not start or '"is_sync":true' in i.text
            size = _array_size(i.shapes, kind, start, len(group))
            products = beside.get(i.name, 0.0)
            out.append(Collective(kind, size, len(group), counts[name], not waits, local, products))
    return out


def _local(line: str, group: list[int], each: int) -> int:
    """Number of devices of a group on one host; 0 if one host has all of them.

    For a permutation, it is 1 if any pair of devices is on two hosts.
    """
    if found := _PAIRS.search(line):
        ids = [int(n) for n in re.findall(r"\d+", found[1])]
        if any(a // each != b // each for a, b in zip(ids[::2], ids[1::2], strict=True)):
            return 1
        return 0
    most = max(Counter(device // each for device in group).values())
    return most if most < len(group) else 0


def conditional_count(text: str) -> int:
    """Return the number of conditionals in a program."""
    return sum(i.kind == "conditional" for c in parse_program(text).values() for i in c.lines)


def foreign_kernels(text: str) -> tuple[str, ...]:
    """Return the kernels that XLA did not generate, such as cuDNN attention and Pallas kernels."""
    return tuple(sorted(set(_KERNEL.findall(text))))


def _array_size(shapes: str, kind: str, start: bool, devices: int) -> float:
    """Bytes of the full array that is reduced, gathered or scattered, from the type."""
    # The type of an asynchronous start is a tuple of the input, the output, and perhaps more. For an
    # all-reduce it is the output alone before JAX 0.12, and ``((inputs), outputs)`` from then on.
    if start and shapes.startswith("((" if kind == "all-reduce" else "("):
        return max(array_bytes(part) for part in itertools.islice(_parts(shapes), 2))
    total = array_bytes(shapes)
    return total * devices if kind == "reduce-scatter" else total


def _parts(shapes: str) -> Iterator[str]:
    """The parts of the type of a tuple."""
    depth = begin = 0
    for i, letter in enumerate(shapes):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if depth == 0 or (depth == 1 and letter == ","):
            yield shapes[begin + 1 : i]
            begin = i


def array_shapes(text: str) -> list[tuple[str, list[int]]]:
    """Return ``(dtype, sizes)`` of every array in a type."""
    return [(kind, [int(d) for d in dims.split(",") if d]) for kind, dims in _SHAPE.findall(text)]


def array_bytes(text: str) -> float:
    """Return the bytes of all arrays in a type."""
    return sum(
        (BYTES.get(kind) or int(re.sub(r"\D", "", kind)) / 8) * math.prod(dims)
        for kind, dims in array_shapes(text)
    )


def _device_group(line: str, devices: int) -> list[int]:
    """The first of the groups of devices that exchange data."""
    if found := _GROUPS.search(line):
        number, size, dims, order, listed = found.groups()
        if listed:
            return [int(n) for n in listed.split(",")]
        ids = np.arange(int(number) * int(size)).reshape([int(d) for d in dims.split(",")])
        ids = ids.transpose([int(d) for d in order.split(",")]) if order else ids
        return ids.reshape(int(number), int(size))[0].tolist()
    if found := _AXES.search(line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return list(range(math.prod(int(part or sizes[axis]) for axis, part in named)))
    return list(range(devices))
