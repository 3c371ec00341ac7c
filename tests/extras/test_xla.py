"""XLA's flags in results, the persistent compilation cache, and the trace of `--profile`."""

import gzip
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from train import pretrain
from train.extras import profiling
from train.step import xla


@pytest.mark.parametrize("name", ["enable_pipelined_all_gather", "pipeline_all_gather"])
def test_flags_of_the_environment_win_and_both_are_recorded(monkeypatch, name):
    """JAX 0.11 accepts both names in XLA_FLAGS."""
    gpus = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cuda")]))
    given = f"--xla_gpu_{name}=false"
    monkeypatch.setenv("XLA_FLAGS", given)
    found = xla.recorded(gpus)
    assert found["XLA_FLAGS"] == given
    (left_out,) = xla.GPU_FLAGS.keys() - found["options"]
    assert left_out.endswith("_all_gather")


def test_this_version_of_xla_knows_all_flags():
    """The compiler for CPUs refuses unknown options, too, and ignores those of GPUs."""
    double = jax.jit(lambda x: 2 * x, compiler_options=xla.GPU_FLAGS)
    assert double(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: 2 * x, compiler_options={"xla_gpu_unknown": True})(jnp.ones(2))


def test_a_profile_is_a_trace_of_the_asked_steps(tmp_path):
    said = []
    profile = profiling.Profile(2, tmp_path, said.append)
    work = jax.jit(lambda x: jnp.sin(x) @ x)
    x = jnp.ones((8, 8))
    for _ in range(profiling.FIRST + 4):
        with jax.profiler.TraceAnnotation("annotated step"):
            x = work(x)
        profile.step(x)
    profile.close()
    (line,) = said
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    (xplane,) = tmp_path.rglob("*.xplane.pb")  # xprof reads it
    assert f"xprof --logdir {tmp_path}" in line and f"open {trace} at" in line
    assert jax.profiler.ProfileData.from_file(str(xplane)).planes
    with gzip.open(trace) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("annotated step") == 2


@pytest.mark.slow  # The test above checks the trace itself.
def test_the_result_of_a_profiled_run_records_the_flags(tmp_path, capsys):
    pretrain.run_experiment(runs.experiment(tmp_path), tmp_path / "run", profile=2)
    assert "view it with" in capsys.readouterr().err.lower()
    assert list((tmp_path / "run" / "profile").rglob("perfetto_trace.json.gz"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["xla"] == {"options": {}, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


# Prints the number of programs that the cache does not contain.
RUN = """
import sys
import jax
missing = []
jax.monitoring.register_event_listener(
    lambda event, **_: missing.append(event) if event.endswith("compilation_cache/cache_misses") else None
)
from train import pretrain
pretrain.main()
print("missing:", len(missing))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    cached = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    del cached["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    counts = []
    for run in ("one", "two"):
        command = [sys.executable, "-c", RUN, script, "--workdir", str(tmp_path / run)]
        out = subprocess.run(command, env=cached, check=True, capture_output=True, text=True)
        counts.append(int(out.stdout.split("missing:")[1]))
    assert counts[0] > 5 and counts[1] == 0  # the first count shows that the counter works
