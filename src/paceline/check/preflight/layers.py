"""Every check of a job's nodes, in the eight layers of the coordinator's checklist."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.check.preflight.result import Result, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Checks that are told together."""

    checks: tuple[str, ...]
    """Names as in `Result.name`."""

    fix: str
    """The command that repairs most of what fails there, or shows what is wrong. JOB is the job's
    file, with what `--set` gave."""


LAYERS: Mapping[str, Layer] = {
    "Hardware Layer": Layer(
        checks=(
            *("accelerators", "driver", "accelerator-memory", "host-memory", "cpus", "rdma"),
            *("rdma-rate", "gpu-direct", "fabric", "pcie", "links", "acs", "iommu", "numa"),
        ),
        fix="paceline detect",
    ),
    "Worker Layer": Layer(
        checks=(
            *("answers", "reach", "machines", "names", "own-name", "interface", "ports", "clock"),
            *("mtu", "rdma-alike"),
        ),
        fix="ssh-copy-id HOST",
    ),
    "Checkpoint Layer": Layer(
        checks=(
            *("checkpoint-folder", "checkpoint-room", "checkpoint-ephemeral", "shared-folder"),
        ),
        fix="paceline checkpoint ls runs/RUN",
    ),
    "Gradient Layer": Layer(
        checks=("environment", "nccl", "torch"),
        fix="paceline render JOB --for network",
    ),
    "Performance Layer": Layer(
        checks=("matmul", "all-reduce"), fix="paceline bench JOB --all-reduce"
    ),
    "Health Check": Layer(
        checks=(
            *("shared-memory", "open-files", "locked-memory", "processes", "stack", "host-ecc"),
            *("accelerator-ecc", "accelerator-clocks", "kernel-log", "folder", "caches"),
        ),
        fix="paceline doctor --fix",
    ),
    "Pre-RDMA Sync": Layer(
        checks=("code", "settings", "data", "data-check"), fix="paceline sync JOB"
    ),
    "Worker Consistency": Layer(checks=("versions", "packages"), fix="paceline doctor --fix"),
}

_WORST = (Status.FAIL, Status.WARNING, Status.PASS)


def layers_of(results: Iterable[Result], job: str = "JOB") -> list[dict[str, str | None]]:
    """Each layer's worst result: status, evidence, how to repair it in words, and a command that
    repairs it or shows what is wrong.

    A layer of which nothing was looked at is a warning.

    Args:
        job: The job as words of a command.
    """
    found = list(results)
    told: list[dict[str, str | None]] = []
    for name, layer in LAYERS.items():
        of = [each for each in found if each.name in layer.checks]
        worst = next((each for status in _WORST for each in of if each.status is status), None)
        unseen = "; ".join(f"{each.name}: {each.evidence}" for each in of) or "no check of it ran"
        status = Status.WARNING if worst is None else worst.status
        told.append(
            {
                "name": name,
                "status": status,
                "evidence": unseen if worst is None else f"{worst.node}: {worst.evidence}",
                "fix": (worst and worst.fix) or None,
                "fix_command": None if status is Status.PASS else layer.fix.replace("JOB", job),
            }
        )
    return told
