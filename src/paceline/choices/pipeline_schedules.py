"""What each pipeline schedule needs and does, one row a schedule, the simplest first.

A new schedule is its word and row here and its times in `estimate/schedule.py`; engines that have
it are listed in `abilities.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe-v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """One schedule, as torch 2.13 and the papers in `estimate/schedule.py` have it."""

    torch_class: str
    """Its class in `torch.distributed.pipelining`; torchtitan's name for it is the same without
    `Schedule`."""

    torch_class_in_v: str | None = None
    """Where stages in a v have a class of their own."""

    chunks: Literal["one", "two", "several", "any"]
    """Stages of each rank. `two`: whatever the layout says, in a v. `any`: as the layout says, and
    two of them in a v. The others are in a loop."""

    splits_backward: bool = False
    """Whether gradients of inputs and of matrices are computed apart."""

    in_rounds: bool = False
    """Whether chunks in a loop take the micro-batches in equal rounds."""

    least_rounds: int = 0
    """Micro-batches that torch needs, for each rank of the pipeline; 0 is one in all."""

    ends_at_once: bool = False
    """Whether the last stage goes backward through a micro-batch right after its forward pass."""

    forwards_first: bool = False
    """Whether every micro-batch has gone forward before the first goes backward."""


SCHEDULE_FACTS: Mapping[Schedule, ScheduleFacts] = {
    "1f1b": ScheduleFacts(
        torch_class="Schedule1F1B", chunks="one", least_rounds=1, ends_at_once=True
    ),
    "gpipe": ScheduleFacts(torch_class="ScheduleGPipe", chunks="one", forwards_first=True),
    "interleaved": ScheduleFacts(
        torch_class="ScheduleInterleaved1F1B", chunks="several", in_rounds=True, ends_at_once=True
    ),
    "zero-bubble": ScheduleFacts(
        torch_class="ScheduleInterleavedZeroBubble",  # ZB1P where a rank has one stage
        torch_class_in_v="ScheduleZBVZeroBubble",
        chunks="any",
        in_rounds=True,
        splits_backward=True,
    ),
    "dualpipe-v": ScheduleFacts(
        torch_class="ScheduleDualPipeV", chunks="two", splits_backward=True, least_rounds=2
    ),
}

PLAIN: Schedule = next(iter(SCHEDULE_FACTS))
"""What a pipeline has unless another is asked for or faster."""

LOOPED = tuple(word for word, facts in SCHEDULE_FACTS.items() if facts.chunks == "several")
"""In which ranks take turns at several stages in a loop, forward and backward by turns; the first
is meant by chunks alone."""

SPLIT_BACKWARD = tuple(word for word, facts in SCHEDULE_FACTS.items() if facts.splits_backward)
