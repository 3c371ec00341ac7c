"""A GPT-2 with a few hundred parameters, distinct sizes, and perturbed norms and biases."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxgrow import grow
from jaxgrow.axes import axis_of, is_names, leaves
from jaxgrow.growth.maps import Growth, new_sizes
from jaxgrow.models import Config, GPT2Config
from jaxgrow.operators import ligo
from jaxgrow.operators.ligo import LiGO

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
WIDTHS = {"layers": 2, "heads": 3, "embed": 6, "mlp": 9}
BIG = {"layers": 4, "heads": 6, "embed": 12, "mlp": 18}  # twice every size
# The compiler options of a real run, which `conftest.py` turns off for the tests.
_REAL = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
if jax.__version_info__ < (0, 11):
    _REAL["xla_cpu_use_fusion_emitters"] = True
optimized_jit = partial(jax.jit, compiler_options=_REAL)


def config(tied: bool = True, dtype: str = "float64", **widths: int) -> GPT2Config:
    return GPT2Config(
        **{"vocab": 11, "context": 7, "head_dim": 5, **WIDTHS, **widths}, tied=tied, dtype=dtype
    )


@cache
def shapes(config: GPT2Config):
    return jax.eval_shape(replace(config, dtype="float32").init, jax.random.key(0))


@cache
def shapes_by_name(config: GPT2Config):
    """Compute `shapes` from axis names, without an abstract initialisation of each config.

    The axis names do not depend on sizes.
    """
    sizes = config.sizes()

    def leaf(names):
        return jax.ShapeDtypeStruct(tuple(sizes[axis_of(name)] for name in names), jnp.float32)

    names = ("tied", "head", "classes", "adapter")
    like = GPT2Config(**{name: getattr(config, name) for name in names})
    return jax.tree.map(leaf, axes(like), is_leaf=is_names)


@cache
def axes(config: GPT2Config):
    return replace(config, dtype="float32").axes()  # axis names do not need x64


def learned(small: Config, target: dict[str, int], shared: bool):
    """Return the shapes of LiGO's maps to the sizes ``target``, and of the model that they grow."""

    def grown(key):
        about = (axes(small), small.sizes())
        coefficients = ligo.init_coefficients(LiGO(shared=shared), *about, target, key)
        growth = ligo.learned_growth(coefficients, *about)
        return coefficients, grow(growth, params(small), axes(small))

    return jax.eval_shape(grown, jax.random.key(0))


def assert_golden(name: str, *configs: Config, title: Callable[[Config], str] = str) -> None:
    """Compare paths, shapes and axis names of models with the file of this name."""
    lines = []
    for one in configs:
        lines.append(f"# {title(one)}")
        lines += [f"{at} {x.shape} {' '.join(n)}" for at, x, n in leaves(shapes(one), axes(one))]
    assert lines == (GOLDEN / f"{name}.txt").read_text().splitlines()


@cache
def paper_axes(config: GPT2Config):
    return replace(config, dtype="float32").paper_axes()


def params(config: GPT2Config, seed: int = 0, dtype: str = "float64"):
    """Draw leaves of order one half and norm scales around one, in NumPy to avoid compilation."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return (rng.normal(size=x.shape) / 2 + (name == "scale")).astype(jnp.dtype(dtype))

    known = shapes_by_name(config) if isinstance(config, GPT2Config) else shapes(config)
    return jax.tree_util.tree_map_with_path(leaf, known)


def tokens(batch: int = 2, length: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 11, (batch, length))


@cache
def forward(config: GPT2Config):
    """Return the function ``(params, tokens) -> logits``."""
    return jax.jit(lambda p, t: config.module.apply({"params": p}, t))


@cache
def optimized_forward(config: GPT2Config):
    """Return `forward`, compiled with the options of a real run."""
    return optimized_jit(lambda p, t: config.module.apply({"params": p}, t))


@cache
def gradient(config: GPT2Config):
    """Return ``(params, tokens) -> gradient`` of the next-token loss."""

    def loss(p, t):
        log_p = jax.nn.log_softmax(config.module.apply({"params": p}, t[:, :-1]))
        return -jnp.take_along_axis(log_p, t[:, 1:, None], -1).mean()

    return jax.jit(jax.grad(loss))


def saved(config: Config, inputs: np.ndarray) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays saved for the backward pass, including parameters."""

    def pullback(p):
        return jax.vjp(lambda p: config.module.apply({"params": p}, inputs), p)[1]

    return [x.shape for x in jax.tree.leaves(jax.eval_shape(pullback, shapes(config)))]


def change_of_logits(
    growth: Growth,
    tied: bool = True,
    dtype: str = "float64",
    small_axes=None,
    eps=None,
    forward=forward,
) -> float:
    """Return ``max |difference of logits| / standard deviation of the logits`` of a GPT-2 growth.

    ``eps`` replaces the norm epsilon that the growth sets.
    """
    small, large = config(tied, dtype), config(tied, dtype).resized(growth)
    weights = params(small, dtype=dtype)
    before = forward(small)(weights, tokens())
    grown = grow(growth, weights, small_axes or axes(small))
    after = forward(replace(large, eps=eps or large.eps))(grown, tokens())
    return float(np.abs(after - before).max() / np.std(before))


def random_groups(size: int, into: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Partition ``size`` units into random, nonempty groups of random sizes."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, size), into - 1, replace=False))
    return tuple(tuple(map(int, g)) for g in np.split(rng.permutation(size), cuts))


def of(growth: Growth, old: dict[str, int]) -> dict[str, int]:
    """Return the sizes after a growth."""
    return {**old, **new_sizes(growth)}


def wider(times: int, old: dict[str, int] = WIDTHS) -> dict[str, int]:
    """Multiply every width by ``times``."""
    return {name: times * old[name] for name in ("embed", "heads", "mlp")}


def pairs(a, b) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield ``(path, leaf of a, leaf of b)``."""
    leaves_of_a = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(leaves_of_a, jax.tree.leaves(b), strict=True):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(x), np.asarray(y)


def distance(a, b) -> float:
    """Return the largest absolute difference between two trees."""
    return max(float(np.abs(x - y).max()) for _, x, y in pairs(a, b))


def sharded_gradient(loss, params, x, given):
    """Return the gradient of a sum of losses on two devices with replicated weights.

    Value and gradient, which is the sum over the devices, must be as on one device.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def each(params, x, given):
        value, gradient = jax.value_and_grad(loss)(params, x, given)
        return jax.lax.psum(value, "data"), gradient

    spread = jax.shard_map(each, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    found = jax.device_get(jax.jit(spread)(params, x, given))
    expected = jax.jit(jax.value_and_grad(loss))(params, x, given)
    chex.assert_trees_all_close(found, expected, rtol=2e-4, atol=1e-4)
    return found[1]
