"""Runs on two processes with two devices each match a run of one process on one device.

They stop and resume as one run.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import chex
import numpy as np
import pytest
import runs
from finetunings import FAMILIES, checkpoint, cola, tuning

from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.operators.ligo import LiGO
from train import pretrain
from train.common import hosts
from train.common.errors import UserError
from train.extras import joining, watch
from train.extras.adapting import load_adaptation
from train.plan.methods import GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.state.mesh import Mesh
from train.state.optim import Optim

GATHER = LayerDrop(execution="gather")
# a conditional that all processes must enter together
DROPPING = Scratch((DropLayers(LayerDrop(theta=0.5, time="constant")),))
METHODS = {
    "SBLD": Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2))),)),
    "V-cycle": VCycle((TrainStage(0.25),), (TrainStage(0.5, modifiers=(DropLayers(GATHER),)), TrainStage(0.5)),
        moments_up="exact"),
}  # fmt: skip
# The driver runs experiments one after the other and prints the result of each, as seen by this
# process, on one line of stdout.
DRIVER = """
import gc, json, os, signal, sys, time
from train.common import hosts
from train.extras import joining
from train.common.errors import Preempted, UserError, exits_cleanly
from train.config.experiment import load_experiment
from train.step import inputs
from train.run.trainer import run_experiment
from train.run import trainer
from train.store.checkpoint import Checkpoints
from train.state import mesh

gc.disable()  # as the tests do
address, process, jobs = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
joining.join_processes(address, 2, process)
rate, save, opened, placed = inputs.learning_rate, Checkpoints.save, trainer.TRACKERS, mesh._placed
calls = 0


def main():
    global calls
    for job in jobs:
        calls = 0

        def terminated(*arguments):
            global calls
            calls += 1
            if calls == job.get("term") and process == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if calls == job.get("term"):
                time.sleep(2)  # JAX looks for it once a second
            return rate(*arguments)

        def killed(self, step, *rest):
            save(self, step, *rest)
            if step == job.get("kill"):
                self.wait()
                if process == job.get("who", 1):
                    os.kill(os.getpid(), signal.SIGKILL)

        def reordered(devices, shape):
            return placed([devices[i] for i in job.get("order", range(len(devices)))], shape)

        def refused(*_):  # only process 0 opens trackers
            raise UserError("no tracker")

        inputs.learning_rate, Checkpoints.save, mesh._placed = terminated, killed, reordered
        trainer.TRACKERS = {"services": refused} if job.get("untracked") else opened
        try:
            experiment = load_experiment(job["config"], job.get(f"set{process}", []))
            said = {"loss": run_experiment(experiment, job["folder"])["val_loss"]}
        except (Preempted, UserError) as error:
            said = {type(error).__name__: str(error)}
        print(json.dumps(said), flush=True)


exits_cleanly(main)  # as the commands do: only one line says that a process was lost
"""


def processes(
    command: list[str], last: list[list[str]], variables: Sequence[dict[str, str]] = ({}, {})
) -> list[subprocess.Popen]:
    """Start ``command`` once for each list of final arguments in ``last``.

    ``variables`` holds the environment variables of each process. ``{}`` in an argument or a
    variable is replaced with an address for process 0.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = re.sub(
        "--xla_force_host_platform_device_count=[0-9]+", "", os.environ.get("XLA_FLAGS", "")
    )
    environment = os.environ | {
        "PYTHONPATH": str(Path(pretrain.__file__).parent.parent),
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    return [
        subprocess.Popen(
            [a.replace("{}", address) for a in [sys.executable, *command, *mine]],
            env=environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mine, own in zip(last, variables, strict=False)
    ]


def ended(started: list[subprocess.Popen], within: float = 300) -> list[tuple[int, str, str]]:
    """Return the exit code, output and errors of each process; kill the remaining ones."""
    end = time.monotonic() + within
    try:
        said = [p.communicate(timeout=end - time.monotonic()) for p in started]
    finally:
        for p in started:
            p.kill()
    return [(p.returncode, *texts) for p, texts in zip(started, said, strict=True)]


def driven(*jobs: dict) -> list[tuple[int, str, str]]:
    return ended(processes(["-c", DRIVER, "{}"], [[str(i), json.dumps(jobs)] for i in range(2)]))


def outcomes(end: tuple[int, str, str], code: int = 0) -> list[dict]:
    assert end[0] == code, end[2]
    return [json.loads(line) for line in end[1].splitlines() if line.startswith("{")]


def experiment(folder: Path, name: str = "SBLD", **changes):
    values = {"method": METHODS[name], "batch": 16, "accumulate": 2, "optim": Optim(eps=1e-3)}
    return runs.experiment(folder, **values | changes)


def slurm(tasks: int) -> list[dict[str, str]]:
    """Return the variables that ``srun`` sets for each of its tasks on one host.

    JAX derives the port from the job id. The function chooses an id whose port is free.
    """
    for job in itertools.count(os.getpid()):
        with suppress(OSError), socket.create_server(("", 61440 + job % 4096)):
            break
    step = {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": str(tasks)}
    return [step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(tasks)]


def open_mpi(tasks: int) -> list[dict[str, str]]:
    """Return the variables that ``mpirun`` of Open MPI 4 sets for each of its tasks on one host."""
    job = int(slurm(1)[0]["SLURM_JOB_ID"])
    uri = {
        "OMPI_MCA_orte_hnp_uri": f"{job << 12}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": str(tasks),
    }
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [uri | dict.fromkeys(names, str(i)) for i in range(tasks)]


PAIR = ["--coordinator", "{}", "--processes", "2"]
PMAP = ["parallel=pmap", "mesh.fsdp=1", "mesh.tensor=1"]


def test_two_processes_stop_resume_and_equal_one(tmp_path):
    """Two processes stop and resume together, with the results of one process.

    First, one process receives SIGTERM. New processes resume the run, and one of them receives
    SIGTERM before the first step. Then the run finishes. Runs with different configs or
    with ``parallel=pmap`` are refused, and an error of process 0 alone ends both processes. In
    another run, ``kill -9`` ends one process, and a single process then continues the run alone.
    """
    e = experiment(tmp_path, method=DROPPING, accumulate=1, checkpoint_every=2, mesh=Mesh(1, 2, 2))
    alone, config, folder = tmp_path / "alone", runs.script(tmp_path, e), str(tmp_path / "run")
    with runs.only(1):
        pretrain.run_experiment(replace(e, mesh=Mesh()), alone)
    again, killed = {"config": config, "folder": folder}, tmp_path / "killed"
    first, second = (outcomes(end) for end in driven(again | {"term": 3}))
    assert first == second
    survivor, dead = ends = driven(
        again | {"term": 1},
        again,
        again,
        again | {"folder": f"{tmp_path}/unlike", "set1": ["seed=1", "optim.peak_lr=0.5"]},
        again | {"folder": f"{tmp_path}/pmap", "set0": PMAP, "set1": PMAP},
        again | {"folder": f"{tmp_path}/untracked", "untracked": True},
        again | {"folder": str(killed), "kill": 2},
    )
    mine = outcomes(survivor, os.EX_TEMPFAIL)
    assert mine == outcomes(dead, -signal.SIGKILL)
    stopped, loss, finished, unlike, pmap, untracked = mine
    for said, steps in ((first[0], "[34]"), (stopped, "[45]")):
        assert re.fullmatch(
            rf"stopped by SIGTERM; saved a checkpoint at step {steps} of train large; .*",
            said["Preempted"],
        )
    assert loss == finished and "loss" in loss
    assert unlike["UserError"] == (
        "processes 0 and 1 have different configs: optim.peak_lr: 0.005 and 0.5; seed: 0 and 1; "
        "start all processes with the same command"
    ).replace("0.005", repr(e.optim.peak_lr))
    assert (
        pmap["UserError"]
        == "parallel=pmap supports only one process, but this run has 2: set parallel=mesh"
    )
    assert untracked == {"UserError": "process 0: no tracker"}
    runs.assert_close(tmp_path / "run", alone)
    assert survivor[2].splitlines()[-1] == joining.LOST
    said = [
        [line for line in end[2].splitlines() if re.match("train|resuming|the run", line)]
        for end in ends
    ]
    assert any(line.startswith("resuming at step") for line in said[0]) and said[1] == []
    with runs.only(1):
        pretrain.run_experiment(replace(e, mesh=Mesh()), killed)
    runs.assert_close(killed, alone)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_two_new_processes_resume_after_a_kill(tmp_path, who):
    e = experiment(tmp_path, "SBLD", checkpoint_every=2, mesh=Mesh(1, 2, 2))
    job = {"config": runs.script(tmp_path, e), "folder": str(tmp_path / "run")}
    with runs.only(1):
        pretrain.run_experiment(replace(e, mesh=Mesh()), tmp_path / "alone")
    ends = driven(job | {"kill": 2, "who": who})
    assert (ends[1 - who][0], ends[who][0]) == (os.EX_TEMPFAIL, -signal.SIGKILL)
    assert joining.LOST in ends[1 - who][2]
    one, other = driven(job)
    assert outcomes(one) == outcomes(other)
    runs.assert_close(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
def test_one_process_resumes_after_a_kill(tmp_path):
    e = experiment(tmp_path, "V-cycle", checkpoint_every=2)
    folder = tmp_path / "run"
    driven({"config": runs.script(tmp_path, e), "folder": str(folder), "kill": 4})
    with runs.only(1):
        pretrain.run_experiment(e, tmp_path / "alone")
    pretrain.run_experiment(e, folder)
    runs.assert_close(folder, tmp_path / "alone")


@pytest.mark.slow
def test_two_processes_measure_their_steps_together(tmp_path):
    """The numbers of process 0 count for both, and a run that is resumed keeps them."""
    e = experiment(tmp_path, "V-cycle", steps=0, seconds=0.5, checkpoint_every=1, mesh=Mesh(fsdp=4))
    folder = tmp_path / "run"
    job = {"config": runs.script(tmp_path, e), "folder": str(folder)}
    driven(job | {"kill": 1})
    measured = (folder / "tiny-seconds.json").read_bytes()
    one, other = driven(job)
    assert outcomes(one) == outcomes(other)
    assert (folder / "tiny-seconds.json").read_bytes() == measured
    config, result = (json.loads((folder / f"{n}.json").read_text()) for n in ("config", "result"))
    counts = [p["steps"] for p in result["phases"] if p["steps"]]
    assert sum(counts) == config["steps"] and len(counts) == 3


def of(method: str):
    """An experiment of a method, with heads for an axis that spans both processes."""
    return lambda folder: experiment(folder, method, model=replace(runs.MODEL, heads=4, head_dim=2))


def growing(by):
    def made(folder):
        with runs.only(1):
            runs.small(folder)
        return runs.growing(folder, GrowTo(by=by), optim=Optim(eps=1e-3))

    return made


def of_lora(folder):
    checkpoint(folder / "gpt2", FAMILIES["gpt2"])
    tuned = tuning(cola(folder / "cola"), lora=LoRA(rank=4)).of(folder / "gpt2", 1e-2, 0)
    few = {"steps": 2, "checkpoint_every": 2, "eval_every": 2, "optim": Optim(eps=1e-3)}
    return replace(tuned, name="tuned", **few)


# On a torus of TPUs, the devices of two hosts may alternate along an axis of the mesh.
ALTERNATING = {"order": [0, 2, 1, 3]}
SHARED = {
    "SBLD, data": (of("SBLD"), Mesh(), {}),
    "SBLD, data and tensor": (of("SBLD"), Mesh(2, 1, 2), {}),
    "V-cycle, fsdp": (of("V-cycle"), Mesh(fsdp=4), {}),
    "V-cycle, tensor": (of("V-cycle"), Mesh(1, 1, 4), {}),
    "alternating, fsdp": (of("SBLD"), Mesh(fsdp=4), ALTERNATING),
    "alternating, data and tensor": (of("SBLD"), Mesh(2, 1, 2), ALTERNATING),
    "growth by operators": (growing(runs.DOUBLED), Mesh(1, 4), {}),
    "growth by learned maps": (growing(Learned(LiGO("interleave"), 9)), Mesh(1, 4), {}),
    "a LoRA that is sharded over both": (of_lora, Mesh(1, 4), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_two_processes_give_the_same_losses_as_one(tmp_path, name):
    """Also the factors of a LoRA are saved completely, although each process has a part of them."""
    make, mesh, more = SHARED[name]
    e = make(tmp_path)
    with runs.only(1):
        pretrain.run_experiment(e, tmp_path / "alone")
    config = runs.script(tmp_path, replace(e, mesh=mesh))
    one, other = driven({"config": config, "folder": str(tmp_path / "run"), **more})
    assert outcomes(one) == outcomes(other)
    runs.assert_close(tmp_path / "run", tmp_path / "alone")
    if make is of_lora:
        files = (tmp_path / run / "lora.npz" for run in ("run", "alone"))
        saved, expected = (load_adaptation(file).params for file in files)
        chex.assert_trees_all_close(saved, expected, rtol=1e-3, atol=1e-5)


# A process stops itself at a moment of the run.
STOPPING = """
import os, signal, sys
from pkgutil import resolve_name
from train import pretrain
from train.common.errors import exits_cleanly
from train.extras import watch

watch.BEAT, watch.SILENCE = 0.5, 8.0
who, (owner, _, name), calls = sys.argv.pop(1), sys.argv.pop(1).rpartition("."), int(sys.argv.pop(1))
owner = resolve_name(owner)
before = getattr(owner, name)


def counted(*given, **more):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return before(*given, **more)


if who == sys.argv[-1]:
    setattr(owner, name, counted)
exits_cleanly(pretrain.main)
"""
MOMENTS = {
    "first barrier": ["train.extras.joining._watch", "1"],
    "training": ["train.step.inputs.learning_rate", "4"],
    "saving": ["train.store.checkpoint:Checkpoints.save", "2"],
    "export": ["train.store.workdir:Workdir.finish", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["0", "1"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stopped_process_ends_the_other_with_a_line(tmp_path, moment, who):
    config = runs.script(tmp_path, experiment(tmp_path, checkpoint_every=2))
    command = ["-c", STOPPING, who, *MOMENTS[moment], config, "--workdir", str(tmp_path / "run")]
    pair = processes([*command, *PAIR, "--process"], [["0"], ["1"]])
    stopped, other = pair[int(who)], pair[1 - int(who)]
    try:
        _, said = other.communicate(timeout=300)
        assert stopped.poll() is None
    finally:
        for process in pair:
            process.kill()
            process.communicate()
    *before, last = said.splitlines()
    assert other.returncode == os.EX_TEMPFAIL, said
    assert last == watch.silence_message().replace("60 s", "8 s")
    assert not re.search("Traceback|\\*\\*\\*|Check fail|^F[0-9]{4}", said, re.MULTILINE), said
    assert who == "1" or before == []


# 127.0.0.1 in /proc/net/tcp, and in tcp6
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
LISTENING = """
import json, os, sys
from glob import glob
from pathlib import Path
import jax
from train.common import hosts
from train.extras import joining

joining.join_processes(*(f(a) for f, a in zip((str, int, int), sys.argv[1:])))
every = hosts.gather_values([jax.process_index(), jax.process_count()])
links = [os.readlink(name) for name in glob("/proc/self/fd/*") if os.path.lexists(name)]
rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").open()]
mine = [row[1].split(":")[0] for row in rows if f"socket:[{row[9]}]" in links and row[3] == "0A"]
print(json.dumps({"every": every, "listens": mine}))
hosts.gather_values(None)
"""


@pytest.mark.parametrize("cluster", [None, slurm, open_mpi])
def test_processes_find_each_other_and_listen_only_on_the_coordinator_s_address(cluster):
    """By ``--coordinator``, and by the environment variables of Slurm and Open MPI."""
    given = [[], []] if cluster else [["{}", "2", "0"], ["{}", "2", "1"]]
    ends = ended(processes(["-c", LISTENING], given, cluster(2) if cluster else ({}, {})))
    for process, (found,) in enumerate(map(outcomes, ends)):
        assert found["every"] == [[0, 2], [1, 2]]
        # by JAX, by `train.extras.watch`, and by Gloo
        assert len(found["listens"]) >= (2 if process == 0 else 0)
        assert set(found["listens"]) <= LOOPBACK


NODES, HNP = "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri"
CLUSTERS = {
    "a number of hosts": ({NODES: "n[007-9],m1", "SLURM_JOB_ID": "4099"}, "n007:61443"),
    "names of hosts": ({NODES: "n7,m1", "SLURM_JOB_ID": "5"}, "n7:61445"),
    "Open MPI": ({HNP: "8192.0;tcp://10.0.0.1,10.1.0.1:34911"}, "10.0.0.1:61442"),
    "Open MPI, IPv6": ({HNP: "0.0;tcp6://[fe80::1,fe80::2]:43370"}, "fe80::1:61440"),
    "a port": ({NODES: "n7", "JAX_COORDINATOR_PORT": "9"}, "n7:9"),
    "an address": ({"JAX_COORDINATOR_ADDRESS": "n7:12", NODES: "n8"}, "n7:12"),
    "Open MPI 5": ({"OMPI_COMM_WORLD_SIZE": "2"}, f"{socket.gethostname()}:61440"),
    "TPU pod of Kubernetes": ({"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "JOB_COMPLETION_INDEX": "1"}, "t-0.svc:8482"),
    "TPU slices": ({"TPU_WORKER_HOSTNAMES": "t-8", "MEGASCALE_COORDINATOR_ADDRESS": "t-0:8081"}, "t-0:8482"),
    "TPU VM": ({}, ":"),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "expected"), CLUSTERS.values(), ids=CLUSTERS)
def test_the_coordinator_of_a_cluster_is_known_before_jax_listens(monkeypatch, variables, expected):
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "")
    monkeypatch.delenv("JAX_COORDINATOR_PORT")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ":".join(joining._coordinator(None)) == expected
    port = expected.rpartition(":")[2]
    assert os.environ.get("JAX_COORDINATOR_PORT", port) == port


def test_another_address_can_be_given(monkeypatch):
    assert joining._bound("127.0.0.1", "7") == "127.0.0.1:7"
    assert joining._bound("192.0.2.1", "7") is None  # of another host
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:7")
    assert joining._bound("127.0.0.1", "7") is None


@pytest.mark.slow
def test_processes_that_slurm_starts_train_as_one(tmp_path):
    e = experiment(tmp_path, "SBLD", mesh=Mesh(2, 2))
    with runs.only(1):
        pretrain.run_experiment(replace(e, mesh=Mesh()), tmp_path / "alone")
    command = ["-m", "train.pretrain", runs.script(tmp_path, e), "--workdir", str(tmp_path / "run")]
    (code, _, said), (other, _, silent) = ended(processes(command, [[], []], slurm(2)))
    assert (code, other, silent) == (0, 0, "") and "val_loss=" in said
    runs.assert_close(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(("process", "says"), [
    pytest.param("0", "not all of the 2 processes connected within 1 s", marks=pytest.mark.slow),
    ("1", "does not answer within 1 s"),
])  # fmt: skip
def test_a_coordinator_that_does_not_answer_is_told_in_one_line(tmp_path, process, says):
    code = "import sys; from train import pretrain; from train.extras import joining\n"
    code += "from train.common.errors import exits_cleanly; joining.ANSWER = 1\n"
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    command = ["-c", f"{code}exits_cleanly(pretrain.main)", config, *PAIR]
    ((status, _, said),) = ended(processes(command, [["--process", process]]))
    assert status == 2 and says in said and len(said.splitlines()) == 1


# The first program of process 1 takes longer than the default timeout of XLA for other processes.
DRIFTING = """
import sys, time
from train import pretrain
from train.common import hosts
from train.extras import joining
from train.common.errors import exits_cleanly
from train.step import programs
step, late = programs.step, sys.argv.pop(1) == "1"
programs.step = lambda *given: (time.sleep(45 * late), step(*given))[1]
exits_cleanly(pretrain.main)
"""


@pytest.mark.slow
def test_processes_wait_for_each_other_at_the_start(tmp_path):
    config = runs.script(tmp_path, runs.experiment(tmp_path, mesh=Mesh(2, 2)))
    run = [config, "--workdir", str(tmp_path / "run"), *PAIR, "--process"]
    each = [[str(i), *run, str(i)] for i in range(2)]
    (code, _, said), (other, _, _) = ended(processes(["-c", DRIFTING], each))
    assert (code, other) == (0, 0), said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("host:1", None, 0), "--coordinator, --processes and --process belong together"),
        ((None, 2, 0), "--coordinator, --processes and --process belong together"),
        (("host", 2, 0), "--coordinator must be HOST:PORT of process 0, not 'host'"),
        (("host:1", 2, 2), "--process must be between 0 and 1 for 2 processes, but is 2"),
    ],
)
def test_what_names_no_process_is_refused(given, says):
    with pytest.raises(UserError, match=re.escape(says)):
        joining.join_processes(*given)


# Environment variables of a process that belongs to a job but runs without other processes.
FOUR = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}
ALONE = {
    "nothing": {},
    "srun -n 1": slurm(1)[0],
    "a shell of salloc -n 4": FOUR | {"SLURM_JOB_NODELIST": "node[1-4]"},
    "salloc's own step": slurm(1)[0] | {"SLURM_NTASKS": "4"},
    "sbatch -n 4, without srun": FOUR | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
}


@pytest.mark.parametrize("found", ALONE.values(), ids=ALONE)
def test_one_process_stays_alone(monkeypatch, found):
    monkeypatch.setattr(joining.jax.distributed, "initialize", None)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    joining.join_processes()
    assert hosts.gather_values({"a": np.pi}) == [{"a": np.pi}]


def test_one_of_several_stays_alone_only_if_told(monkeypatch):
    def finds_no_cluster(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(joining.jax.distributed, "initialize", finds_no_cluster)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="JAX cannot find them; give --coordinator"):
        joining.join_processes()
    joining.join_processes(processes=1)


@pytest.mark.slow
def test_kill_9_of_process_0_ends_the_others_within_a_minute(tmp_path):
    config = runs.script(tmp_path, experiment(tmp_path, "SBLD", steps=100_000, checkpoint_every=2))
    command = ["-m", "train.pretrain", config, "--workdir", str(tmp_path / "run"), *PAIR]
    pair = processes(command, [["--process", "0"], ["--process", "1"]])
    while not list((tmp_path / "run" / "checkpoints").glob("[0-9]*/SHA256SUMS")):
        assert [p.poll() for p in pair] == [None, None]
        time.sleep(0.1)
    pair[0].kill()
    (_, _, _), (code, _, said) = ended(pair, within=60)
    assert code == os.EX_TEMPFAIL and joining.LOST in said
