"""Second facts: when a line that healthy runs print too is a failure after all."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from paceline.check.diagnose.hang import around
from paceline.check.diagnose.seen import Seen, Sighting
from paceline.check.diagnose.words import OutOfMemory


def second_facts(seen: Seen) -> Iterator[tuple[str, str]]:
    """(failure, the second fact) of the weak sightings that have one."""
    weak: dict[str, list[Sighting]] = {}
    for sighting in seen.sightings.values():
        if sighting.weak:
            weak.setdefault(sighting.name, []).append(sighting)
    run = around(seen)
    for name, sightings in weak.items():
        if name in _FACTS and (fact := _FACTS[name](seen, sightings, run)):
            yield name, fact


def _text(sightings: list[Sighting]) -> str:
    return "\n".join(line.raw for each in sightings for line, _ in each.first)


def _count(sightings: list[Sighting]) -> int:
    return sum(each.count for each in sightings)


def _fragmented(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    for sighting in sightings:
        for line, _ in sighting.first:
            memory = OutOfMemory(line.message)
            if memory.is_fragmented:
                return f"{memory.unallocated} lie reserved and unused, {memory.want} were asked for"
    return None


def _all_on_gpu_0(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    lines = [line for each in sightings for line, _ in each.lines() if "out of memory" in line.raw]
    ranks = {line.rank for line in lines if line.rank is not None}
    others = max((OutOfMemory(line.raw).others for line in lines), default=0)
    if lines and (len(ranks) > 1 or others > 1):
        return "several processes hold memory on GPU 0"
    return None


def _when(form: str, fact: str) -> Callable[[Seen, list[Sighting], str], str | None]:
    wanted = re.compile(form)

    def look(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
        return fact if wanted.search(run) else None

    return look


def _in_line(form: str, fact: str) -> Callable[[Seen, list[Sighting], str], str | None]:
    wanted = re.compile(form)

    def look(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
        return fact if wanted.search(_text(sightings)) else None

    return look


def _often(times: int, fact: str) -> Callable[[Seen, list[Sighting], str], str | None]:
    def look(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
        return fact if _count(sightings) >= times else None

    return look


def _last_line(fact: str) -> Callable[[Seen, list[Sighting], str], str | None]:
    """The log ends with it: what was waited for never came."""

    def look(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
        return fact if _ends(seen, sightings) else None

    return look


def _ends(seen: Seen, sightings: list[Sighting]) -> bool:
    """Whether a log's last line is one of them."""
    last = {source.name: source.num_lines for source in seen.sources}
    lines = [line for each in sightings for line, _ in each.lines()]
    return any(line.number == last.get(line.source) for line in lines)


def _sockets(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if "Using network Socket" not in _text(sightings) and "NET/Socket" not in run:
        return None
    named = re.search(r"mlx[45]_\d|bnxt_re|\bEFA\b|efa_|InfiniBand|/dev/infiniband", run)
    if named:
        return f"the log speaks of {named[0]}"
    return None  # a cluster with Ethernet alone is as it should be


def _disk(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if re.search(
        r"SemLock|/dev/shm|shared memory|shm_open|multiprocessing/(synchronize|heap)", run
    ):
        return None
    return "a file could not be written"


def _interface(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if not re.search(
        r"ncclSystemError|unhandled system error|Connect to \S+ failed|timed out", run
    ):
        return None
    if "No route to host" in _text(sightings):
        return "no route to the address that a rank offers"
    return "ranks offer addresses of a bridge or of loopback"


def _mtu(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    sizes = set(re.findall(r"\bmtu (\d+)", run))
    return f"interfaces with MTU {' and '.join(sorted(sizes))}" if len(sizes) > 1 else None


def _shared_memory(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if re.search(r"Cuda failure|Too many open files|Permission denied|No such file", run):
        return None
    if re.search(r"No space left|posix_fallocate|ftruncate|Bus error|/dev/shm", run):
        return "/dev/shm was full"
    return None


def _name(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """A name of a rank's host, not of a web site from which something is downloaded."""
    lines = [line.raw for each in sightings for line, _ in each.first]
    web = r"https?|urllib3|wandb|huggingface|NewConnectionError|MaxRetryError|pip\b"
    if any(re.search(web, line, re.IGNORECASE) for line in lines):
        return None
    mine = r"(?i)MASTER_ADDR|TCPStore|rdzv|rendezvous|c10d|init_process_group|gloo|NCCL|socket\.cpp"
    return "while ranks looked for each other" if re.search(mine, run) else None


def _cancelled(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """Slurm also cancels a step of which one task has failed."""
    if "CANCELLED" not in _text(sightings):
        return None
    own = any(each.code not in (0, -15) for each in seen.exits) or seen.raised
    return None if own else "cancelled by hand or by the scheduler; sacct -j says which"


def _more_came(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """More processes than the group was told to have; fewer are late and no more."""
    for sighting in sightings:
        for _, said in sighting.first:
            if int(said.get("have", 0)) > int(said.get("want", 0)):
                return f"{said['have']} processes came to a group of {said['want']}"
    return None


def _members(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """More processes than the group has, or one place in it taken twice and others not at all."""
    if (more := _more_came(seen, sightings, run)) is not None:
        return more
    said = [groups for each in sightings for _, groups in each.first if "at" in groups]
    places = [groups["at"] for groups in said]
    of = max((int(groups["of"]) for groups in said), default=0)
    if len(set(places)) < min(len(places), of):
        return f"places {', '.join(sorted(set(places)))} of {of} are taken more than once"
    if "handled by Slurm" in run and len(set(places)) < of and _ends(seen, sightings):
        return f"{len(set(places))} of {of} places are taken, and nothing came after it"
    return None


def _same_task_waits(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """One task that is waited for three times, half a minute, and no session after it."""
    tasks = Counter(said["task"] for each in sightings for _, said in each.first if "task" in said)
    if not tasks or "Start master session" in run:
        return None
    task, times = tasks.most_common(1)[0]
    return f"{task} did not answer {times} times" if times >= _PATIENCE else None


_PATIENCE = 3
"""Times that a start may wait for one task: TensorFlow says so each ten seconds."""


_FACTS: Mapping[str, Callable[[Seen, list[Sighting], str], str | None]] = {
    "cuda-oom-fragmentation": _fragmented,
    "missing-set-device": _all_on_gpu_0,
    "ckpt-world-size-mismatch": _when(
        r"load_checkpoint|load_state_dict|load_optimizer|resum", "a checkpoint was being loaded"
    ),
    "device-map-with-distributed": _in_line(
        r"cuda:(\d+) and cuda:(?!\1\b)", "one process holds tensors on two GPUs"
    ),
    "slurm-ntasks-mismatch": _members,
    "acs-p2p-hang": _in_line("peer access is not", "these GPUs cannot reach each other"),
    "disk-full-checkpoint": _disk,
    "nccl-graph-file-env": _when(
        r"ncclSystemError|ncclInternalError|ncclInvalidUsage|NCCL WARN|unhandled system error",
        "NCCL could not start with it",
    ),
    "mtu-mismatch": _mtu,
    "shm-too-small": _shared_memory,
    "dns-unresolvable-master": _name,
    "sigterm-preempted": _cancelled,
    "gloo-size-mismatch": _in_line(r"op\.preamble|nbytes", "sizes differ"),
    "all-ranks-save-same-file": _when(
        r"makedirs|mkdir", "a folder that is there already was to be made"
    ),
    "ds-op-cuda-mismatch": _in_line(r"\.so", "the op was not built"),
    "environment-differs-between-nodes": _in_line(r"\.so", "a library of CUDA is not there"),
    "tf-config-mismatch": _same_task_waits,
    "ray-unsatisfiable-resources": _last_line("nothing came after it"),
    "k8s-init-container-stuck": _in_line(
        r"PodInitializing|Init:0/", "pods wait in their init container"
    ),
    "ethernet-fallback": _sockets,
    "nccl-wrong-interface": _interface,
    "straggler-throttle": _in_line(r"Active", "a clock is held down"),
    "fp16-loss-scale-collapse": _often(12, "the loss scale fell again and again"),
    "slurm-world-size-copies": _in_line(r"srun", "started under Slurm without srun"),
    "mlx-silent-singleton": _often(2, "several processes are each alone in their group"),
    "zero3-zero-size-params": _when(
        r"(?i)zero|deepspeed|stage3", "parameters are sharded by ZeRO-3"
    ),
    "cublas-or-assert": _in_line(
        r"\.cu:\d+|block: \[|Loss|Indexing|srcIndex|index out of bounds|n_classes",
        "an index is out of range in a kernel",
    ),
    "cuda-device-max-connections": _in_line(
        r"(?i)assert|require|must|should|set", "the program asks for another value"
    ),
    "pp-p2p-order": _when(r"(?i)pipe", "stages exchanged tensors of different shape"),
    "ds-ssh-not-passwordless": _in_line(r"KeyError|PDSH", "pdsh could not be used"),
    "divergent-filesystem-branch": _in_line("time", "objects were broadcast when it timed out"),
}
"""Weak failures that a second fact makes likely. The hangs' are in `hang`."""
