"""The next layout of a run that is out of memory: the same ranks and global batch, less memory.

From what costs least time: a smaller micro-batch with more accumulation, recompute, more sharding,
offload. The planner makes the plan of each; what it refuses is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from paceline.choices import Recompute, Sharding
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.errors import PacelineError
from paceline.job import Job, LayoutSpec
from paceline.parallel.layout import Layout
from paceline.plan.decision import Plan

_SHARED: tuple[Sharding, ...] = ("none", "zero1", "zero2", "full")
_AGAIN: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """The next rung, with its job and plan."""

    changes: dict[str, Any]
    """Fields of `layout` in the job file, and their new values."""

    job: Job
    plan: Plan

    @property
    def settings(self) -> list[str]:
        """The changes as `--set` takes them."""
        return [f"layout.{name}={value}" for name, value in self.changes.items()]


def rungs(layout: Layout) -> Iterator[dict[str, Any]]:
    """Each change of a layout that needs less memory, the fastest first.

    >>> from paceline.parallel import Layout
    >>> for rung in rungs(Layout(data=2, sharding="none", micro_batch=4, accumulation=1)):
    ...     print(rung)
    {'micro_batch': 2}
    {'recompute': 'selective'}
    {'recompute': 'full'}
    {'sharding': 'full'}
    {'sharding': 'zero2'}
    {'sharding': 'zero1'}
    {'offload': 'cpu', 'sharding': 'full'}
    """
    size = layout.micro_batch
    if size > 1:
        smallest = next(factor for factor in range(2, size + 1) if size % factor == 0)
        yield {"micro_batch": size // smallest}
    for recompute in _AGAIN[_AGAIN.index(layout.recompute) + 1 :]:
        yield {"recompute": recompute}
    if layout.recompute in WHOLE_BLOCKS and layout.recompute_every > 1:
        yield {"recompute_every": 1}
    if layout.data * layout.context > 1 and layout.sharding in _SHARED:
        for sharding in reversed(_SHARED[_SHARED.index(layout.sharding) + 1 :]):
            yield {"sharding": sharding}
    if layout.offload == "none":
        alone = {"sharding": "full"} if layout.sharding == "none" else {}
        yield {"offload": "cpu"} | alone


def leaner_settings(layout: Layout) -> str | None:
    """The fastest change of a layout that needs less memory, as options; None where none is left.

    >>> from paceline.parallel import Layout
    >>> leaner_settings(Layout(data=2, sharding="none", micro_batch=1, accumulation=4))
    '--set layout.recompute=selective'
    """
    rung = next(rungs(layout), None)
    if rung is None:
        return None
    return " ".join(f"--set layout.{name}={value}" for name, value in rung.items())


def next_fit(job: Job, plan: Plan, make_plan: Callable[[Job], Plan]) -> Refit | None:
    """The first rung that the planner accepts and that it expects to need less memory; None where
    none is left. A smaller micro-batch counts as less where activations are not known.

    Args:
        job: The job that ran.
        plan: Its plan.
        make_plan: The planner, and whatever else may refuse a job, by a `PacelineError`.
    """
    for changes in rungs(plan.layout):
        if "offload" in changes and not plan.cluster.has_host:
            continue  # it is the same memory
        fixed = replace(_fixed(plan.layout), offload_path=job.spec.layout.offload_path)
        other = replace(job, spec=replace(job.spec, layout=replace(fixed, **changes)))
        try:
            made = make_plan(other)
        except PacelineError:
            continue
        needs, needed = made.estimate.memory, plan.estimate.memory
        is_unknown = needs.total_bytes is None and "micro_batch" in changes
        if is_unknown or needs.known_bytes < needed.known_bytes:
            return Refit(changes=changes, job=other, plan=made)
    return None


def settings_of(found: Refit, job: Job, make_plan: Callable[[Job], Plan]) -> list[str]:
    """What `--set` needs to get a rung's layout from a job; what changed alone, where the planner
    then chooses the rest of it by itself."""
    spec = job.spec
    short = replace(job, spec=replace(spec, layout=replace(spec.layout, **found.changes)))
    try:
        if make_plan(short).layout == found.plan.layout:
            return found.settings
    except PacelineError:
        pass
    wanted = vars(found.job.spec.layout)
    differs = {key: value for key, value in wanted.items() if getattr(spec.layout, key) != value}
    return [f"layout.{key}={value}" for key, value in differs.items()]


def _fixed(layout: Layout) -> LayoutSpec:
    """What a job says to get this layout; fields that do nothing in it stay at `auto`."""
    spec = LayoutSpec(
        data=layout.data,
        sharding=layout.sharding,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        micro_batch=layout.micro_batch,
        recompute=layout.recompute,
        offload=layout.offload,
    )
    only: dict[str, bool] = {
        "shard": layout.sharding == "hybrid",
        "schedule": layout.pipeline > 1,
        "chunks": layout.chunks > 1,
        "context_kind": layout.context > 1,
        "sequence_parallel": layout.tensor > 1,
        "recompute_every": layout.recompute in WHOLE_BLOCKS,
    }
    return replace(spec, **{name: getattr(layout, name) for name, does in only.items() if does})
