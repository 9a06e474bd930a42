"""Which machines the job names: `ssh.hosts`, or the lines of `ssh.hostfile`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import JobError, Problem
from paceline.job.job import Job
from paceline.job.places import check_host
from paceline.job.script import Script
from paceline.units import counted


def find_hosts(job: Job | Script) -> list[tuple[str, int | None]]:
    """The hosts of the job or script in order, with their slots where the file says so.

    Raises:
        JobError: `W007`, a host or the file is wrong.
    """
    spec = job.spec.ssh
    if spec.hosts and spec.hostfile is not None:
        raise JobError.of(
            code="W007",
            what="ssh.hosts and ssh.hostfile both name hosts",
            where=_where(job, "ssh.hostfile"),
            fix="leave one of them out",
        )
    if spec.hostfile is None:
        repeated = repeated_hosts(spec.hosts)
        if repeated:
            raise JobError.of(
                code="W007",
                what=f"{', '.join(repeated)} is named more than once",
                where=_where(job, "ssh.hosts"),
                fix="name each host once; cluster.per_node says how many ranks it has",
            )
        return [(host, None) for host in spec.hosts]
    path = job.folder / spec.hostfile
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError.of(
            code="W007",
            what=f"the hostfile cannot be read: {why}",
            where=str(path),
            fix="name a file with one host a line",
        ) from None
    return read_hostfile(path, text)


def _where(job: Job | Script, field: str) -> str:
    return job.where(field) if isinstance(job, Job) else f"{field}, {job.source}"


def with_hosts(job: Job) -> Job:
    """The job with the lines of its hostfile as its hosts, for engines whose files list them.

    Raises:
        JobError: `W007`, a host or the file is wrong.
    """
    hosts = [host for host, _ in find_hosts(job)]
    ssh = replace(job.spec.ssh, hosts=hosts, hostfile=None)
    return replace(job, spec=replace(job.spec, ssh=ssh))


def check_slots(job: Job, ranks_per_node: int) -> Iterator[Problem]:
    """Hosts whose line of the hostfile has fewer slots than a node of the plan has ranks.

    Raises:
        JobError: As `find_hosts`.
    """
    for number, (host, slots) in enumerate(find_hosts(job), start=1):
        if slots is not None and slots < ranks_per_node:
            yield Problem(
                code="W007",
                what=f"{host} has {counted(slots, 'slot')}, the plan puts "
                f"{counted(ranks_per_node, 'rank')} on each node",
                where=f"{job.spec.ssh.hostfile}, host {number}",
                fix=f"set cluster.per_node to {slots}, or leave the host out",
            )


def repeated_hosts(hosts: Sequence[str]) -> list[str]:
    """Machines that are named more than once, by whatever user or case.

    >>> repeated_hosts(["node-a", "root@node-A", "node-b"])
    ['node-a']
    """
    counts = Counter(machine_of(host) for host in hosts)
    return sorted(machine for machine, count in counts.items() if count > 1)


def machine_of(host: str) -> str:
    """The machine's name without the user, as names are compared (RFC 4343: in any case)."""
    return host.rpartition("@")[2].lower()


def read_hostfile(path: Path, text: str) -> list[tuple[str, int | None]]:
    """Hosts of a file, each with its slots where the line says so.

    A line is a host, as `host`, `host slots=8`, or `host:8` as MPICH writes it; `#` begins a
    comment.

    Raises:
        JobError: `W007`, a line that is none, or a host for the second time; with its line.
    """
    found: list[tuple[str, int | None]] = []
    lines: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, colon, count = words[0], "", ""
        if host.count(":") < 2:  # else an IPv6 address, which is refused as one
            host, colon, count = host.partition(":")
        slots = count if colon else None
        wrong = None
        try:
            check_host(host)
        except ValueError as error:
            wrong = str(error)
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                slots = value
            elif name not in ("max_slots", "max-slots"):
                wrong = wrong or f"{word!r} is not known: write `{host} slots=8`"
        if slots is not None and not (slots.isdecimal() and int(slots) > 0):
            wrong = wrong or f"{slots!r} is no number of slots"
        machine = machine_of(host)
        if machine in lines:
            wrong = wrong or f"{machine} is on line {lines[machine]} already"
        if wrong is not None:
            problems.append(
                Problem(
                    code="W007",
                    what=wrong,
                    where=f"{path}:{number}",
                    fix="one host a line, each once: `node-a slots=8`",
                )
            )
            continue
        lines[machine] = number
        found.append((host, None if slots is None else int(slots)))
    if problems:
        raise JobError(*problems)
    return found
