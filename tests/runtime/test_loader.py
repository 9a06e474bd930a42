"""A map-style dataset is read in the order of the run, whatever the ranks, workers and restarts."""

import random

import numpy as np
import pytest
import torch

from paceline.errors import RunError
from paceline.parallel.layout import Layout
from paceline.runtime.batches import Batches
from paceline.runtime.loader import Loader
from paceline.runtime.sampling import DataRank, sample_ids


class Augmented:
    """Samples that draw from every generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = (torch.rand(()).item(), np.random.rand(), random.random())
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


def layout(data: int, micro_batch: int = 2) -> Layout:
    accumulation = 8 // data // micro_batch
    return Layout(data=data, sharding="none", micro_batch=micro_batch, accumulation=accumulation)


def data_rank(where: Layout, rank: int) -> DataRank:
    return DataRank(seed=5, layout=where, rank=rank, batches=Batches(where.global_batch))


def a_loader(data: int = 1, rank: int = 0, *, num_workers: int = 0, micro_batch: int = 2) -> Loader:
    loader = Loader(Augmented(), collate_fn=None, num_workers=num_workers)
    where = data_rank(layout(data, micro_batch), rank)
    loader.join(where, torch.device("cpu"))
    return loader


def steps(loader: Loader, numbers, accumulation: int) -> list[torch.Tensor]:
    """The samples of each step."""
    return [
        torch.cat([loader.take((step, index)).batch for index in range(accumulation)])
        for step in numbers
    ]


def together(data: int, numbers, **options) -> list[torch.Tensor]:
    """The samples of each step over all data ranks."""
    accumulation = layout(data, options.get("micro_batch", 2)).accumulation
    by_rank = [
        steps(a_loader(data, rank, **options), numbers, accumulation) for rank in range(data)
    ]
    return [torch.cat(parts) for parts in zip(*by_rank, strict=True)]


def same(left, right) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_steps_have_the_samples_that_their_ids_name():
    for step, found in enumerate(together(1, range(1, 6)), 1):
        expected = sample_ids(step - 1, range(8), seed=5, global_batch=8, num_samples=20)
        assert found[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize(("data", "micro_batch"), [(2, 2), (4, 1), (4, 2)])
def test_any_number_of_ranks_reads_the_same_samples_with_the_same_random_numbers(data, micro_batch):
    expected = together(1, range(1, 6))
    assert same(together(data, range(1, 6), micro_batch=micro_batch), expected)
    assert not torch.equal(expected[0][:, 1:], expected[1][:, 1:])


def test_workers_give_the_same_samples_and_start_again_where_a_run_resumes():
    loader = a_loader(num_workers=1)
    assert same(steps(loader, [1, 2], 4), together(1, [1, 2]))
    loader.leave()
    assert same(steps(loader, [2, 3], 4), together(1, [2, 3]))
    loader.leave()


def test_a_step_that_is_computed_again_in_mid_step_gets_the_same_samples():
    loader = a_loader()
    loader.take((3, 0)), loader.take((3, 1))
    assert same(steps(loader, [3, 4], 4), together(1, [3, 4]))


def test_reading_leaves_the_steps_own_random_numbers_alone():
    def drawn(reads: bool) -> tuple[float, float, float]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        if reads:
            a_loader().take((1, 0))
        return torch.rand(()).item(), np.random.rand(), random.random()

    assert drawn(reads=True) == drawn(reads=False)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_sample_raises_comes_with_its_ids(num_workers):
    class Broken(Augmented):
        def __getitem__(self, index):
            raise OSError(f"no image {index}")

    loader = Loader(Broken(), collate_fn=None, num_workers=num_workers)
    rank = data_rank(layout(1), 0)
    loader.join(rank, torch.device("cpu"))
    fed = loader.take((1, 0))
    assert f"no image {fed.ids[0]}" in str(fed.error)
    assert "__getitem__" in str(fed.error) or num_workers == 0
    loader.leave()


def test_an_iterable_is_sent_to_streams():
    with pytest.raises(RunError, match=r"R066.*list_iterator"):
        Loader(iter([1]), collate_fn=None, num_workers=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "options", "told"),
    [
        ([], {}, "given 0 samples"),
        ([1], {"num_workers": -1}, "num_workers -1"),
        (torch.utils.data.DataLoader([1]), {}, "of a DataLoader its .dataset"),
    ],
)
def test_what_no_batch_comes_from_is_refused(dataset, options, told):
    with pytest.raises(RunError, match="R066") as caught:
        Loader(dataset, **{"collate_fn": None, "num_workers": 0, **options})
    assert told in str(caught.value)
