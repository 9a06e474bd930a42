"""What adapting a script gives back: the new text, what was done, what is left to a person."""

from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
    """The distributed form that is asked for."""

    DDP = "ddp"
    """Every rank holds the whole model: `torch.nn.parallel.DistributedDataParallel`."""

    FSDP2 = "fsdp2"
    """Parameters, gradients and optimizer state are split: `fully_shard`."""

    ACCELERATE = "accelerate"
    """Hugging Face Accelerate owns model, optimizer and loader."""

    PACELINE = "paceline"
    """A program that `paceline run` starts, watches and starts again: as DDP, and a job file."""


@dataclass(frozen=True, slots=True, order=True)
class Done:
    """One change."""

    line: int
    """Line of the original script, from 1."""

    what: str


@dataclass(frozen=True, slots=True, order=True)
class Left:
    """One thing that was not changed because it could only have been guessed."""

    line: int
    """Line of the original script, from 1."""

    what: str
    """What stands there."""

    why: str
    """Why it is left, and what to do by hand."""


class Refusal(Exception):
    """The script cannot be adapted at all; nothing of it is changed."""

    def __init__(self, *left: Left) -> None:
        self.left = left
        super().__init__("; ".join(f"line {each.line}: {each.what}" for each in left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A script in its distributed form."""

    text: str
    """The whole new text; the original where `refused` or nothing had to change."""

    done: tuple[Done, ...] = ()
    left: tuple[Left, ...] = ()

    already: bool = False
    """The script has this form, written by an earlier call: nothing was changed."""

    refused: bool = False
    """Nothing was changed; `left` says why."""

    job_file: str | None = None
    """For Target.PACELINE: the text of the job file beside the script."""

    start: str = ""
    """The command that starts it, in its folder; empty where nothing was adapted."""
