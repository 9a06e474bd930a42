"""`paceline detect`: what this machine has, or each of several hosts."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, force_option, hosts_options, json_option, timeout_option
from paceline.cli.output_file import write_new
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.errors import Problem
    from paceline.topology.detect import Detected
    from paceline.topology.node.facts import Gathered

Section = dict[str, object]

_REACHED_BY = {
    "ssh": ("ssh.",),
    "srun": ("slurm.python",),
    "slurm": ("slurm.python",),
    "ray": ("ray.address", "ray.python"),
}
"""Place -> beginnings of the keys of a job file by which its hosts are reached."""


@click.command()
@hosts_options("hosts", "node-a,node-b or a hostfile; implies --on ssh.")
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=PathName(path_type=Path),
    help="Where runs or data will be: type, room, and whether all hosts see the same one. May be "
    "given again; runs are written to the first.  [default: this folder]",
)
@timeout_option(40.0, "Seconds for a host to answer.")
@click.option(
    "--write",
    "write",
    metavar="FILE",
    type=PathName(path_type=Path),
    help="Write it as the `cluster:` section of a job file.",
)
@force_option
@click.option(
    "--file",
    "file",
    type=PathName(path_type=Path),
    help="Your own catalog file, for the names of accelerators.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="How hosts are reached: --set ssh.port=2222. May be given again; ssh.*, slurm.python, "
    "ray.address and ray.python, as in a job file.",
)
@json_option
def command(
    place: str,
    hosts: str | None,
    folders: tuple[Path, ...],
    limit_s: float,
    write: Path | None,
    force: bool,
    file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show what this machine, or each of several hosts, has: accelerators, driver, CUDA, how they
    are joined, RDMA ports, Ethernet, sockets, memory, disks.

    Asks what `paceline preflight` and `paceline doctor` ask: nvidia-smi or NVML, rocm-smi, /sys,
    lscpu, and on a Mac system_profiler. A small file is written to --folder and removed again;
    nothing else is changed. What was looked for and not found is listed with the reason, and so is
    what differs between hosts.

    \b
    Examples:
      paceline detect
      paceline detect --json
      paceline detect --write cluster.yaml
      paceline detect --hosts node-a,node-b --folder /shared/runs
      paceline detect --on srun --json

    \b
    Exit codes:
      0  every host answered
      1  a host did not answer
      2  an option is wrong
    """
    from paceline.errors import JobError

    if hosts is not None and place == "local":
        place = "ssh"
    if hosts is not None and place != "ssh":
        raise click.UsageError("--hosts goes with --on ssh.")
    _check_overrides(place, overrides)
    gathered, shared = _gather(place, hosts, folders, limit_s, overrides)
    found, silent = _read(gathered, file)
    section, problems, data, lines = _shown(place, found, silent, shared, file)
    if write is not None:
        if section is None:
            raise JobError(*problems)
        write_new(write, _yaml(found, section), force=force)
        also = "set nodes, and put it" if place == "local" else "put it"
        say(f"wrote {write}; {also} into the job file")
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return 1 if silent else 0
    for line in lines:
        show(line)
    if write is None and section is not None:
        show("")
        click.echo(_yaml(found, section), nl=False)
    for problem in problems:
        show(str(problem), err=True)
    return 1 if silent else 0


def _check_overrides(place: str, overrides: tuple[str, ...]) -> None:
    """
    Raises:
        UsageError: `--set` of a key that has no effect here.
    """
    for each in overrides:
        if not each.startswith(_REACHED_BY.get(place, ())):
            raise click.UsageError(
                f"--set {each} does nothing with --on {place}. It takes ssh.* with --on ssh, "
                "slurm.python with --on srun, ray.address and ray.python with --on ray."
            )


def _gather(
    place: str,
    hosts: str | None,
    folders: tuple[Path, ...],
    limit_s: float,
    overrides: tuple[str, ...],
) -> "tuple[Gathered, dict[str, bool] | None]":
    """What the hosts say, and which of them see the file that was just written here."""
    from paceline.job import make_script
    from paceline.launch.gather import gather, left_note
    from paceline.launch.handover import with_hosts
    from paceline.launch.preflight import find_nodes
    from paceline.topology.node.facts import Question

    script = make_script({"command": ["true"]}, Path(), overrides)
    script = script if hosts is None else with_hosts(script, hosts)
    nodes = find_nodes(script, None, place)
    asked = tuple(str(each.expanduser().absolute()) for each in folders or (Path(),))
    with left_note(Question(folders=asked)) as (question, note):
        gathered = gather(nodes, question, limit_s=limit_s, calls=False)
    if note is None:
        return gathered, None
    return gathered, {
        each.name: each.facts.folders[0].note == note
        for each in gathered.nodes
        if each.facts is not None
    }


def _read(gathered: "Gathered", file: Path | None) -> "tuple[dict[str, Detected], dict[str, str]]":
    """Host -> what it has; host -> why it did not answer."""
    from paceline.catalog import load_catalog
    from paceline.topology.detect import detect

    catalog, found, silent = load_catalog(file), {}, {}
    for each in gathered.nodes:
        if each.facts is None:
            silent[each.name] = each.why_not or "it did not answer"
        else:
            found[each.name] = detect(each.facts, catalog)
    return found, silent


def _shown(
    place: str,
    found: "Mapping[str, Detected]",
    silent: Mapping[str, str],
    shared: Mapping[str, bool] | None,
    file: Path | None,
) -> "tuple[Section | None, list[Problem], dict[str, Any], list[str]]":
    """The section, what is wrong, and all of it as JSON and as lines."""
    from paceline.catalog import load_catalog
    from paceline.report.detect_text import format_detected, format_hosts
    from paceline.topology.detect import cluster_section
    from paceline.topology.detect_hosts import differences, section_of_hosts

    catalog = load_catalog(file)
    own = [problem for each in found.values() for problem in each.problems]
    problems = [*map(_unreached, silent, silent.values()), *own]
    if place == "local" and found:
        (here,) = found.values()
        section = cluster_section(here, catalog)
        return section, problems, _data(here) | {"cluster": section}, list(format_detected(here))
    together, mixed = section_of_hosts(found, catalog) if found else (None, [])
    problems += mixed
    unlike = differences(found)
    data = {
        "place": place,
        "hosts": {name: _data(each) for name, each in found.items()},
        "silent": silent,
        "differences": [asdict(each) for each in unlike],
        "folder_is_shared": shared,
        "cluster": together,
        "problems": [asdict(each) for each in problems],
    }
    return together, problems, data, list(format_hosts(found, silent, unlike, shared))


def _unreached(name: str, why: str) -> "Problem":
    from paceline.errors import Problem

    return Problem(
        code="W004",
        what=f"{name} cannot be looked at: {why}",
        where=f"host {name}",
        fix=f"ssh -o BatchMode=yes {name} true; or leave the host out",
    )


def _data(found: "Detected") -> dict[str, Any]:
    data = asdict(found)
    topology = found.topology
    if topology is not None:
        data["topology"] = asdict(topology) | {
            "between": {f"{one} {other}": cell for (one, other), cell in topology.between.items()},
            "groups": topology.groups,
        }
    return data


def _yaml(hosts: "Mapping[str, Detected]", section: Section) -> str:
    import yaml

    first = next(iter(hosts.values()))
    problems = [each for host in hosts.values() for each in host.problems]
    lines = ["# Found by `paceline detect`. One machine; set nodes to how many there are.\n"]
    if len(hosts) > 1:
        lines = [f"# Found by `paceline detect` on {', '.join(hosts)}.\n"]
    if problems:
        lines += [f"# {problem.what}: {problem.fix}.\n" for problem in problems]
    elif first.gpus and first.accelerator is None and first.mac is None:
        names = ", ".join(sorted({gpu.name for gpu in first.gpus}))
        lines.append(f"# Not in the catalog: {names}. `paceline catalog --write FILE` adds it.\n")
    if first.mac is not None and first.accelerator is not None:
        lines.append("# Paceline plans for this chip; training on it is for MLX, not for run.\n")
    text: str = yaml.safe_dump({"cluster": section}, sort_keys=False)
    return "".join(lines) + text
