"""A job's folder to all of its hosts: what differs there is sent, and then compared again.

Leaves out the way there (`node_commands.py`) and what a host does with it
(`topology/node/receive.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import JobError
from paceline.launch.gather import LIMIT_S
from paceline.launch.node_commands import Nodes, Silence, Visit, ask_each
from paceline.topology.node.messages import Sent, Take, Taken
from paceline.topology.node.receive import list_folder, read_file
from paceline.units import counted, format_bytes

_MOST_BYTES = 64 * 2**20
"""Bytes of all files that are sent: they go through memory, to every host. Code is far smaller;
what is larger are data, or a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedNode:
    """One host against this machine. Paths are relative to the job's folder."""

    name: str
    sent: tuple[str, ...] = ()
    """Files that were sent; in a dry run, those that would be."""

    extra: tuple[str, ...] = ()
    """What an earlier sync sent and is not here any more; removed where that was asked for."""

    foreign: tuple[str, ...] = ()
    """Code that is there and not here and that no sync sent: never removed."""

    differing: tuple[str, ...] = ()
    commit: str = ""
    why_not: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether every file of this machine is there, as it is here."""
        return self.why_not is None and not self.differing


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """All hosts against this machine."""

    folder: str
    num_files: int
    has_git: bool
    commit: str
    """Here; empty where there is none yet."""

    has_changes: bool
    """Whether something here is in no commit."""

    links: tuple[str, ...]
    """Links to folders here, relative to it: neither they nor what is below them is sent."""

    nodes: tuple[SyncedNode, ...]

    @property
    def is_same(self) -> bool:
        return all(node.is_same for node in self.nodes)


def sync(
    folder: Path,
    nodes: Nodes,
    *,
    to: Path | None = None,
    is_dry: bool = False,
    removes: bool = False,
    limit_s: float = LIMIT_S,
    on_note: Callable[[str], None] = lambda text: None,
) -> Synced:
    """Make the folder on every host what it is here.

    Args:
        to: The folder there; None is the same path.
        is_dry: Compare, and change nothing.
        on_note: Given what is being waited for.

    Raises:
        JobError: `W033`, the folder has nothing to send, or more than code has.
    """
    here, root = list_folder(folder), folder.resolve()
    sendable = dict(_read(folder, here.files, has_git=here.has_git))
    for name in here.files:
        if (path := folder / name).is_symlink() and not path.resolve().is_relative_to(root):
            on_note(f"{name} is a link to {path.resolve()}: a copy of that file is sent")
    there = str((to or folder).absolute())
    look = Take(folder=there, names=tuple(here.files))
    on_note(f"comparing {counted(len(here.files), 'file')} on {counted(len(nodes.names), 'host')}")
    before = _ask(nodes, dict.fromkeys(nodes.names, look), limit_s)
    asked = {}
    for name, seen in before.items():
        send = [file for file, hash in here.files.items() if seen.files.get(file) != hash]
        extra, _ = _only_there(seen, here)
        is_marked = seen.synced is not None and {*here.files} <= {*seen.synced}
        if seen.why_not is None and not is_dry and (send or (extra and removes) or not is_marked):
            asked[name] = Take(
                folder=there,
                names=tuple(here.files),
                files={file: sendable[file] for file in send},
                removed=extra if removes else (),
                is_dry=False,
            )
    if asked:
        on_note(f"sending to {counted(len(asked), 'host')}")
    after = before | _ask(nodes, asked, limit_s)
    return Synced(
        folder=there,
        num_files=len(here.files),
        has_git=here.has_git,
        commit=here.commit,
        has_changes=here.has_changes,
        links=here.links,
        nodes=tuple(_judged(name, here, before[name], after[name]) for name in nodes.names),
    )


def _only_there(seen: Taken, here: Taken) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files that are there and not here: those that an earlier sync sent, and those of others."""
    only = [file for file in seen.files if file not in here.files]
    ours = {*(seen.synced or ())}
    return tuple(each for each in only if each in ours), tuple(
        each for each in only if each not in ours
    )


def _judged(name: str, here: Taken, before: Taken, after: Taken) -> SyncedNode:
    def differing(seen: Taken) -> tuple[str, ...]:
        return tuple(file for file, hash in here.files.items() if seen.files.get(file) != hash)

    extra, foreign = _only_there(before, here)
    return SyncedNode(
        name=name,
        sent=differing(before) if before.why_not is None else (),
        extra=extra,
        foreign=foreign,
        differing=differing(after) if after.why_not is None else (),
        commit=after.commit,
        why_not=after.why_not,
    )


def _ask(nodes: Nodes, asked: Mapping[str, Take], limit_s: float) -> dict[str, Taken]:
    visits = [Visit(nodes, name, "take", take) for name, take in asked.items()]
    return {
        name: Taken(why_not=_unheard(name, each)) if isinstance(each, Silence) else each
        for name, each in ask_each(visits, Taken, limit_s).items()
    }


def _unheard(name: str, silence: Silence) -> str:
    """Why a host did not answer, with what shows the reason where ssh has it."""
    is_ssh = silence.why.startswith("ssh")
    return silence.why + (f"; `ssh {name} true` has to work from here" if is_ssh else "")


def _read(folder: Path, files: Mapping[str, str], *, has_git: bool) -> Iterator[tuple[str, Sent]]:
    sizes = {name: (folder / name).stat().st_size for name in files}
    total = sum(sizes.values())
    if total > _MOST_BYTES or not files:
        largest = max(sizes, key=lambda name: sizes[name], default="")
        raise JobError.of(
            code="W033",
            what=f"{folder} has {format_bytes(total)} to send, and code is less than "
            f"{format_bytes(_MOST_BYTES)}: {largest} alone has {format_bytes(sizes[largest])}"
            if files
            else f"{folder} has no file to send",
            where="the job's folder",
            fix=("put data and checkpoints into .gitignore, or keep them" if has_git else "keep it")
            + " in a folder that is not below the job's"
            if files
            else "name a job file that stands beside its program",
        )
    for name in files:
        yield name, read_file(folder / name)
