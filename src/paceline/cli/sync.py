"""`paceline sync`: the job's code, the same on every host."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, hosts_options, json_option, set_option, timeout_option
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.launch.sync import Synced, SyncedNode

_MOST_NAMES = 5


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@hosts_options("hosts", "node-a,node-b or a hostfile, instead of the job's ssh.hosts.", place="ssh")
@click.option(
    "--to",
    "to",
    metavar="FOLDER",
    type=PathName(path_type=Path),
    help="The folder on the hosts. Left out, the same path as here, which is what `paceline run` "
    "starts in.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and change nothing.")
@click.option(
    "--delete",
    "removes",
    is_flag=True,
    help="Remove there what an earlier sync sent and is gone here.",
)
@timeout_option(60.0, "Seconds for a host to answer.")
@set_option
@json_option
def command(
    job_file: Path,
    place: str,
    hosts: str | None,
    to: Path | None,
    dry_run: bool,
    removes: bool,
    limit_s: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Copy the folder of JOB to all of its hosts, and compare every file there with this machine's.

    Only files that differ are sent: those that git has or does not ignore; without git, programs,
    scripts and configurations. Each is written whole or not at all. Each folder keeps in
    .paceline-sync which files sync sent: --delete removes no others. Links to folders are listed,
    not sent. The commit here and on each host is shown. The exit code is 1 where a host has other
    files after the copy (with --dry-run: now).

    \b
    Examples:
      paceline sync job.yaml --dry-run
      paceline sync job.yaml --hosts node-a,node-b
      paceline sync job.yaml --delete && paceline run job.yaml --on ssh
    """
    from paceline.cli.job_input import read_job
    from paceline.launch.handover import with_hosts
    from paceline.launch.plannable import planned
    from paceline.launch.preflight import find_nodes
    from paceline.launch.sync import sync

    if hosts is not None and place != "ssh":
        raise click.UsageError("--hosts goes with --on ssh.")
    if place == "local":
        raise click.UsageError("--on local: this machine has its own files already.")
    job = read_job(job_file, overrides)
    if hosts is not None:
        job = with_hosts(job, hosts)
    nodes = find_nodes(job, planned(job), place)
    synced = sync(
        job.folder,
        nodes,
        to=to,
        is_dry=dry_run,
        removes=removes,
        limit_s=limit_s,
        on_note=say,
    )
    if as_json:
        click.echo(json.dumps(asdict(synced) | {"same": synced.is_same}, indent=2))
    else:
        if to is not None:
            show(f"there: {to.absolute()}")
        for line in _lines(synced, is_dry=dry_run, removes=removes):
            show(line)
    return 0 if synced.is_same else 1


def _lines(synced: "Synced", *, is_dry: bool, removes: bool) -> Iterator[str]:
    commit = f", commit {synced.commit[:12]}" if synced.commit else ", git without a commit"
    commit = commit if synced.has_git else ", no git repository"
    changed = " with changes that are in no commit" if synced.has_changes else ""
    yield f"here: {synced.num_files} files{commit}{changed}"
    if synced.links:
        yield f"not sent, links to folders: {', '.join(synced.links)}"
    for node in synced.nodes:
        said = "; ".join(_said(node, synced, is_dry=is_dry, removes=removes))
        yield f"{node.name}: {said}"


def _said(node: "SyncedNode", synced: "Synced", *, is_dry: bool, removes: bool) -> Iterator[str]:
    if node.why_not is not None:
        yield f"FAILED: {node.why_not}"
        return
    if node.sent:
        yield f"{'would send' if is_dry else 'sent'} {_names(node.sent)}"
    if node.differing and not is_dry:
        yield f"STILL DIFFERENT: {_names(node.differing)}"
    if not node.sent:
        yield "the same files as here"
    if node.extra:
        done = "would remove" if is_dry else "removed"
        yield f"{done if removes else 'gone here (--delete removes it):'} {_names(node.extra)}"
    if node.foreign:
        yield f"only there, not from sync (never removed): {_names(node.foreign)}"
    if node.commit != synced.commit:
        has = f"at commit {node.commit[:12]}" if node.commit else "without a commit, or has no git"
        yield f"its folder is {has}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    count = f"{len(names)} file{'' if len(names) == 1 else 's'}"
    return f"{count}: {', '.join(names[:_MOST_NAMES])}" + (f" and {more} more" if more > 0 else "")
