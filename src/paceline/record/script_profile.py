"""Where the time of a script's steps went: `profile.json` in its run's folder."""

from pathlib import Path

import msgspec

from paceline.record.lines import read_json

VARIABLE = "PACELINE_PROFILE"
"""Names the file, in the environment of the process that is profiled."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One phase, collective or operator, per step."""

    name: str
    seconds: float
    """On the host; of collectives on the wire, also while others compute."""

    device_s: float | None = None
    """Seconds of kernels that it started, where there is an accelerator."""

    calls: float | None = None


class ScriptProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Means over a few steps of rank 0."""

    steps: int
    """How many were measured; 0 where the script did too few."""

    after: int
    """Steps before them, which warm up."""

    step_s: float = 0.0
    phases: list[Part] = []
    """Data, forward, backward, optimizer, everything else: together the step."""

    communication: list[Part] = []
    """Collectives; they overlap with the phases."""

    busy: float | None = None
    """Share of the steps in which an accelerator computed; None where there is none."""

    peak_bytes: int | None = None
    """Memory at the fullest moment so far: of the accelerator, or of the process."""

    operators: list[Part] = []
    """Those with the most time of their own."""


def read_profile(run: Path) -> ScriptProfile | None:
    """The profile in a run's folder; None where there is none that this version reads."""
    return read_json(run / "profile.json", ScriptProfile)
