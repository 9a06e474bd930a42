"""What the kernel says of a process, read from /proc; None where there is no such thing."""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTimes:
    """One thread, since it began."""

    state: str
    """R running or waiting for a core, S sleeping, D waiting for a device, T stopped, t traced,
    Z dead; see proc(5)."""

    runnable_s: float
    """On a core, or waiting for one: a loop wants to run also where the machine is overloaded."""

    switches: int
    """How often it gave up its core by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTimes:
    """A worker at one moment."""

    at_ns: int
    """Monotonic clock."""

    process: ThreadTimes
    """Times of the first thread."""

    training: ThreadTimes | None
    liveness: ThreadTimes | None


def process_times(
    pid: int, *, training_thread: int, liveness_thread: int, at_ns: int
) -> ProcessTimes | None:
    """The process and its two threads that matter; None when it is gone, or there is no /proc."""
    process = _times(_PROC / str(pid))
    if process is None:
        return None
    tasks = _PROC / str(pid) / "task"
    return ProcessTimes(
        at_ns=at_ns,
        process=process,
        training=_times(tasks / str(training_thread)) if training_thread else None,
        liveness=_times(tasks / str(liveness_thread)) if liveness_thread else None,
    )


def is_stopped(pid: int) -> bool:
    """Whether the kernel runs nothing of it until it is told to go on."""
    process = _times(_PROC / str(pid))
    return process is not None and process.state in "Tt"


def where_it_waits(pid: int) -> str:
    """Each thread's name, state and the kernel function it sleeps in, one line each; may be ""."""
    lines = []
    try:
        threads = sorted((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return ""
    for thread in threads[:_MOST_THREADS]:
        name, wait = _text(thread / "comm"), _text(thread / "wchan")
        times = _times(thread)
        if times is not None:
            inside = f" in {wait}" if wait not in ("", "0") else ""
            lines.append(f"thread {thread.name} ({name}): {times.state}{inside}")
    if len(threads) > _MOST_THREADS:
        lines.append(f"and {len(threads) - _MOST_THREADS} threads more")
    return "\n".join(lines)


_MOST_THREADS = 64


def num_oom_kills() -> int | None:
    """How often the kernel has killed a process for want of memory: of this process's control
    group, where that can be read, else of the machine. None when neither can."""
    group = _num_group_oom_kills()
    return group if group is not None else _num_machine_oom_kills()


def _num_machine_oom_kills() -> int | None:
    for line in _text(_PROC / "vmstat").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def _num_group_oom_kills() -> int | None:
    """Source: memory.events of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst)."""
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0":
            continue
        for event in _text(Path(f"/sys/fs/cgroup{path}/memory.events")).splitlines():
            name, _, value = event.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _times(folder: Path) -> ThreadTimes | None:
    stat = _text(folder / "stat")
    if not stat:
        return None
    # The name in brackets may hold anything, so count from its end: state is field 3 of proc(5).
    fields = stat.rpartition(")")[2].split()
    return ThreadTimes(
        state=fields[0],
        runnable_s=_runnable_s(_text(folder / "schedstat"), fields),
        switches=_switches(_text(folder / "status")),
    )


def _runnable_s(schedstat: str, stat_fields: list[str]) -> float:
    """From the scheduler's statistics (Documentation/scheduler/sched-stats.rst), or where the
    kernel has none the time on a core alone."""
    if schedstat:
        on_core, for_core, *_ = schedstat.split()
        return (int(on_core) + int(for_core)) / 1e9
    return (int(stat_fields[11]) + int(stat_fields[12])) / _TICKS_PER_S


def _switches(status: str) -> int:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
