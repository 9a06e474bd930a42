"""Whether the same step gives the same bits again: seeds, and torch's deterministic kernels."""

import os
import random

import numpy as np
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


def seed_everything(seed: int) -> None:
    """Seed the generators that a model's factory may draw from: torch's, numpy's and Python's."""
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
