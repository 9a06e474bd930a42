"""Whether the GPU that a rank was given is there, asked before anything of the rank is built."""

import os

import torch

from paceline.errors import JobError, Problem


def check_own_gpu(local_rank: int, *, is_first: bool) -> None:
    """
    Args:
        local_rank: Number of the GPU among those that this process sees.
        is_first: Whether the run has just begun: then the job asks for what is not there. Later, a
            GPU was lost, which another node may make good.

    Raises:
        JobError: `R062`, the run was given fewer GPUs than ranks.
        RuntimeError: The GPU was there before, and is not any more.
    """
    num_seen = torch.cuda.device_count()
    if local_rank < num_seen:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    through = f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "PyTorch"
    said = f"rank {os.environ.get('RANK', '?')} needs GPU {local_rank}; {through} shows {num_seen}"
    if not is_first:
        raise RuntimeError(f"CUDA error: a GPU disappeared: {said}")
    raise JobError(
        Problem(
            code="R062",
            what=said,
            where="cluster.per_node",
            fix="unset CUDA_VISIBLE_DEVICES or name a GPU for each rank in it; nvidia-smi -L shows "
            f"those that the driver knows; or set cluster.per_node to {max(1, num_seen)}",
        )
    )
