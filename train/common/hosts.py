"""How do the processes of a run agree?

Compiled programs already agree on the arrays on devices, because all processes run the same
programs. This module handles the rest: files, which process 0 alone writes, and errors, which all
processes raise. `train.extras.joining` lets the processes find each other, and ends all of them
together. A run with one process does not need this module.
"""

import itertools
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow.axes import Tree
from jaxgrow.registry import Registry
from train.common.errors import UserError
from train.common.output import note

T = TypeVar("T")
# Each makes this process one of several, before JAX is used, from the address of the coordinator, the
# number of processes and the index of this one. All are None if a cluster knows them.
JOINING: Registry[Callable[[str | None, int | None, int | None], None]] = Registry(
    "joining", "train.extras"
)


def connect_processes(mesh: jax.sharding.Mesh) -> None:
    """Connect the processes along every combination of axes of ``mesh`` before compiling.

    Gloo makes a connection when the first program needs it, and then waits only 30 s, which no
    setting changes. Once the connection exists, the processes wait `train.extras.joining.PATIENCE`.

    Args:
      mesh: mesh of all devices of the run.
    """
    if jax.process_count() == 1:
        return
    names = [name for name, size in mesh.shape.items() if size > 1]
    for n in range(1, len(names) + 1):
        for axes in itertools.combinations(names, n):
            _connect_along(mesh, axes)


def _connect_along(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    shape = (math.prod(mesh.shape[name] for name in axes),)
    divided = NamedSharding(mesh, P(axes))
    add = jax.jit(jnp.sum, in_shardings=divided, out_shardings=NamedSharding(mesh, P()))
    program = add.lower(jax.ShapeDtypeStruct(shape, np.float32)).compile()
    ones = jax.make_array_from_callback(
        shape, divided, lambda part: np.ones(shape, np.float32)[part]
    )
    # A barrier: the processes may have compiled for different times.
    gather_values(None)
    jax.block_until_ready(program(ones))


def is_first() -> bool:
    """Whether this is process 0, which writes the files and prints the messages of the run."""
    return jax.process_index() == 0


def print_note(message: str) -> None:
    """Print a line to stderr, above a progress bar, in process 0 only."""
    if is_first():
        note(message)


def gather_values(value: object) -> list[Any]:
    """Return the values of all processes, in the order of the processes.

    Every process must call this function, and all functions below, at the same point of the
    program.

    Args:
      value: JSON value of this process.
    """
    if jax.process_count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(content))))
    # Sizes are rounded up, because every new size compiles another program.
    room = -(-int(sizes.max()) // 4096) * 4096
    rows = multihost_utils.process_allgather(np.pad(content, (0, room - len(content))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def gather_arrays(tree: Tree) -> Tree:
    """Return small arrays, which may be sharded over all processes, as complete NumPy arrays."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _attempt(act: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of a function, and the message of its `UserError` if it raises one."""
    try:
        return act(), None
    except UserError as error:
        return None, str(error)


def on_process_zero(act: Callable[[], T]) -> T:
    """Call ``act`` in process 0 only, and return its result in all processes.

    Args:
      act: function that returns a JSON value. If it raises a `UserError`, all processes raise it.
    """
    if jax.process_count() == 1:
        return act()
    result, error = gather_values(_attempt(act) if is_first() else None)[0]
    if error is not None:
        raise UserError(error)
    return result


def on_all_processes(act: Callable[[], T]) -> T:
    """Call ``act`` in every process, and return the result of this process.

    Args:
      act: function to call. If it raises a `UserError` in one process, all processes raise it.
    """
    if jax.process_count() == 1:
        return act()
    result, error = _attempt(act)
    errors = gather_values(error)
    if any(errors):
        process, first = next((i, e) for i, e in enumerate(errors) if e)
        raise UserError(first if len(set(errors)) == 1 else f"process {process}: {first}")
    return result  # type: ignore[return-value]
