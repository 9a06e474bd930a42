"""Whether the same step gives the same bits again: torch's deterministic kernels, on or off."""

import os

import torch

CUBLAS = ":4096:8"
"""Workspaces with which cuBLAS gives the same bits again in several streams. Source: NVIDIA's
cuBLAS documentation, 2.1.4, results reproducibility."""


def set_deterministic(wanted: bool) -> None:
    """Set it for this process, before CUDA starts: cuBLAS reads its variable once.

    On, an operation without a deterministic kernel raises. Memory that torch leaves uninitialised
    stays so: filling it with NaN, torch's default here, costs a write of every buffer and changes
    no result of a right program.
    """
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS)
