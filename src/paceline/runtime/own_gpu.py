"""Whether the GPU that a rank was given is there, asked before anything of the rank is built."""

import os
from pathlib import Path

import torch

from paceline.errors import JobError

DRIVER = Path("/proc/driver/nvidia/version")
"""There while NVIDIA's kernel driver is loaded."""


def check_own_gpu(local_rank: int, *, is_first: bool) -> None:
    """
    Args:
        local_rank: Number of the GPU among those that this process sees.
        is_first: Whether the run has just begun, or was just resumed: then the job asks for what is
            not there. Later, a GPU was lost, which another node may make good.

    Raises:
        JobError: `R062`, the run was given fewer GPUs than ranks.
        RuntimeError: The GPU was there before, and is not any more.
    """
    num_seen = torch.cuda.device_count()
    moved = _moved(local_rank, num_seen)
    if local_rank < num_seen and moved is None:
        return
    through, fix = _why(num_seen)
    through = moved or through
    said = f"rank {os.environ.get('RANK', '?')} needs GPU {local_rank}; {through}"
    if not is_first:
        raise RuntimeError(
            f"CUDA error: a GPU disappeared: {said}; dmesg | grep Xid has the driver's reason, "
            "and a GPU that fell off the bus comes back with a reboot"
        )
    raise JobError.of(
        code="R062",
        what=said,
        where="cluster.per_node",
        fix=fix,
    )


def _moved(local_rank: int, num_seen: int) -> str | None:
    """What shows that CUDA numbers the GPUs otherwise than when the agent began, as a new process
    does after one is lost: this number may then be another rank's GPU. None where it is the same
    GPU, and where UUIDs cannot be compared."""
    before = os.environ.get("PACELINE_GPUS", "").replace("GPU-", "").split(",")
    now = [str(torch.cuda.get_device_properties(at).uuid) for at in range(num_seen)]
    lost = [uuid for uuid in before if uuid not in now]
    own = slice(local_rank, local_rank + 1)
    if not lost or len(lost) == len(before) or now[own] == before[own]:
        return None
    return f"GPU-{lost[0]} is gone, and {num_seen} of {len(before)} are left, numbered anew"


def _why(num_seen: int) -> tuple[str, str]:
    on_cpus = "or set cluster.accelerator to cpu"
    if not DRIVER.exists():
        return "no NVIDIA driver is loaded here, so there is no GPU", (
            f"take a node that has GPUs (in a container: --gpus all), {on_cpus}"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA", (
            "pip install torch --index-url https://download.pytorch.org/whl/cu130 (or your "
            f"driver's CUDA), {on_cpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    per_node = f"or set cluster.per_node to {num_seen}" if num_seen else on_cpus
    if visible is None:
        return f"PyTorch shows {num_seen}", (
            "nvidia-smi -L shows those that the driver knows (in a container: --gpus all), "
            + per_node
        )
    return f"CUDA_VISIBLE_DEVICES={visible!r} shows {num_seen}", (
        "unset CUDA_VISIBLE_DEVICES or name a GPU for each rank in it; nvidia-smi -L shows "
        f"those that the driver knows; {per_node}"
    )
