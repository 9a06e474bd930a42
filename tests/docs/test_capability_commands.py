"""docs/capabilities.md: each row's command is run as it stands, and shows what its row says."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.command import run_command
from tests.docs.capability_inputs import MAKERS
from tests.docs.test_capabilities import ROWS


@dataclass(frozen=True)
class Try:
    folder: str
    """The inputs beside which it is run, of `capability_inputs`."""

    shows: str
    """Regular expression that its output has; `.` is any character."""

    code: int = 0
    """Its exit code."""

    is_slow: bool = False
    """Whether it trains for longer than a few seconds."""

    holds: str = ""
    """PATH in its command."""

    writes: str = ""
    """A file that it writes, as a glob."""


def slow(folder: str, shows: str, writes: str = "") -> Try:
    return Try(folder, shows, is_slow=True, writes=writes)


TRIES: dict[str, Try] = {
    "S0-1": Try("one_device", r'"framework": "pytorch".*"adapt".*"adapted"', holds="train.py"),
    "S0-2": Try("cpu", r'"num_cores": [1-9].*"memory_bytes": [1-9]'),
    "S0-3": Try("gpus", r"parameters +[\d.]+ GiB.*optimizer +[\d.]+ GiB.*may be used +71\.7 GiB"),
    "S0-4": Try("gpus", r"(\n.*GiB +\d+\.\d%){20}"),
    "S0-5": Try("gpus", r"32 blocks, fp8"),
    "S0-6": Try("cpu", r"batch +96, -4\.00%.*6 a micro-batch x 2 accumulated x 8 ranks"),
    "S0-7": Try("gpus", r"num_machines: 2\nnum_processes: 16.*mixed_precision: bf16.*launch\.sh"),
    "S0-8": Try("one_device", r"\+from torch\.distributed\.fsdp import fully_shard.*set_epoch"),
    "S0-9": Try("killed", r"training from step (?!1,)\d+, from step-.*step 60 of 60"),
    # On a busy machine steps vary too much for a verdict, its share and its changes.
    "S0-10": slow(
        "cpu",
        r"\ndata +.*\nforward .*\nbackward .*verdict +(no verdict: |.*waits for +\w+.*-> )",
    ),
    "S0-11": slow("cpu", r"ranks +1 +2 +4\n.*speed-up +1.00 .*efficiency +100% .*verdict"),
    "S0-12": Try("cpu", r"PASS +sharded as planned.*PASS +loss curve in float64.*0 failed"),
    "S0-13": slow("out_of_memory", r"changed +layout\.micro_batch=2: rank 1 ran out of memory"),
    "S0-14": Try("gpus", r"PROVIDER.*STORAGE +EGRESS.*aws +on demand.*PRICE DATE"),
    "S0-15": Try("cpu", r"19d 04h on 64 x H100-SXM.*29,479\s+accelerator-hours"),
    "S0-16": Try("gpu", r"or 10m 00s of idleness\. That is \$[\d.]+ at the most"),
    "S0-17": Try("data", r"1 exact, 0 near.*data-schema: data/rows\.jsonl:22", code=1),
    "S0-18": Try("finished", r"whole +RUN/checkpoints/step-00000060", holds="RUN/checkpoints"),
    "S0-19": slow("cpu", r"0 failed.*data_loading.*checkpoint_load.*inference.*two_ranks"),
    "S0-20": Try("cpu", r"vram +no accelerator; 22\.4 GiB was asked for.*torch +torch 2", code=1),
    "S0-21": slow("cpu", r"step 60 of 60", writes="runs/*/**/events.out.tfevents*"),
    "S0-22": Try("finished", r"state +finished\nstep +60 of 60"),
    "S0-23": Try("finished", r"\bone +finished +60/60"),
    "S0-24": Try("cpu", r"paceline run sentiment/job\.yaml", writes="sentiment/job.yaml"),
    "S0-25": Try(
        "faulty", r"train\.py:10: error: .*token \(not shown\) +\[secret-in-file\]", code=1
    ),
    "S0-26": Try("finished", r"# rows.*Throughput.*Memory.*ranks.*efficiency"),
    "S0-27": Try("finished", r"logits of 8 samples.*serve:app", writes="out-s0-27/serve.py"),
    "S1-1": Try("gpus", r"--nnodes=1:2.*--max-restarts=3"),
    "S1-2": slow("cpu", r"train\.bucket, on 2 ranks, measured.*64KiB.*25MiB.*verdict"),
    "S1-3": Try("cpu", r"rate +0\.008, by the linear rule.*square root +0\.002828"),
    "S1-4": Try(
        "gpus",
        r"one all-gather, of\s+embedding.*takes\s+1\.96 GiB.*decoder\s+block: 416\s+MiB.*fix",
    ),
    "S1-5": Try("gpus", r"recompute [\d.]+ m?s.*HFU"),
    "S1-6": Try("gpus", r"parallelize, over 8 tensor ranks.*colwise"),
    "S1-7": Try("gpus", r"pipeline 4 \(interleaved.*bubble"),
    "S1-8": Try("gpus", r"(\n\S[^\n]* x (pipeline|context parallel|tensor) \d[^\n]*%){3}"),
    "S1-9": Try("gpus", r'"train_batch_size": 128,.*"stage": [123]'),
    "S1-10": Try("faulty", r"TCP sockets over docker0: NCCL_IB_DISABLE=1 forbids RDMA"),
    "S1-11": Try("cpu", r"2 ranks met over gloo.*step 60 of 60, 0 restarts"),
    "S1-12": slow(
        "cpu", r"PASS +compressed bf16 +loss after 4 steps.*all-reduced\s+[\d,]+\s+bytes.*0 failed"
    ),
    "S1-13": slow("cpu", r"storage.*pass"),
    "S1-14": Try(
        "cpu", r"every +54m 10s, 650 steps.*Young +54m 30s.*every 30 min +goodput 97\.53%"
    ),
    "S1-15": slow("cpu", r"stopped, in \w+ for .*\(right\).*state from replica.*PASSED"),
    "S1-16": Try("three_nodes", r"after a lost node 2 of the 2 remaining ranks continue"),
    "S1-17": Try("killed", r"finished +step 60 of 60.*state +sha256 \w{64}"),
    "S1-18": slow("cpu", r"ok +faults +3 of 3 happened.*steps lost.*PASSED"),
    "S1-19": slow("cpu", r"flip rank=1 step=12: .*healed from \w+.*PASSED"),
    "S1-20": slow("cpu", r"bubble \d+% of a step, measured; 33% by the schedule\n +stage 0: waits"),
    "S1-21": Try("faulty", r"\[world-size-hardcoded\]", code=1),
    "S2-1": Try("gpus", r'"worldSize": 32.*"checkpointStrategy".*"monitoringSetup"'),
    "S2-2": Try("gpus", r"phase 1, Resource Assessment Review.*phase 16, Approve launch"),
    "S2-3": Try("gpus", r"phase 11, Hyper-parameter Review: \*\*review\*\*", code=3),
    "S2-4": Try("gpus", r'"rank": 15,\s+"node": 1,\s+"gpu": 7'),
    "S2-5": Try(
        "gpus", r'"memoryPerNode": "\d+ GiB: 8 ranks x [\d.]+ GiB .*"shardingStrategy": "\w+'
    ),
    "S2-6": Try("gpus", r'"nccl": "used by this plan".*"mpi": "not available: PyTorch'),
    "S2-7": Try("diloco", r"'diloco', which is not available: an outer optimizer", code=2),
    "S2-8": Try("trainer", r'"status": "success".*"learningCurve".*"epoch": 3'),
    "S2-9": Try("ray", r'"status": "success".*"world": 2'),
    "S2-10": Try("two_nodes", r"TF_CONFIG.*MultiWorkerMirrored"),
    "S2-11": Try("kubeflow", r'"status": "success".*"sends": .*"/apis/v2beta1/runs"'),
    "S2-12": Try("no_data", r"#SBATCH --nodes=1.*==> submitted by <=="),
    "S2-13": Try("gpus", r'"healthChecks".*"command".*"alerts".*"dashboardUrl": "http://127'),
    "S2-14": slow("cpu", r"weak scaling, cpu, measured.*\nbatch +\d+ +16\b"),
    "S2-15": Try(
        "gpus", r'"costVsTimeTradeoffs": \[.*on \d nodes.*on 1 node.*"providerComparison"'
    ),
    "S2-16": Try("gpus", r"written +plan/launch-script\.sh", writes="plan/debug.sh"),
    "S3-1": Try(
        "faulty", r"\[ddp-does-not-fit\].*\[scaling-not-linear\].*\[set-epoch-missing\]", code=1
    ),
    "S3-2": Try("lint", r"job\.yaml:1: error: P001: no layout fits on 1 node x 1 T4", code=1),
    "S3-3": Try("faulty", r"cause .*symptom .*also +2\. "),
    "S3-4": Try("cpu", r"True"),
    "S3-5": Try("gpus", r"in host memory.*gathered +\d.*on the host +[\d.]+ GiB"),
    "S3-6": Try("finished", r"no-gradient +did not fire.*loss-scale-low +not measured"),
    "S3-7": slow(
        "cpu", r"PASS +sampler covers the data +\d+ samples once each in 2 epochs, in diff"
    ),
    "S3-8": Try("finished", r"written|SHA-256", holds="RUN/checkpoints/step-00000060"),
    "S3-9": Try("cpu", r"why\n.*set_epoch.*\nfix\n"),
    "S3-10": Try("cpu", r"Mixed precision is almost free.*Sources: Rajbhandari"),
    "S3-11": Try(
        "cpu", r"PASS +samples of each rank.*PASS +gradients in float64.*PASS +parameters"
    ),
    "S3-12": Try("faulty", r'"version": "2\.1\.0".*"ruleId": "world-size-hardcoded"', code=1),
    "S3-13": Try("hundred", r'"num_nodes": 8,.*"offload_parameters": true'),
    "S4-1": Try("gpus", r'"total_gpus": 16.*"pre_flight_checklist".*"fix_command"'),
    "S4-2": Try("macs", r'"ssh": "mac-b".*mlx\.launch.*average_gradients'),
    "S4-3": Try("macs", r"2 nodes x 1 M2-Ultra.*on the fullest rank, estimated.*may be used"),
    "S4-4": Try("cpu", r"network +(no RDMA NIC.*/sys/class/infiniband|\w+)"),
    "S4-5": Try(
        "faulty",
        r"NCCL_NET_GDR_LEVEL=5: .*\[nccl-env-deprecated\].*NCCL_IB_DISABLE=1: .*falls back to TCP",
    ),
    "S4-6": Try("two_nodes", r"rdma/.*IPC_LOCK.*/dev/shm"),
    "S4-7": Try("sweeps", r"all_reduce-tcp takes 8\.00 times as long for 1 KiB \(latency\)"),
    "S4-8": slow("cpu", r"linear.*square root.*warm-up"),
    "S4-9": Try("hosts", r"node +devices +matrix products +share.*\na +1 .*waits for"),
    "S4-10": Try("hosts", r'"layers": \[.*"evidence"'),
    "S4-11": Try("hosts", r"pass +a,b"),
    "S4-12": Try("finished", r"straggler +\S.*event StragglerNamed"),
    "S4-13": slow("cpu", r"step 60 of 60", writes="copies/**/step-00000060*"),
    "S4-14": Try("cpu", r"state from replica.*SHA-256 equal to the undisturbed run.*PASSED"),
    "S4-15": Try("cpu", r"detect .*fence .*meet .*state .*first step .*0 steps lost.*PASSED"),
    "S4-16": Try(
        "gpus", r"detect +\d+ ms, .*\(measured.*assumed.*150 s \(FlashRecovery\): published"
    ),
    "S4-17": Try("gpus", r'"chunk_size": 50000.*"setting": "checkpoint.every=390"'),
    "S4-18": slow(
        "cpu", r"waits for +communication: \d+% of a step, (above|below|20 to) |no verdict: "
    ),
    "S4-19": Try("hosts", r"a: the same files as here\nb: the same files as here"),
    "S4-20": Try("macs", r"taskpolicy"),
    "S4-21": Try("refused", r"J006: `ssh\.hosts\[0\]` is '-oProxyCommand", code=2),
    "S4-22": Try("data", r"1 of 2 kept \(Great Expectations\).*not_be_null of text", code=1),
}
WHOLE_RUNS = {
    *("S0-9", "S0-12", "S0-27", "S1-11", "S1-17", "S2-8", "S2-9", "S2-11"),
    *("S3-11", "S4-14", "S4-15"),
}
"""Rows whose command trains on ranks for some seconds; tests of their packages show the same."""

NEEDS = {row[0]: found[1] for row in ROWS if (found := re.search(r"\bneeds `(\w+)`", row[4]))}
"""Row -> the package without which its command cannot do what it says."""


@dataclass
class Inputs:
    """Folders are made once, and a command that two rows have is run once."""

    root: Path
    done: dict[tuple[str, str], "subprocess.CompletedProcess[str]"] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        path = self.root / name
        if not path.exists():
            path.mkdir()
            MAKERS[name](path)
        return path

    def run(self, name: str, command: str) -> "subprocess.CompletedProcess[str]":
        if (name, command) not in self.done:
            self.done[name, command] = run_in(self.folder(name), command)
        return self.done[name, command]


def run_in(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, with the folder's `bin` first on PATH."""
    environment = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    text, _, given = command.replace("COPIES", f"file://{folder}/copies").partition(" < ")
    words = shlex.split(text)[1:]
    if command.startswith("paceline."):  # of the library
        words = ["-c", f"import paceline; flag = True; print({command})"]
    elif given:
        words = ["-m", "paceline", *words]
    else:
        return run_command(*words, folder=folder, env=environment)
    return subprocess.run(
        [sys.executable, *words],
        input=(folder / given).read_text() if given else "",
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("rows"))


def test_every_row_is_tried():
    assert list(TRIES) == [row[0] for row in ROWS]


def marks_of(id: str) -> list[pytest.MarkDecorator]:
    if TRIES[id].is_slow:
        return [pytest.mark.slow]
    return [pytest.mark.repeat] if id in WHOLE_RUNS else []


@pytest.mark.ranks
@pytest.mark.parametrize(
    "id",
    [pytest.param(id, marks=marks_of(id)) for id in TRIES],
)
def test_a_rows_command_shows_what_the_row_says(id: str, inputs: Inputs):
    row = TRIES[id]
    command = next(cells[3] for cells in ROWS if cells[0] == id).strip("`")
    command = command.replace("PATH", row.holds or "PATH").replace("OUT", f"out-{id.lower()}")
    done = inputs.run(row.folder, command)
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    if id in NEEDS and importlib.util.find_spec(NEEDS[id]) is None:
        assert done.returncode == 2, output
        assert f"this contract needs {NEEDS[id]}, which is not installed" in output
        return
    assert done.returncode == row.code, output
    assert re.search(row.shows, output, re.DOTALL), output
    assert not row.writes or list(inputs.folder(row.folder).glob(row.writes))


@pytest.mark.repeat  # `tests/run/test_resume.py` and `test_recovery.py`
def test_s1_17_the_resumed_run_ends_with_the_bits_of_one_that_was_not_killed(inputs: Inputs):
    resumed = inputs.run("killed", "paceline run --resume RUN")
    undisturbed = inputs.run("cpu", "paceline run job.yaml")
    bits, expected = (re.search(r"sha256 (\w{64})", each.stdout) for each in (resumed, undisturbed))
    assert bits[1] == expected[1]
