"""The ledger: every step's samples consumed exactly once, audited against the pure function.

Each committed step leaves a line in `metrics.jsonl` with a hash of its sample ids. Here every line
is held against the ids that the step must have had. Leaves out how the samples were computed on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.prepare import Prepared, TrainedOn
from paceline.record.metrics import StepMetrics
from paceline.runtime.sampling import Mixture, batch_digest, order_of

_MOST = 5
"""Complaints of one sort that are told."""


def audit(
    lines: Sequence[StepMetrics],
    *,
    num_steps: int,
    first_steps: Mapping[int, int],
    digest_of: Callable[[int], str | None],
    gone_back: Sequence[tuple[int, int]] = (),
) -> list[str]:
    """What is wrong with a run's ledger; empty when every step was consumed exactly once.

    Args:
        lines: Every line, also of steps that were repeated, in the order written.
        num_steps: Steps that the run should have done.
        first_steps: Generation -> the first step that it did, from `TrainingStarted`: what stands
            before it is committed, and must not be repeated.
        digest_of: Step, from 1 -> the hash of its sample ids; None when it is not known.
        gone_back: Generation and step to which a wrong state was taken back in it, each time.
    """
    return [
        *_few(_missing(lines, num_steps)),
        *_few(_wrong(lines, digest_of)),
        *_few(_twice(lines, gone_back)),
        *_few(_gone_back(lines, first_steps)),
    ]


def pure_digest(seed: int, global_batch: int, num_samples: int | Mixture) -> Callable[[int], str]:
    """Step, from 1 -> the hash of the sample ids that it must have."""
    return lambda step: batch_digest(
        step - 1, seed=seed, global_batch=global_batch, num_samples=num_samples
    )


def order_in(data: TrainedOn, seq_len: int) -> int | Mixture:
    """What sample ids are drawn from: so many samples, or sources by weight."""
    if isinstance(data, Prepared):
        return order_of(data.index.train)
    return data.num_samples(seq_len)


def _missing(lines: Sequence[StepMetrics], num_steps: int) -> Iterator[str]:
    seen = {line.step for line in lines}
    yield from (f"step {step} has no line" for step in range(1, num_steps + 1) if step not in seen)
    extra = sorted(step for step in seen if not 1 <= step <= num_steps)
    yield from (f"step {step} is beyond the run's {num_steps}" for step in extra)


def _wrong(lines: Sequence[StepMetrics], digest_of: Callable[[int], str | None]) -> Iterator[str]:
    for line in lines:
        wanted = digest_of(line.step)
        if wanted is not None and line.samples_digest != wanted:
            yield (
                f"step {line.step} of generation {line.generation} read samples "
                f"{line.samples_digest}, it should have read {wanted}"
            )


def _twice(lines: Sequence[StepMetrics], gone_back: Sequence[tuple[int, int]]) -> Iterator[str]:
    times = Counter((line.generation, line.step) for line in lines)
    for (generation, step), seen in times.items():
        allowed = 1 + sum(1 for of, after in gone_back if of == generation and after < step)
        if seen > allowed:
            yield f"step {step} stands {seen} times in generation {generation}"


def _gone_back(lines: Sequence[StepMetrics], first_steps: Mapping[int, int]) -> Iterator[str]:
    done: dict[int, int] = {}
    for line in lines:
        before = done.get(line.step)
        first = first_steps.get(line.generation)
        if before is not None and first is not None and line.step < first:
            yield (
                f"step {line.step} was committed in generation {before} and repeated in "
                f"{line.generation}, which began at step {first}"
            )
        done[line.step] = line.generation


def _few(complaints: Iterator[str]) -> list[str]:
    found = list(complaints)
    more = [f"and {len(found) - _MOST} more like this"] if len(found) > _MOST else []
    return found[:_MOST] + more
