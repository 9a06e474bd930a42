"""Whether the same step gives the same bits again: seeds, and torch's deterministic kernels."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import xxhash

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


@contextmanager
def own_random() -> Iterator[Callable[..., None]]:
    """A function that seeds the host's generators from some numbers, for code that draws beside the
    model. Afterwards they are as they were, so a step's dropout is the same with it and without."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def seed(*parts: int) -> None:
        numbers = np.array([part % 2**64 for part in parts], dtype=np.uint64)
        drawn = xxhash.xxh3_64_intdigest(numbers.tobytes())
        torch.default_generator.manual_seed(drawn % 2**63)
        np.random.seed(drawn % 2**32)
        random.seed(drawn)

    try:
        yield seed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
