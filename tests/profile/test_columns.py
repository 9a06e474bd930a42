"""The arithmetic of blocks takes columns of models as it takes one model."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from paceline.catalog.configs import load_published_configs
from paceline.profile import (
    Block,
    block_flops,
    block_parameters,
    profile_config,
    runtime_kernels,
)
from paceline.profile.block import Written
from paceline.profile.saved import Kernels, SavedBytes, saved_bytes, saved_input, saved_outputs

np = pytest.importorskip("numpy")

BLOCKS = [
    block
    for published in load_published_configs().values()
    for block in profile_config(published.config, 2048).blocks
]


def only_input(block: Block, kernels: Kernels, _: float) -> SavedBytes:
    return saved_input(block, kernels)


def column() -> Block:
    skipped = ("name", "measured", "written")
    names = [field.name for field in fields(Block) if field.name not in skipped]
    values = {name: np.array([getattr(block, name) for block in BLOCKS]) for name in names}
    facts = [field.name for field in fields(Written)]
    written = {name: np.array([getattr(each.written, name) for each in BLOCKS]) for name in facts}
    return Block(name="column", written=Written(**written), **values)


def test_parameters_of_a_column_are_those_of_each_row():
    assert block_parameters(column()).tolist() == [block_parameters(each) for each in BLOCKS]


@pytest.mark.parametrize("seq_len", [1, 512, 8192])
def test_flops_of_a_column_are_those_of_each_row(seq_len: int):
    expected = [block_flops(each, seq_len) for each in BLOCKS]
    assert block_flops(column(), seq_len).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("keeps", [saved_bytes, saved_outputs, only_input])
@pytest.mark.parametrize("fused_norm", [True, False])
def test_saved_bytes_of_a_column_are_those_of_each_row(
    keeps: Callable[..., SavedBytes], fused_norm: bool
):
    kernels = replace(runtime_kernels("bf16-autocast", fused_norm=fused_norm), written=1)
    whole = keeps(column(), kernels, 2048)
    rows = [keeps(each, kernels, 2048) for each in BLOCKS]
    for part in ("tensor", "sequence", "routed", "routed_ends", "peak"):
        expected = [getattr(row, part) for row in rows]
        values = np.broadcast_to(getattr(whole, part), len(BLOCKS))
        assert values.tolist() == pytest.approx(expected, rel=1e-12), part


def test_recomputing_keeps_less():
    kernels = runtime_kernels("bf16-sharded", fused_norm=True)
    for block in BLOCKS:
        kept = [keeps(block, kernels, 2048) for keeps in (only_input, saved_outputs, saved_bytes)]
        sums = [each.tensor + each.sequence + each.routed + each.routed_ends for each in kept]
        assert sums == sorted(sums), block
