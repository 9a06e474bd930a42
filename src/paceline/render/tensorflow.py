"""TensorFlow: a TF_CONFIG for every worker, and what starts them.

One worker is a node with all its GPUs, or one rank of a CPU. Leaves out: TPUStrategy, and
ParameterServerStrategy, which is asynchronous and so no layout of ours.
"""

from collections.abc import Iterator
from dataclasses import replace

from paceline.estimate.estimate import price_one
from paceline.job import Job
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.render.carried import OF_EXAMPLE
from paceline.render.device import accelerator_refusals
from paceline.render.engine import Files, Gap
from paceline.render.example import example, example_gaps
from paceline.render.hosts import host_names
from paceline.render.shared_gaps import offload_gaps, precision_gaps, split_gaps
from paceline.render.shell import script
from paceline.render.text import header, to_json
from paceline.units import bytes_apart

_PORT = 12345
"""As in TensorFlow's own guide of several workers."""

_BYTES_PER_PARAMETER = 16
"""float32 weights, gradients and two moments."""

CARRIES = OF_EXAMPLE | {"ssh.hosts"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`launch.sh`, `tf_config/worker-K.json`, what fills in the hosts, and the example program."""
    files = {"launch.sh": _launch(plan, job)}
    workers = num_workers(plan)
    if workers == 1:
        return files | example(plan, job, "train_tensorflow.py")
    for worker in range(workers):
        files[f"tf_config/worker-{worker}.json"] = to_json(tf_config(plan, job, worker))
    return files | example(plan, job, "train_tensorflow.py", "tf_config.py")


def num_workers(plan: Plan) -> int:
    """Processes: MultiWorkerMirroredStrategy uses all GPUs of its machine in one."""
    is_cpu = plan.cluster.accelerator == "cpu"
    return plan.cluster.num_ranks if is_cpu else plan.cluster.num_nodes


def tf_config(plan: Plan, job: Job, worker: int) -> dict[str, object]:
    """What the environment variable TF_CONFIG holds for a worker."""
    if plan.cluster.is_local:
        addresses = [f"127.0.0.1:{_PORT + place}" for place in range(num_workers(plan))]
    elif job.spec.ssh.hosts:
        names = [host.rpartition("@")[2] for host in host_names(plan, job)]
        addresses = [f"{name}:{_PORT}" for name in names]
    else:
        addresses = [f"node-{place}:{_PORT}" for place in range(num_workers(plan))]
    return {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}


def _launch(plan: Plan, job: Job) -> str:
    cluster, workers = plan.cluster, num_workers(plan)
    about = header(plan, job, *_about(plan))
    lines = ['cd "$(dirname "$0")"', 'python="${PYTHON:-python3}"']
    lines += ['train="${TRAIN_SCRIPT:-train.py}"']
    if cluster.accelerator == "cpu":
        threads = max(1, round(cluster.cores_per_rank or 1))
        lines += [
            "# Each worker would start a thread for every core of the machine.",
            f"export TF_NUM_INTRAOP_THREADS={threads} TF_NUM_INTEROP_THREADS={threads}",
        ]
    if workers == 1:
        return script(about, *lines, 'exec "$python" "$train" "$@"')
    if not cluster.is_local:
        lines += [
            f': "${{WORKER:?set it to the number of this node, 0 to {workers - 1}}}"',
            'TF_CONFIG="$("$python" tf_config.py "$WORKER")"',
            "export TF_CONFIG",
            'exec "$python" "$train" "$@"',
        ]
        return script(about, *lines)
    lines += [
        "workers=()",
        f"for worker in $(seq 0 {workers - 1}); do",
        '  TF_CONFIG="$("$python" tf_config.py "$worker")"',
        "  export TF_CONFIG",
        '  "$python" "$train" "$@" &',
        '  workers+=("$!")',
        "done",
        "trap 'kill \"${workers[@]}\" 2>/dev/null || true' EXIT",
        "# The others of a dead worker wait for it: the first failure ends all.",
        'for _ in "${workers[@]}"; do wait -n; done',
    ]
    return script(about, *lines)


def _about(plan: Plan) -> list[str]:
    cluster, workers = plan.cluster, num_workers(plan)
    if workers == 1:
        return ["MirroredStrategy over the GPUs of this machine."]
    if cluster.is_local:
        return [f"MultiWorkerMirroredStrategy: {workers} workers on this machine."]
    return [
        f"MultiWorkerMirroredStrategy: {workers} workers, one a node with all its GPUs.",
        "Run it on every node, with WORKER the node's number, and HOSTS the hosts of all workers.",
    ]


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What TensorFlow 2.21's strategies and the example program lack."""
    return [*_refusals(plan), *_layout_gaps(plan), *example_gaps(plan, job, "own")]


def _refusals(plan: Plan) -> Iterator[Gap]:
    yield from accelerator_refusals(
        plan,
        uses=("nccl", "gloo"),
        why="these files are for MirroredStrategy and MultiWorkerMirroredStrategy on GPUs and "
        "CPUs; TPUStrategy is not tested",
    )
    why = "the program's loop has no loss scaler, and TensorFlow 2.21 no fp8 training"
    yield from precision_gaps(plan, dict.fromkeys(("fp16", "fp8"), (why, None)))


def _layout_gaps(plan: Plan) -> Iterator[Gap]:
    layout = plan.layout
    yield from split_gaps(
        plan,
        "TensorFlow's strategies (2.21) split the batch alone: every one of the "
        f"{plan.cluster.num_ranks} replicas would be a data rank with the whole model, not the "
        f"plan's {layout.data}",
    )
    splits = layout.sharding != "none" and layout.shard_degree > 1
    if splits or layout.recompute != "none":
        yield from _whole(plan, splits=splits)
    yield from offload_gaps(plan, "TensorFlow's strategies (2.21) keep it beside the weights")


def _whole(plan: Plan, *, splits: bool) -> Iterator[Gap]:
    """Gaps of sharding and recomputation: every replica holds everything, where it fits."""
    layout = plan.layout
    needed = _BYTES_PER_PARAMETER * plan.profile.num_parameters + _kept_bytes(plan)
    size = f"{' of '.join(bytes_apart(needed, plan.cluster.usable_bytes))} a rank"
    fits = needed <= plan.limit_bytes
    too_much = "" if fits else f", which needs {size}"
    shards = "an engine that shards: torchrun, deepspeed"
    if splits:
        yield Gap(
            what=layout.name,
            where="layout.sharding",
            why=f"TensorFlow's strategies (2.21) hold a whole copy on every replica{too_much}",
            nearest=f"whole copies: {size}" if fits else None,
            fix="layout.sharding: none" if fits else shards,
        )
    if layout.recompute != "none":
        yield Gap(
            what=f"recompute {layout.recompute}",
            where="layout.recompute",
            why=f"the example program keeps every activation{too_much}",
            nearest=f"activations are kept, {size}: less time; or your own TRAIN_SCRIPT"
            if fits
            else None,
            fix="layout.recompute: none" if fits else "a smaller layout.micro_batch, or " + shards,
        )


def _kept_bytes(plan: Plan) -> int:
    """Bytes that a rank keeps: activations when nothing is recomputed, and what the device itself
    takes."""
    case = case_of_plan(plan)
    kept = replace(plan.layout, recompute="none", recompute_every=1)
    parts = price_one(kept, case).memory.parts
    return (parts["activations"] or 0) + (parts["overhead"] or 0)
