import gc
import itertools
import mmap
import weakref

import pytest
import torch
from tests.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from paceline.runtime.checkpoint import _host_memory
from paceline.runtime.checkpoint._host_memory import Room


def span(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_host_memory, "_BLOCK_BYTES", mmap.PAGESIZE)


def test_tensors_keep_their_values_whatever_else_is_handed_out(small_blocks):
    room = Room()
    shapes = [(3,), (), (40, 50), (7, 1), (2000,), (_host_memory._PAGE_BYTES,), (1,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
    made = []
    for number, shape in enumerate(shapes * len(dtypes)):
        dtype = dtypes[number % len(dtypes)]
        made.append(room.like(torch.empty(shape, dtype=torch.float32), dtype).fill_(number))
        assert (made[-1].dtype, tuple(made[-1].shape)) == (dtype, shape)
    assert all(bool((each == number).all()) for number, each in enumerate(made))
    assert all(each.data_ptr() % 64 == 0 for each in made)
    # Saved by itself, a tensor takes its whole storage with it.
    assert [each.untyped_storage().nbytes() for each in made] == [each.nbytes for each in made]
    spans = sorted(map(span, made))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_block_is_given_back_with_the_last_tensor_in_it(small_blocks, monkeypatch):
    blocks = []

    def mapped(num_bytes, make=_host_memory._map):
        block = make(num_bytes)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(_host_memory, "_map", mapped)
    room = Room()
    first, second = (room.like(torch.empty(16), torch.float32) for _ in range(2))
    del room, first
    gc.collect()
    assert [block() is None for block in blocks] == [False]
    second.fill_(1)
    del second
    gc.collect()
    assert [block() is None for block in blocks] == [True]


def test_memory_is_asked_for_in_large_pages_and_is_there_without_them(monkeypatch):
    asked = []

    class Refuses(mmap.mmap):
        def madvise(self, *advice):
            asked.append(advice)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    assert Room().like(torch.empty(5), torch.float32).fill_(1).sum() == 5
    assert asked == [(14,)]
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert Room().like(torch.empty(5), torch.float32).fill_(1).sum() == 5
    assert asked == [(14,)]


@pytest.mark.parametrize("kind", ["other strides", "nothing", "meta"])
def test_what_is_no_plain_host_memory_is_made_by_torch(kind):
    parameter = {
        "other strides": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nothing": torch.empty(0, 4),
        "meta": torch.empty(2, 3, device="meta"),
    }[kind]
    made, usual = Room().like(parameter, torch.float64), torch.empty_like(parameter).double()
    assert (made.shape, made.stride(), made.device) == (usual.shape, usual.stride(), usual.device)
    assert made.dtype == torch.float64


@pytest.mark.ranks
def test_a_shard_is_laid_out_like_its_parameter():
    assert run_ranks(differs, 2) == [[], []]


def differs(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for shape, dim in [((5, 3), 0), ((5, 3), 1), ((1, 3), 0), ((4,), 0)]:
        parameter = torch.distributed.tensor.empty(shape, device_mesh=mesh, placements=[Shard(dim)])
        made = Room().like(parameter, torch.float32)
        usual = torch.empty_like(parameter)
        if facts(made) != facts(usual):
            found.append((facts(made), facts(usual)))
    return found


def facts(tensor):
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    whole = (tensor.shape, tensor.stride(), tensor.placements, tensor.device_mesh)
    return whole, local.shape, local.stride(), local.dtype
