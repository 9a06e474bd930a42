"""What every layout must obey, as generators of problems with the nearest numbers that work."""

from collections.abc import Iterator

from paceline.errors import Problem
from paceline.parallel.candidates import divisors
from paceline.spec import Job


def check_layout_choices(job: Job, num_ranks: int) -> Iterator[Problem]:
    """What the job fixed and the number of ranks must go together."""
    yield from check_global_batch(job, num_ranks)
    yield from check_micro_batch(job, num_ranks)


def check_global_batch(job: Job, num_ranks: int) -> Iterator[Problem]:
    """Every rank computes the same number of samples, so that means of means are the mean."""
    batch = job.spec.train.global_batch
    if batch % num_ranks == 0:
        return
    below, above = batch // num_ranks * num_ranks, -(-batch // num_ranks) * num_ranks
    sizes = f"{below} or {above}" if below else f"{above}"
    nodes = job.spec.cluster.nodes
    fewer = next((n for n in range(num_ranks, 0, -1) if batch % n == 0 and n % nodes == 0), None)
    yield Problem(
        code="L001",
        what=f"train.global_batch {batch} does not divide over {num_ranks} ranks: "
        f"{batch / num_ranks:.4g} samples each",
        where=job.where("train.global_batch"),
        fix=f"set train.global_batch to {sizes}"
        + (f", or cluster.per_node to {fewer // nodes}" if fewer else ""),
    )


def check_micro_batch(job: Job, num_ranks: int) -> Iterator[Problem]:
    """A rank's samples are a whole number of micro-batches."""
    batch, micro_batch = job.spec.train.global_batch, job.spec.layout.micro_batch
    if micro_batch == "auto" or batch % num_ranks:
        return
    rank_batch = batch // num_ranks
    if rank_batch % micro_batch == 0:
        return
    near = sorted(sorted(divisors(rank_batch), key=lambda n: abs(n - micro_batch))[:2])
    step = micro_batch * num_ranks
    below, above = batch // step * step, -(-batch // step) * step
    batches = f"{below} or {above}" if below else f"{above}"
    yield Problem(
        code="L002",
        what=f"layout.micro_batch {micro_batch} does not divide the {rank_batch} samples of a rank "
        f"(global_batch {batch} / {num_ranks} ranks)",
        where=job.where("layout.micro_batch"),
        fix=f"set layout.micro_batch to {' or '.join(map(str, near))}, "
        f"or train.global_batch to {batches}",
    )
