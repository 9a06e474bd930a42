"""The machine itself: shared memory, limits of processes, memory, CPUs, the clock."""

from collections.abc import Iterator

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, unknown, warned
from paceline.control.limits import ENOUGH_FILES, open_files_of_workers
from paceline.topology.machine import read_meminfo
from paceline.topology.node.facts import NodeAnswer, NodeFacts
from paceline.units import counted, format_bytes, format_seconds

_SHM_LEAST = 128 * 2**20
"""Docker and Kubernetes give 64 MiB when nobody asks: too little for NCCL and for data workers."""

_SHM_ENOUGH = 2**30
"""Source: NCCL user guide, troubleshooting, Docker: --shm-size=1g --ulimit memlock=-1."""

_FILES_LEAST = 192
"""Below, a rank that has loaded its libraries has no room for sockets, data files and a checkpoint
at once; a Mac's default is 256. Two small ranks over gloo with torch 2.13.0+cpu end at `ulimit -n
40` and get through at 64, which leaves nothing to spare: the rest is a guess."""

_FILES_ENOUGH = 1024
"""Linux's own default, which data workers use up. Source: getrlimit(2), systemd's defaults."""

_FILES_A_RANK = 2
"""Sockets to each other rank: gloo's and the store's pairs."""

_MEMLOCK_LEAST = 2**30
"""Below, NCCL cannot register its buffers of all peers. A guess; unlimited is what NVIDIA says."""

_THREADS_A_RANK = 64
_THREADS_LEAST = 512
"""OpenMP's, NCCL's, the watchdog's and data workers' threads. A guess from `ls /proc/PID/task`."""

_STACK_LEAST = 2**20
_SKEW_S = 5.0
"""Worth a word: a run's events are sorted by the nodes' clocks. A guess."""

_SKEW_FAILS_S = 300.0
"""Source: krb5.conf(5), clockskew."""


def check_host(answer: NodeAnswer, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """Everything about one machine that has nothing to do with its accelerators."""
    node = answer.name
    yield _shared_memory(node, facts, need)
    yield _open_files(node, facts, need)
    yield _locked_memory(node, facts, need)
    yield from _processes(node, facts, need)
    yield _memory(node, facts, need)
    yield from _memory_errors(node, facts)
    yield from _cpus(node, facts, need)
    yield from _clock(answer, facts)


def _shared_memory(node: str, facts: NodeFacts, need: Need) -> Result:
    name = "shared-memory"
    if facts.shm is None:
        if facts.system == "Darwin":
            return passed(name, node, "macOS has no /dev/shm and needs none")
        return unknown(name, node, "there is no /dev/shm")
    total, free = facts.shm.total_bytes, facts.shm.free_bytes
    said = f"/dev/shm has {format_bytes(total)}, {format_bytes(free)} free"
    fix = (
        "mount -o remount,size=16g /dev/shm; docker run --shm-size=16g or --ipc=host; in "
        "Kubernetes an emptyDir with medium: Memory at /dev/shm"
    )
    uses_it = need.backend == "nccl" and need.ranks_per_node > 1
    make = failed if need.is_strict or uses_it else warned
    if total < _SHM_LEAST:
        return make(
            name, node, f"{said}; containers start with 64 MiB", id="shm-too-small", fix=fix
        )
    if free < _SHM_LEAST:
        fix = "ls -la /dev/shm shows who fills it; rm /dev/shm/nccl-* and torch_* of ended runs"
        return make(name, node, said, id="shm-too-small", fix=fix)
    if total < _SHM_ENOUGH and uses_it:
        return warned(name, node, f"{said}; NCCL asks for 1 GiB", id="shm-too-small", fix=fix)
    return passed(name, node, said)


def _open_files(node: str, facts: NodeFacts, need: Need) -> Result:
    name = "open-files"
    if "nofile" not in facts.limits:
        return unknown(name, node, "the limit of open files is not known")
    soft, hard = facts.limits["nofile"]
    world = need.num_nodes * need.ranks_per_node
    least = _FILES_LEAST + _FILES_A_RANK * world
    said = f"ulimit -n is {_count(soft)} (hard limit {_count(hard)})"
    wanted = max(ENOUGH_FILES, least)
    fix = _more_files(soft, hard, least=least, wanted=wanted)
    if need.has_agents and not need.is_strict:
        soft = open_files_of_workers(soft, hard)
    if soft is not None and soft < least:
        said = f"{said}; {counted(world, 'rank')} need {least}"
        return failed(name, node, said, id="too-many-open-files", fix=fix)
    if soft is not None and soft < _FILES_ENOUGH and facts.system == "Linux":
        return warned(
            name, node, f"{said}; data workers use it up", id="too-many-open-files", fix=fix
        )
    return passed(name, node, said)


def _more_files(soft: int | None, hard: int | None, *, least: int, wanted: int) -> str:
    """How to get there: the shell may raise a limit up to the hard one, root alone that one."""
    if hard is None or hard >= wanted:
        return f"ulimit -n {wanted}"
    how = (
        f"* hard nofile {wanted} and * soft nofile {wanted} in /etc/security/limits.conf, then log "
        f"in again; LimitNOFILE={wanted} of the systemd service (sshd, slurmd, containerd); "
        f"docker run --ulimit nofile={wanted}:{wanted}"
    )
    if soft is not None and soft < hard:
        enough = "is enough for this job" if hard >= least else "helps, but is too few"
        return f"ulimit -n {hard} now, which {enough}; for more, {how}"
    return f"raise the hard limit, which this shell cannot: {how}"


def _locked_memory(node: str, facts: NodeFacts, need: Need) -> Result:
    name = "locked-memory"
    if "memlock" not in facts.limits:
        return unknown(name, node, "the limit of locked memory is not known")
    soft, hard = facts.limits["memlock"]
    said = f"ulimit -l is {'unlimited' if soft is None else format_bytes(soft)}"
    registers = (
        need.num_nodes > 1
        and need.backend == "nccl"
        and any("ACTIVE" in port.state for port in facts.rdma.ports)
    )
    if soft is None or not registers:
        return passed(name, node, said if soft is None else f"{said}; nothing here locks memory")
    fix = (
        "ulimit -l unlimited"
        if hard is None
        else "memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd or "
        "containerd, docker run --ulimit memlock=-1, IPC_LOCK in Kubernetes"
    )
    make = failed if soft < _MEMLOCK_LEAST else warned
    said = f"{said}, and RDMA locks what it sends"
    return make(name, node, said, id="memlock-limit", fix=fix)


def _processes(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    soft, _ = facts.limits.get("nproc", (None, None))
    wanted = _THREADS_LEAST + need.ranks_per_node * _THREADS_A_RANK
    said = f"ulimit -u is {_count(soft)}"
    if soft is not None and soft < wanted:
        said = f"{said}; {counted(need.ranks_per_node, 'rank')} may start up to {wanted} threads"
        fix = "ulimit -u unlimited; nproc in /etc/security/limits.conf, TasksMax=, --pids-limit"
        make = failed if soft < wanted // 4 else warned
        yield make("processes", node, said, id="process-limits", fix=fix)
    else:
        yield passed("processes", node, said)
    stack, _ = facts.limits.get("stack", (None, None))
    said = f"ulimit -s is {'unlimited' if stack is None else format_bytes(stack)}"
    if stack is not None and stack < _STACK_LEAST:
        yield warned("stack", node, said, id="process-limits", fix="ulimit -s 8192")
    else:
        yield passed("stack", node, said)


def _memory(node: str, facts: NodeFacts, need: Need) -> Result:
    name = "host-memory"
    if "MemTotal" not in facts.meminfo:
        return unknown(name, node, "there is no /proc/meminfo")
    total, available = read_meminfo(facts.meminfo)
    limit = facts.memory_limit_bytes
    if limit is not None and limit < total:
        total, available = limit, min(available, limit)
    said = f"{format_bytes(available)} of {format_bytes(total)} available"
    if need.host_bytes > available:
        said = f"{said}; the plan holds {format_bytes(need.host_bytes)} here"
        fix = "end what else runs there (ps aux --sort=-rss | head), or ask for more memory"
        make = failed if need.host_bytes > total else warned
        return make(name, node, said, id="host-oom-sigkill", fix=fix)
    return passed(name, node, said)


def _memory_errors(node: str, facts: NodeFacts) -> Iterator[Result]:
    name = "host-ecc"
    errors = facts.memory_errors
    if not errors:
        return
    said = f"{errors.get('ue', 0)} uncorrectable and {errors.get('ce', 0)} corrected memory errors"
    if errors.get("ue"):
        fix = "drain the node; ras-mc-ctl --errors names the DIMM"
        yield failed(name, node, said, id="host-memory-errors", fix=fix)
    else:
        yield passed(name, node, said)


def _cpus(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    name = "cpus"
    if facts.num_cpus is None:
        return
    said = f"{counted(facts.num_cpus, 'CPU')} for {counted(need.ranks_per_node, 'rank')}"
    if facts.num_cpus < need.ranks_per_node and need.backend != "gloo":
        fix = "ask for more: --cpus-per-task, --cpus, resources.limits.cpu; or end what binds it"
        yield warned(name, node, said, id="omp-threads-default", fix=fix)
    else:
        yield passed(name, node, said)


def _clock(answer: NodeAnswer, facts: NodeFacts) -> Iterator[Result]:
    if answer.ahead_s is None:
        return
    name, node = "clock", answer.name
    within = answer.ahead_within_s or 0.0
    away = abs(answer.ahead_s)
    side = "ahead of" if answer.ahead_s > 0 else "behind"
    said = f"{format_seconds(away)} {side} this machine, known within {format_seconds(within)}"
    if facts.keeps_time is False:
        said += "; its kernel says that nothing keeps it right"
    fix = "systemctl enable --now chronyd; chronyc makestep"
    if away - within > _SKEW_FAILS_S:
        yield failed(name, node, said, id="clock-skew", fix=fix)
    elif away - within > _SKEW_S:
        yield warned(name, node, said, id="clock-skew", fix=fix)
    else:
        yield passed(name, node, said)


def _count(number: int | None) -> str:
    return "unlimited" if number is None else str(number)
