"""What the contracts write about starting and watching a run: the command, the metrics of a step,
and checks on every node, each a command with what it must print."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.catalog import load_accelerators
from paceline.catalog.engines import load_engines
from paceline.choices import BatchPolicy
from paceline.job import Job
from paceline.job.job import JobSpec
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.plan.lost_node import fewest_ranks
from paceline.render.environment import PORT, torchrun_options
from paceline.render.mlx import mlx_backend, mlx_launch, runs_mlx

_FREE_BYTES = "df -Pk {} | awk 'NR == 2 {{ printf \"%.0f\\n\", $4 * 1024 }}'"
"""On Linux and macOS alike: POSIX's own columns of df."""

_PLACE = '"$d"'

_WRITABLE = f"d=runs; [ -e {_PLACE} ] || d=.; test -d {_PLACE} && test -w {_PLACE}"
"""Where runs go; the run makes the folder where there is none."""

STATE_SOURCES = {
    "auto": "other ranks, from snapshots in memory or from the newest valid checkpoint",
    "replica": "ranks that hold the same, else from the newest valid checkpoint",
    "memory": "snapshots in memory, else from the newest valid checkpoint",
    "checkpoint": "the newest valid checkpoint",
}
"""`recovery.state`, as the plan chose it -> where a lost rank's state is from; `auto` only where a
step's time is unknown, and so the choice."""


def applies_to(plan: Plan, job: Job) -> str:
    """Which program keeps its samples, checkpoints and metrics as the contracts say."""
    if runs_mlx(plan):
        return "MLX's example program; your own keeps its own samples, checkpoints and metrics"
    if plan.engine == "paceline" and job.spec.program is None:
        return "`paceline run`"
    return (
        "`paceline run`; your own program, or of another engine, keeps its own samples, "
        "checkpoints and metrics, and should be set up like this"
    )


def init_method(plan: Plan, job: Job) -> str:
    """How the plan's ranks find each other, as the contracts' key of this name says it."""
    if runs_mlx(plan):
        return "mx.distributed.init(), with the host file of mlx.launch"
    if plan.cluster.num_nodes > 1 and job.spec.ssh.hosts:
        return f"tcp://{job.spec.ssh.hosts[0].rpartition('@')[2]}:{PORT}"
    return "env://"


_NO_BACKENDS = {
    "xccl": "the catalog has no GPU of Intel (XPU); Gaudi has hccl",
    "mpi": "PyTorch has it only when it is built from source with an MPI",
    "ucc": "PyTorch calls it experimental, and no run here was tested with it",
}
"""Backend -> why no plan uses it.

Source: "Backends" of docs.pytorch.org/docs/stable/distributed.html.
"""


def backend(plan: Plan) -> str:
    """What the plan's ranks talk through."""
    return mlx_backend(plan) if runs_mlx(plan) else plan.cluster.backend


def backends(plan: Plan) -> dict[str, str]:
    """Every backend of the library that trains the plan: whether this plan uses it, whose devices
    it is for, or why it is not there."""
    if runs_mlx(plan):
        return _mlx_backends(plan) | {mlx_backend(plan): "used by this plan"}
    vendors: dict[str, set[str]] = {}
    for each in load_accelerators().values():
        vendors.setdefault(each.backend, set()).add(each.vendor or "any")
    known = {
        name: "used by this plan"
        if name == plan.cluster.backend
        else f"available on devices of: {', '.join(sorted(of))}"
        for name, of in sorted(vendors.items())
    }
    return known | {name: f"not available: {why}" for name, why in _NO_BACKENDS.items()}


def _mlx_backends(plan: Plan) -> dict[str, str]:
    """Those of MLX 0.32 (mlx/distributed), as far as this plan's machines have them."""
    link = plan.cluster.network_link
    jaccl = (
        "not available: it is RDMA over Thunderbolt 5, and the plan's ranks have "
        + ("no link between machines" if link is None else f"{link}")
        + "; cluster.rdma: true where the Macs have it (macOS 26.2)"
    )
    ring = jaccl
    if plan.cluster.uses_rdma:
        jaccl = f"not available: {plan.cluster.num_nodes} Macs have too few ports for a mesh"
        ring = "available: mlx.launch --backend jaccl-ring, with a ring of cables"
    return {
        "ring": "available: TCP, with cluster.mlx_backend: ring",
        "jaccl": jaccl,
        "jaccl-ring": ring,
        "mpi": "available where Open MPI is on every machine: cluster.mlx_backend: mpi",
        "nccl": "not available: MLX has it on NVIDIA GPUs alone (mlx[cuda])",
    }


_BATCHES: Mapping[BatchPolicy, str] = {
    "keep": "the same global batch",
    "shrink": "a global batch and a learning rate that shrink with them",
}


def is_elastic(plan: Plan, spec: JobSpec) -> bool:
    """Whether a run of the plan can go on with fewer ranks."""
    if plan.engine != "paceline" or not spec.recovery.shrink:
        return False
    return fewest_ranks(spec, plan.layout, case_of_plan(plan)) < plan.cluster.num_ranks


def recovery(plan: Plan, spec: JobSpec) -> str:
    """What a run of the plan's engine does when ranks are lost, in a sentence."""
    recover = spec.recovery
    if runs_mlx(plan):
        return (
            "mlx.launch ends all ranks and nobody starts them again: start launch.sh, and all "
            "ranks resume from rank 0's newest checkpoint"
        )
    if plan.engine != "paceline":
        return (
            f"all ranks are ended and started again, {recover.max_restarts} times in a row at most "
            f"without a finished step, and load the newest checkpoint of {plan.engine}"
        )
    state = recover.state if plan.state is None else plan.state.chosen
    lost = f"lost ranks get their state from {STATE_SOURCES[state]}"
    rest = "when the lost ranks are back: " + (
        "fewer cannot hold this layout" if recover.shrink else "recovery.shrink is off"
    )
    if is_elastic(plan, spec):
        rest = f"with fewer data ranks and {_BATCHES[recover.batch]}, until the node returns"
    return (
        f"the workers that live stay, {lost}; the run continues {rest}; "
        f"{recover.max_restarts} times in a row at most without a finished step"
    )


def checkpoint_storage(plan: Plan, job: Job) -> str:
    """Where a run writes its checkpoints, and where they are copied to."""
    copies = job.spec.checkpoint.copy_to
    first = _first_storage(plan)
    if copies is None:
        return first
    how = "copied to" if plan.engine == "paceline" else f"which {plan.engine} does not copy to"
    return f"{first}, {how} {copies}"


def _first_storage(plan: Plan) -> str:
    if runs_mlx(plan):
        return "checkpoints/ on the first Mac, from which all ranks get the state"
    several = " on storage that every node sees" if plan.cluster.num_nodes > 1 else ""
    return f"runs/<run>/checkpoints{several}"


def sums_in(plan: Plan, job: Job) -> str:
    """Type in which gradients are added up between ranks."""
    asked = job.spec.train.gradient_compression
    if asked == "powersgd":
        return "float32, compressed by PowerSGD"
    if asked != "none":
        return _NARROW[asked]
    return _type_of(plan, load_engines()[plan.engine].reduce_bytes)


def weights_in(plan: Plan) -> str:
    """Type in which the engine trains parameters, and of their copy where it keeps one."""
    engine = load_engines()[plan.engine]
    is_sharded = plan.layout.sharding in ("zero2", "full", "hybrid")
    kind = _type_of(plan, engine.sharded_bytes if is_sharded else engine.weight_bytes)
    return kind if kind == "float32" or not engine.master_bytes else f"{kind}, copied in float32"


def _type_of(plan: Plan, num_bytes: float) -> str:
    if num_bytes == 4 or plan.precision in ("fp32", "tf32"):
        return "float32"
    return _NARROW.get(plan.precision, "bfloat16")


_NARROW = {"bf16": "bfloat16", "fp16": "float16"}


def preflight_command(plan: Plan, job: Job) -> str:
    """The command that looks at every node of the plan."""
    place = " --on ssh" if plan.cluster.num_nodes > 1 else ""
    return f"paceline preflight {job.words}{place} --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A command that must print something, on every node."""

    name: str
    command: str
    expect: str
    """What its output must be, or `at least N`."""

    fix: str
    """The command that repairs it, or shows what is wrong."""

    layer: str = "Hardware Layer"
    """Layer of the check, one of the eight in `check/preflight/layers.py`."""

    when: Literal["before the start", "every minute"] = "before the start"


def health_checks(plan: Plan) -> tuple[HealthCheck, ...]:
    """What must hold on every node of the plan's cluster."""
    cluster, needed = plan.cluster, plan.estimate.memory.known_bytes
    has_gpus, is_mac = cluster.backend == "nccl", cluster.backend == "mlx"
    checks = {
        HealthCheck(
            name="accelerators",
            command="nvidia-smi --query-gpu=index --format=csv,noheader | grep -c '^[0-9]'",
            expect=str(cluster.ranks_per_node),
            fix="sudo dmesg | grep -i -e xid -e 'fallen off'",
        ): has_gpus,
        HealthCheck(
            name="memory errors",
            command="nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total "
            "--format=csv,noheader | sed 's/.*N.A.*/0/' | sort -u",  # [N/A] without ECC
            expect="0",
            fix="sudo nvidia-smi --gpu-reset -i INDEX",
            layer="Health Check",
            when="every minute",
        ): has_gpus,
        HealthCheck(
            name="network ports",
            command="cat /sys/class/infiniband/*/ports/*/state | sort -u",
            expect="4: ACTIVE",
            fix="ibstat",
        ): has_gpus and cluster.uses_rdma,
        HealthCheck(
            name="mlx",
            command='python3 -c "import mlx.core as mx; print(mx.metal.is_available())"',
            expect="True",
            fix="python3 -m pip install mlx",
        ): is_mac,
        HealthCheck(
            name="memory of the GPU",
            command='python3 -c "import mlx.core as mx; '
            "print(int(mx.device_info()['max_recommended_working_set_size']))\"",
            expect=f"at least {needed}",
            fix=f"sudo sysctl iogpu.wired_limit_mb={-(-needed // 2**20)}",
        ): is_mac,
        HealthCheck(
            name="RDMA devices",
            command="ibv_devices | grep -c rdma_",
            expect="at least 1",
            fix="rdma_ctl enable",
        ): is_mac and cluster.uses_rdma,
        HealthCheck(
            name="shared memory",
            command=_FREE_BYTES.format("/dev/shm"),
            expect="at least 1073741824",
            fix="sudo mount -o remount,size=16g /dev/shm",
            layer="Health Check",
        ): not is_mac,
        HealthCheck(
            name="checkpoint storage",
            command=f"{_WRITABLE} && {_FREE_BYTES.format(_PLACE)}",
            expect=f"at least {3 * plan.estimate.num_checkpoint_bytes}",
            fix="mkdir -p runs && du -sh runs/*",
            layer="Checkpoint Layer",
        ): True,
    }
    return tuple(check for check, is_asked in checks.items() if is_asked)


def launch_command(plan: Plan) -> str:
    """The command that starts the plan's ranks, run on every node (torchrun) or on one (MLX).

    Its upper-case words are environment variables of the launch script.
    """
    if runs_mlx(plan):
        return " ".join([*mlx_launch(plan), "python3", "train.py"])
    return " ".join(["torchrun", *torchrun_options(plan), "train.py"])
