"""What must divide: the global batch into micro-batches over the data ranks."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.errors import Problem
from paceline.job import Job
from paceline.parallel.candidates import Space, grids
from paceline.parallel.degrees import divisors, num_fixed_ranks
from paceline.units import counted


def check_global_batch(job: Job, space: Space) -> Iterator[Problem]:
    """Every rank computes the same number of samples, so that means of means are the mean."""
    batch, ranks = space.global_batch, data_of(job, space)
    if ranks is None or batch % ranks == 0:
        return
    below, above = batch // ranks * ranks, -(-batch // ranks) * ranks
    sizes = f"{below} or {above}" if below else f"{above}"
    nodes = job.spec.cluster.nodes
    only_data = ranks == space.num_ranks
    fewer = next((n for n in range(ranks, 0, -1) if batch % n == 0 and n % nodes == 0), None)
    yield Problem(
        code="L001",
        what=f"train.global_batch {batch} does not divide over {ranks} "
        f"{'' if only_data else 'data '}ranks: {batch / ranks:.4g} samples each",
        where=job.where("train.global_batch"),
        fix=f"set train.global_batch to {sizes}"
        + (f", or cluster.per_node to {fewer // nodes}" if fewer and only_data else ""),
    )


def check_micro_batch(job: Job, space: Space) -> Iterator[Problem]:
    """A rank's samples are a whole number of micro-batches."""
    batch, micro_batch = space.global_batch, job.spec.layout.micro_batch
    ranks = data_of(job, space)
    if micro_batch == "auto" or ranks is None or batch % ranks:
        return
    rank_batch = batch // ranks
    if rank_batch % micro_batch == 0:
        return
    near = sorted(sorted(divisors(rank_batch), key=lambda n: abs(n - micro_batch))[:2])
    step = micro_batch * ranks
    below, above = batch // step * step, -(-batch // step) * step
    batches = f"{below} or {above}" if below else f"{above}"
    yield Problem(
        code="L002",
        what=f"layout.micro_batch {micro_batch} does not divide the {rank_batch} samples of a rank "
        f"(global_batch {batch} / {counted(ranks, 'rank')})",
        where=job.where("layout.micro_batch"),
        fix=f"set layout.micro_batch to {' or '.join(map(str, near))}, "
        f"or train.global_batch to {batches}",
    )


def data_of(job: Job, space: Space) -> int | None:
    """Ranks that read different samples, where the job leaves only one number possible."""
    fixed, able = job.spec.layout, space.abilities
    if fixed.data != "auto":
        return fixed.data
    degrees = {
        "tensor": able.tensor,
        "pipeline": bool(able.schedules),
        "context": bool(able.context_kinds),
    }
    if any(getattr(fixed, name) == "auto" and is_there for name, is_there in degrees.items()):
        return None
    return space.num_ranks // num_fixed_ranks(fixed)


def nothing_possible(job: Job, space: Space) -> Problem:
    """Each choice is possible, and no layout has all of them."""
    fixed = job.spec.layout
    batch, ranks = space.global_batch, space.num_ranks
    given = [
        f"{name} {getattr(fixed, name)}"
        for name in type(fixed).__dataclass_fields__
        if getattr(fixed, name) not in ("auto", None)
    ]
    sizes = _micro_batches_that_work(space)
    if sizes:
        return Problem(
            code="L014",
            what=f"no way to divide {counted(ranks, 'rank')} and {batch} samples has "
            f"{', '.join(given)}",
            where=job.where("layout.micro_batch"),
            fix=f"set layout.micro_batch to {' or '.join(map(str, sizes))}, or leave it out",
        )
    return Problem(
        code="L014",
        what=f"no way to divide {counted(ranks, 'rank')} and {batch} samples"
        + (f" has {', '.join(given)}" if given else " exists for this model"),
        where=job.where("layout") if given else job.where("train.global_batch"),
        fix=f"set train.global_batch to {-(-batch // ranks) * ranks}, which every rank can share"
        if batch % ranks
        else f"leave {' or '.join(f'layout.{each.split()[0]}' for each in given)} out",
    )


def _micro_batches_that_work(space: Space) -> list[int]:
    """The next smaller and the next larger micro-batch with which some layout is possible."""
    fixed = space.fixed
    if fixed.micro_batch == "auto":
        return []
    found: list[int] = []
    sizes = divisors(space.global_batch)
    below = [n for n in sizes if n < fixed.micro_batch]
    above = [n for n in sizes[::-1] if n > fixed.micro_batch]
    for side in (below, above):
        for size in side:
            tried = replace(space, fixed=replace(fixed, micro_batch=size))
            if any(grid.is_possible.any() for grid in grids(tried)):
                found.append(size)
                break
    return found
