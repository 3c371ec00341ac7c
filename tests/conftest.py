"""What every test runs under: four host devices, no silent broadcasting over ranks, hypothesis without chance."""

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

import chex
import jax
import pytest
from hypothesis import settings

jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
# Compiling is what the tests cost: XLA need not optimize what runs once. `tiny.optimized_jit` does,
# as a real run does.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):  # later ones refuse it
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
chex.set_n_cpu_devices(4)
jax.config.update("jax_numpy_rank_promotion", "raise")

# tracing makes millions of small objects that live on, and it would go over all of them again and
# again
gc.disable()

settings.register_profile("law", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("law")


# A worker takes whole files, in which tests share programs and runs. Those that take longest come
# first: all end together.
LONGEST = (
    "hosts", "drop_execution", "finetune", "families", "drop_training", "cli", "laws", "bert", "generation", "readme",
    "llama", "notebooks", "preservation", "adapting", "naming", "decoders", "nnx", "experts",
    # Runs of one tiny model, whose programs a worker keeps from file to file.
    "mesh", "preflight", "step", "resume", "compare", "race", "methods", "inherit", "rewarm", "continue", "ledger",
    "sweep", "checkpoint", "identity", "bad_input", "learned_maps", "show", "plan", "freeze", "muon", "ramp", "advise", "swin",
    "drop_schedules", "vocabulary_loss", "cait", "config", "ligo", "moments", "flops", "vit", "batches", "gpt2", "generate",
    "tokens", "lora", "folders", "interop", "mutations", "docstrings", "roles", "evaluate",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


SELF = Path("/proc/self")


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Programs hold memory, and those of a CPU memory maps, of which Linux gives a process 65530: then it crashes."""
    yield
    if not SELF.exists():
        return
    maps = (SELF / "maps").read_bytes().count(b"\n")
    resident = int((SELF / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    full = maps > 40_000 or resident > 2e9
    if full:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    # glibc keeps what is freed, unless it is told: then every later module would seem to be full
    if full:
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    gc.freeze()  # what programs are made of stays, and need not be gone over after every module


@pytest.fixture(scope="module")
def x64():
    """Algebra in float64, for the modules that ask: what trains a model asks for the default, float32."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The folder of a small model's finished run, `runs.small`, once a worker."""
    import runs  # not before there are four devices

    return runs.small(tmp_path_factory.mktemp("home"))
