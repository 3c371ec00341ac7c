"""Read XLA's text of a compiled program: which data do its devices exchange, and how often?"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
_SHAPE = re.compile(r"\b(pred|bf16|[fsuc]\d+)(?:e\w+)?\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r"%?([\w.\-]+) = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_CALLS = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERATION = re.compile(r"^ +(ROOT )?%([\w.\-]+) = .*? ([a-z\-]+)\(([^)]*)\)(?:, index=(\d+))?")
_KERNEL = re.compile(r'custom_call_target="([^"]+)"')
_GROUPS = re.compile(
    r"replica_groups=(?:\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?|\{\{([\d,]+)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}?(?:,|$)")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")  # the format for TPUs


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


def collectives(
    text: str, devices: int, hosts: int = 1, beside: Mapping[str, float] = MappingProxyType({})
) -> list[Collective]:
    """Return the collectives of a compiled program, assuming that every conditional branch runs.

    Args:
      text: XLA's text of the program.
      devices: number of devices.
      hosts: number of hosts, which all have the same number of devices.
      beside: FLOPs of the matrix products during an exchange, by the name of the instruction that
        starts it (`train.extras.aot.roofline.beside`).
    """
    lines = dict(computations(text))
    counts = times(lines)
    out = []
    for name, body in lines.items():
        for line in body:
            found = _COLLECTIVE.search(line)
            if found:
                begin, kinds, kind, start = found.groups()
                group = _group(line, devices)
                whole = _whole(kinds, kind, bool(start), len(group))
                local = _local(
                    line if kind == "collective-permute" else "", group, devices // hosts
                )
                waits = not start or '"is_sync":true' in line
                products = beside.get(begin, 0.0)
                out.append(
                    Collective(kind, whole, len(group), counts[name], not waits, local, products)
                )
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


def conditionals(text: str) -> int:
    return len(re.findall(r" conditional\(", text))


def kernels(text: str) -> tuple[str, ...]:
    """Return the kernels that XLA did not generate, such as cuDNN attention and Pallas kernels."""
    return tuple(sorted(set(_KERNEL.findall(text))))


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name = ""
    body = []
    for line in text.splitlines():
        head = None if line.startswith(" ") else _HEAD.match(line)
        if head:
            if name:
                yield name, body
            name = "ENTRY" if head[1] else head[2]
            body = []
        else:
            body.append(line)
    yield name, body


def times(lines: dict[str, list[str]]) -> Counter[str]:
    """Return how often each computation runs, with the trip counts of nested loops."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for name, body in lines.items():
        for line in body:
            trips = _trips(line, lines) if " while(" in line else 1
            callees = _CALLS.findall(line)
            for branches in _BRANCHES.findall(line):
                callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
            for callee in callees:
                calls.setdefault(name, []).append((callee, trips))
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for callee, trips in calls.get(name, []):
            visit(callee, count * trips)

    visit("ENTRY", 1)
    return times


class _Operation(NamedTuple):
    kind: str
    operands: list[str]  # names, or the value of a constant
    of: int  # index into a tuple
    text: str = ""  # line of the operation


def _trips(line: str, lines: dict[str, list[str]]) -> int:
    """The trip count of a loop.

    XLA states it, except for TPUs. There it follows from the increment and the limit of the loop's
    counter, which starts at 0.
    """
    if known := _TRIPS.search(line):
        return int(known[1])
    called = dict(re.findall(r"(condition|body)=%?([\w.\-]+)", line))
    condition, body = (_operations(lines[called[part]]) for part in ("condition", "body"))
    try:
        counter, end = (condition[name] for name in condition["ROOT"].operands)
        grown = body[body["ROOT"].operands[counter.of]]
        (by,) = (
            int(body[name].operands[0]) for name in grown.operands if body[name].kind == "constant"
        )
        return -(-int(end.operands[0]) // by)
    except (KeyError, ValueError, IndexError):
        return _fused_trips(line, lines, condition["ROOT"])


def _fused_trips(line: str, lines: dict[str, list[str]], root: "_Operation") -> int:
    """The trip count of a loop whose condition is a fusion of its counter and a constant.

    Pipelined loops on GPUs have this form. The counter grows by one in each iteration. If its first
    value is not found, it is assumed to be 0. A loop of unknown length counts once.
    """
    called = re.search(r"calls=%?([\w.\-]+)", root.text) if root.kind == "fusion" else None
    fused = lines[called[1]] if called else []
    ends = [int(n) for n in re.findall(r" constant\((\d+)\)", "\n".join(fused))]
    if len(ends) != 1:
        return 1
    given = re.search(r" while\(%?([\w.\-]+)\)", line)
    for body in lines.values():
        operations = _operations(body)
        if given and given[1] in operations and line in body:
            first = operations[operations[given[1]].operands[0]]
            while first.kind in ("copy", "bitcast") and first.operands[0] in operations:
                first = operations[first.operands[0]]
            return ends[0] - (int(first.operands[0]) if first.kind == "constant" else 0)
    return ends[0]


def _operations(lines: list[str]) -> dict[str, _Operation]:
    """The operations of a computation by name. The last one also has the name ROOT."""
    found = {}
    for line in lines:
        if operation := _OPERATION.match(line):
            root, name, kind, operands, index = operation.groups()
            names = [n.split("%")[-1].strip() for n in operands.split(",")]
            found[name] = found["ROOT" if root else name] = _Operation(
                kind, names, int(index or 0), line
            )
    return found


def _whole(shapes: str, kind: str, start: bool, devices: int) -> float:
    """Bytes of the full array that is reduced, gathered or scattered, from the type."""
    # The type of an asynchronous start is a tuple of the input, the output, and perhaps more. For an
    # all-reduce it is the output alone before JAX 0.12, and ``((inputs), outputs)`` from then on.
    if start and shapes.startswith("((" if kind == "all-reduce" else "("):
        return max(size(part) for part in itertools.islice(_parts(shapes), 2))
    total = size(shapes)
    return total * devices if kind == "reduce-scatter" else total


def _parts(shapes: str) -> Iterator[str]:
    """The parts of the type of a tuple."""
    depth = begin = 0
    for i, letter in enumerate(shapes):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if depth == 0 or (depth == 1 and letter == ","):
            yield shapes[begin + 1 : i]
            begin = i


def shapes(text: str) -> list[tuple[str, list[int]]]:
    """Return ``(dtype, sizes)`` of every array in a type."""
    found = []
    for kind, dims in _SHAPE.findall(text):
        found.append((kind, [int(d) for d in dims.split(",") if d]))
    return found


def size(text: str) -> float:
    """Return the bytes of all arrays in a type."""
    each = {
        kind: BYTES.get(kind) or int(re.sub(r"\D", "", kind)) / 8
        for kind, _ in _SHAPE.findall(text)
    }
    return sum(each[kind] * math.prod(dims) for kind, dims in shapes(text))


def _group(line: str, devices: int) -> list[int]:
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
