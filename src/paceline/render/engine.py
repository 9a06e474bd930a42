"""What an engine module gives: files, and what they cannot express."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import PlanError
from paceline.job import Job
from paceline.plan import Plan

Files = Mapping[str, str]
"""Path inside the folder that is written -> the whole text. A text that begins with `#!` is made
executable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One part of a plan that an engine cannot express."""

    what: str
    """The part, in the plan's own words and numbers: `ZeRO-2 gradients`."""

    why: str
    """The reason, with the version that it holds for."""

    nearest: str | None
    """What the files say instead; None where nothing comes near, and then there are no files."""

    fix: str = ""
    """What to set in the job so that nothing is lost; empty where another engine is the answer."""

    engines: tuple[str, ...] = ()
    """Engines that have it: those that plan the job are named before `fix`."""

    where: str
    """Key of the job file that asks for it, shown with a refusal: `layout.sharding`."""

    @property
    def line(self) -> str:
        """What a note has of it: what is left out, what stands instead, and the fix."""
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"left out: {self.what}; instead: {self.nearest}{fix}"


ANY_MODEL = ("accelerate", "deepspeed")
"""Engines whose files start your own program with any model: what to take where an engine's
files describe models of some families alone."""


class RenderError(PlanError):
    """An engine cannot express the plan. Ends with exit code 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One row of the table of engines."""

    title: str
    """For people: `Hugging Face Accelerate`."""

    module: str
    """Imported only when its files are asked for. It has `render` and `gaps`."""

    validated: str
    """What the files were held against, and what was really run."""

    versions: str = ""
    """The releases the files are written for: `1.10 to 1.15`."""

    starts_engines: bool = False
    """Whether `paceline run --on` starts an engine's files there; for places whose own files start
    a program of torchrun's."""


class EngineModule(Protocol):
    """What every engine's module has."""

    CARRIES: Collection[str]
    """Keys and sections of the job file that the files say, beside those that make the plan. Every
    other setting that a job asks for becomes a gap (`render/carried.py`)."""

    render: Callable[[Plan, Job], Files]
    """The files of a plan without a gap that has no `nearest`."""

    gaps: Callable[[Plan, Job], Iterable[Gap]]
    """Everything of the plan that the files do not say; nothing is dropped in silence. Settings
    that `CARRIES` lacks need no gap here, unless there is more to say of them.

    Where the files describe some models alone, the module has `model_gaps` besides: of a profile, a
    decoder and a config.json, what no layout would change."""
