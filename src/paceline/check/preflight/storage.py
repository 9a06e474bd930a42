"""Folders of a node: can the run write there, is there room, is it the same folder everywhere."""

from collections.abc import Iterator

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, warned
from paceline.topology.node.facts import FolderFacts, NodeFacts
from paceline.topology.node.probe_storage import ON_MANY_MACHINES
from paceline.units import format_bytes

_IN_MEMORY = ("tmpfs", "ramfs")
_OF_A_CONTAINER = ("overlay", "fuse-overlayfs", "aufs")

_OF_AN_INSTANCE = (
    "Amazon EC2 NVMe Instance Storage",
    "EphemeralDisk",
    "Microsoft NVMe Direct Disk",
    "nvme_card",
)
"""Models of disks that a cloud wipes when the instance stops. Source: AWS, "Make instance store
volumes available"; Google, "About Local SSD disks" (its persistent ones are nvme_card-pd and
PersistentDisk); Microsoft, "Temporary NVMe disks"."""


def check_storage(node: str, facts: NodeFacts, need: Need, *, note: str | None) -> Iterator[Result]:
    """The folders that were asked about; the first one is the run's.

    Args:
        note: Text that was left in the run's folder; None where nothing was.
    """
    for number, folder in enumerate(facts.folders):
        name = "checkpoint-folder" if number == 0 else "folder"
        where = folder.path if folder.path == folder.nearest else f"{folder.nearest}"
        said = f"{where} on {folder.kind or 'a file system of unknown type'}"
        if folder.why_not is not None:
            fix = "give --runs a folder that this user may write to, on every node"
            said = f"{said}: {folder.why_not}"
            yield failed(name, node, said, id="checkpoint-folder-unusable", fix=fix)
            continue
        yield passed(name, node, f"{said}: written and read")
        if folder.disk is not None and number == 0:
            yield _room(node, folder.disk.free_bytes, where, need)
        if number == 0:
            yield from _lasting(node, folder, where, need)
        if number == 0 and need.is_apart and note is not None:
            yield _shared(node, folder.note, note, where, folder.kind)
    yield from _caches(node, facts, need)


def _room(node: str, free: int, where: str, need: Need) -> Result:
    name = "checkpoint-room"
    needed = need.checkpoint_bytes * need.num_checkpoints
    said = (
        f"{format_bytes(free)} free, {need.num_checkpoints} checkpoints of "
        f"{format_bytes(need.checkpoint_bytes)} need {format_bytes(needed)}"
    )
    if free < needed:
        fit = max(1, free // max(1, need.checkpoint_bytes) - 1)
        fix = f"df -h {where}; --runs on a larger disk, or keep {fit} at most by "
        fix += "checkpoint.keep_last, keep_every, keep_best and evaluate.outputs_every"
        return failed(name, node, said, id="disk-full-checkpoint", fix=fix)
    return passed(name, node, said)


def _lasting(node: str, folder: FolderFacts, where: str, need: Need) -> Iterator[Result]:
    """Whether checkpoints are there when the machine, or the container, is not any more."""
    name, kind, model = "checkpoint-ephemeral", folder.kind or "", folder.disk_model or ""
    lost = None
    if kind in _IN_MEMORY:
        lost = (
            f"{where} is in memory ({kind}): a restart of the machine takes it, and it grows there"
        )
    elif kind in _OF_A_CONTAINER and need.accelerator != "cpu":
        lost = f"{where} is in the container's own layer ({kind}), which goes with the container"
    elif model.startswith(_OF_AN_INSTANCE) and not model.startswith("nvme_card-pd"):
        lost = f"{where} is on the instance's own disk ({model}), wiped when it stops or is taken"
    if lost is None:
        return
    if need.is_copied:
        yield passed(name, node, f"{lost}; checkpoints are copied by checkpoint.copy_to")
        return
    fix = "--runs on a disk that stays, or checkpoint.copy_to: s3://bucket/prefix"
    yield warned(name, node, lost, id=name, fix=fix)


def _shared(node: str, found: str | None, note: str, where: str, kind: str | None) -> Result:
    name = "shared-folder"
    if found == note:
        return passed(name, node, f"{where} ({kind}) is the same folder as here")
    said = (
        f"{where} on {kind or 'a file system of its own'} does not show a file that was just "
        "written from here"
    )
    fix = "put --runs (or --out) on a file system that all nodes mount at one path"
    return failed(name, node, said, id="folder-not-shared", fix=fix)


def _caches(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    name = "caches"
    if facts.stale_locks:
        lock = facts.stale_locks[0]
        fix = f"rm {lock}, when nothing is being built"
        yield warned(name, node, f"{lock} was left behind", id="stale-extension-lock", fix=fix)
        return
    kind = facts.home_kind or ""
    local = {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= facts.environment.keys()
    if need.is_apart and need.compiles and kind.startswith(ON_MANY_MACHINES) and not local:
        said = f"the home folder is on {kind}, and every node compiles into its caches"
        fix = (
            "export TRITON_CACHE_DIR=/tmp/triton-$USER TORCHINDUCTOR_CACHE_DIR=/tmp/inductor-$USER"
        )
        yield warned(name, node, said, id="nfs-jit-cache-race", fix=fix)
    else:
        yield passed(name, node, "no stale lock")
