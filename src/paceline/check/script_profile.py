"""What a script's profile means: the part of its step that limits it, and what would help."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.record.script_profile import ScriptProfile

SHOWN = 0.05
"""Share of a step below which nothing is advised about a part of it. A guess, as in `bench`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A part of the step that is not computing the model."""

    name: str
    share: float
    """Share of the step: how much shorter it would be at the most, if the part took no time."""

    change: str
    """What makes it smaller."""


_CHANGES: Mapping[str, str] = {
    "data": "load batches ahead: DataLoader(num_workers=4, persistent_workers=True, "
    "pin_memory=True); tokenize once, before training",
    "communication": "let it travel while backward computes: no_sync() while gradients accumulate, "
    "DDP without find_unused_parameters, buckets of 25 MB or more (bucket_cap_mb)",
    "optimizer": "update all tensors at once: fused=True, or foreach=True on a CPU",
    "everything else": "take .item(), .cpu(), print and logging out of the step, or do them every "
    "tenth step: each waits for the device",
    "waiting for the host": "start less from Python: torch.compile(model), a larger micro-batch, "
    "fewer .item() and .cpu()",
}


def limits_of(profile: ScriptProfile) -> list[Limit]:
    """What takes time beside the model's own forward and backward, the largest first."""
    if not profile.steps:
        return []
    shares = [(name, share) for name, share in _shares(profile) if share >= SHOWN]
    ordered = sorted(shares, key=lambda each: -each[1])
    return [Limit(name=name, share=share, change=_CHANGES[name]) for name, share in ordered]


def verdict_of(profile: ScriptProfile) -> str:
    """One sentence: what limits the step."""
    limits = limits_of(profile)
    if limits and limits[0].share >= 0.5:
        return f"{limits[0].name} limits the step: {limits[0].share:.0%} of it"
    computing = sum(part.seconds for part in profile.phases if part.name in ("forward", "backward"))
    return f"the model limits the step: forward and backward are {computing / profile.step_s:.0%}"


def _shares(profile: ScriptProfile) -> Iterator[tuple[str, float]]:
    for part in profile.phases:
        if part.name in _CHANGES:
            yield part.name, part.seconds / profile.step_s
    on_the_wire = sum(part.seconds for part in profile.communication)
    yield "communication", min(1.0, on_the_wire / profile.step_s)
    if profile.busy is not None:
        yield "waiting for the host", 1 - profile.busy
