"""Seconds that Muon takes in a step beyond moving its state: each hidden matrix of a stage is
gathered whole and made orthogonal, by every rank that has a part of it.

Counted in `runtime/optimizer/muon.py`; a matrix of m rows and n columns, m the smaller:

    five times     m m n + m m m + m m n multiplications and additions, and 7 m m + 5 m n values
                   read or written between them, in the type that is multiplied in
    once           the momentum, in float32, gathered over the ranks that shard it and over the
                   tensor ranks

Leaves out: other engines' ways to give different matrices to different ranks.
"""

import numpy as np

from paceline.estimate.collectives import all_gather_s
from paceline.estimate.compute import matmul_s
from paceline.estimate.rates import Rates
from paceline.estimate.sharding import RoutedSplit
from paceline.parallel.table import Layouts
from paceline.profile.block import Block, Column, Matrix, matrices

_ITERATIONS = 5
"""Newton-Schulz iterations. Source: Jordan et al., 2024; `NUM_ITERATIONS` of our own runtime."""

_MOMENTUM_BYTES = 4.0


def muon_s(blocks: tuple[Block, ...], t: Layouts, rates: Rates, experts: RoutedSplit) -> Column:
    """Seconds of one step on a typical stage.

    Args:
        blocks: All kinds of the model.
        t: Layouts.
        rates: Of a rank.
        experts: How its ranks divide the routed experts.
    """
    total: Column = np.asarray(0.0)
    for block in blocks:
        count = block.count / t.pipeline
        for matrix in matrices(block):
            if matrix.outputs == 0 or matrix.inputs == 0:
                continue
            total = total + count * _matrix_s(block, matrix, t, rates, experts)
    return np.asarray(total)


def _matrix_s(
    block: Block, matrix: Matrix, t: Layouts, rates: Rates, experts: RoutedSplit
) -> Column:
    """One matrix of one block; matrices that the profile holds together are two."""
    is_gated = matrix.name in ("up", "shared_up", "expert_up") and block.gated
    parts = 2 if is_gated or matrix.name in ("key_value", "cross_key_value") else 1
    outputs = matrix.outputs // parts
    small, large = min(matrix.inputs, outputs), max(matrix.inputs, outputs)
    each = _ITERATIONS * (
        2 * matmul_s(small, large, small, rates.wide_matmul)
        + matmul_s(small, small, small, rates.wide_matmul)
        + rates.wide_matmul.output_bytes
        * (7 * small * small + 5 * small * large)
        / rates.memory_bytes_per_s
    )
    shard = np.where(t.sharding == 0, 1, t.shard)
    if matrix.is_routed:
        # A list of experts is sharded by expert: nobody gathers another's.
        mine = np.maximum(matrix.copies / experts.holders / np.maximum(shard // t.expert, 1), 1)
        return parts * mine * each
    size = _MOMENTUM_BYTES * matrix.inputs * outputs
    tensor = np.where(matrix.split == "whole", 1, t.tensor)
    gathered = all_gather_s(size / tensor, shard, t.tensor, rates) + all_gather_s(
        size, tensor, 1, rates
    )
    return parts * (each + gathered)
