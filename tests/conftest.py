"""Set up four host devices, no implicit rank promotion and deterministic hypothesis examples."""

import ctypes
import gc
import json
import os
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import chex
import jax
import pytest
from hypothesis import settings

jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
# Compilation dominates the time of the tests, so XLA does not optimize programs that run once.
# `tiny.optimized_jit` optimizes as a real run does.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
# By default, XLA aborts a process if one of its devices waits 40 s for the others, which can happen
# on a loaded machine.
_FLAGS += ["--xla_cpu_collective_call_terminate_timeout_seconds=300"]
if jax.__version_info__ < (0, 11):  # later versions refuse this flag
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# Each worker has about one core. With more threads, BLAS and PyTorch spend their time waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
chex.set_n_cpu_devices(4)
jax.config.update("jax_numpy_rank_promotion", "raise")

# All workers and their processes share compiled programs, except those that compile in no time.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _PROGRAMS = TemporaryDirectory(prefix="jaxgrow-programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# Tests kill processes but no machine, so none of them waits for the disk.
os.fsync = lambda handle: None

# Tracing creates millions of long-lived objects, which the collector would scan repeatedly.
gc.disable()

settings.register_profile("law", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("law")


# A worker takes complete files, because their tests share programs and runs. The longest files come
# first, so that all workers finish at about the same time.
DURATIONS = Path(__file__).parent / "durations.json"
measured = Counter()  # seconds of each file in this run


def pytest_xdist_auto_num_workers(config):
    """Use two workers. A single file needs none, because one worker takes all of its tests."""
    files = {name.partition("::")[0] for name in config.args}
    if len(files) == 1 and Path(*files).is_file():
        config.option.dist = "no"
        return 0
    return 2


def pytest_addoption(parser):
    parser.addoption("--measure", action="store_true", help=f"write {DURATIONS.name}")
    parser.addoption(
        "--eighth",
        metavar="COMMIT",
        help="run one eighth of the chosen tests, which depends on this",
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "extras" in item.path.parts:
            item.add_marker("extra")
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.path.stem, 0))
    commit = config.getoption("--eighth")
    if commit is not None:
        chosen = [i for i in items if crc32(f"{commit} {i.nodeid}".encode()) % 8 == 0]
        config.hook.pytest_deselected(items=[*{*items}.difference(chosen)])
        items[:] = chosen


def pytest_runtest_logreport(report):
    measured[Path(report.location[0]).stem] += report.duration


def pytest_sessionfinish(session):
    if session.config.getoption("--measure") and not hasattr(session.config, "workerinput"):
        seconds = {name: round(s, 1) for name, s in sorted(measured.items()) if s >= 1}
        DURATIONS.write_text(json.dumps(json.loads(DURATIONS.read_text()) | seconds, indent=0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Fail a test that is skipped for lack of a package unless a mark says where it does run."""
    report = yield
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    absent = reason.removeprefix("Skipped: ").startswith(("could not import", "pip install"))
    if absent and not any(map(item.get_closest_marker, ("interop", "third_party"))):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}. Mark it with `interop` or `third_party`."
    return report


SELF = Path("/proc/self")


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Free compiled programs after a module if they hold too much memory or too many memory maps.

    Each CPU program holds memory maps, and Linux crashes a process with more than 65530.
    """
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
    # Without malloc_trim, glibc keeps freed memory, and every later module would look full.
    if full:
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    gc.freeze()  # objects of cached programs live on and need no further scans


@pytest.fixture(scope="module")
def x64():
    """Enable float64 for the modules that request it; training tests use the default, float32."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Return the folder of a finished run of a small model, `runs.small`, once per worker."""
    import runs  # import after the four devices are set

    return runs.small(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """Return an experiment and the folder of its finished run, with all checkpoints."""
    import runs  # import after the four devices are set

    from train import pretrain

    folder = tmp_path_factory.mktemp("whole")
    experiment = runs.experiment(folder, checkpoint_every=2, keep_every=1)
    pretrain.run_experiment(experiment, folder / "run")
    return experiment, folder / "run"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a checkpoint of a GPT-2, ``gpt2``, and the files of CoLA, ``cola``."""
    # import after the four devices are set
    from finetunings import FAMILIES, checkpoint, cola

    folder = tmp_path_factory.mktemp("home")
    checkpoint(folder / "gpt2", FAMILIES["gpt2"])
    cola(folder / "cola")
    return folder


@pytest.fixture
def poisoned(monkeypatch):
    """Return a function that makes the gradients of some steps not finite, `runs.poison`."""
    import runs  # import after the four devices are set

    with runs.compiling("step"):
        yield partial(runs.poison, monkeypatch)


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures instead of saving them as files."""
    found = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: found.append(figure)
    )
    return found
