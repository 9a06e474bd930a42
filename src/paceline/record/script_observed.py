"""What was seen of a script's training steps: `observed-RANK.json` in its run's folder."""

from pathlib import Path

import msgspec

from paceline.record.lines import read_json


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was done once or several times, and what was wrong with it."""

    name: str = ""
    count: int = 0
    """Tensors that were compared, or passes through the model."""

    num_bytes: int = 0
    seconds: float = 0.0
    problem: str | None = None


class StepSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the script's first optimizer."""

    seconds: float
    """Since the step before; the first step's since its first forward pass."""

    losses: list[float | None]
    """Scalars that `backward()` was given since the step before; None for NaN and infinity."""

    grad_norm: float | None
    """Over all parameters of the optimizers; None for NaN and infinity."""

    memory_bytes: int | None


class Observed(msgspec.Struct, kw_only=True):
    """One rank's training, as far as it came."""

    first_forward_at: float | None = None
    models: list[str] = []
    """Classes of the outermost modules that hold what the optimizers train."""

    num_optimizers: int = 0
    """Those that did a step."""

    num_idle: int = 0
    """Those that did none, and hold tensors that no other trains."""

    parameters: int = 0
    """What they train."""

    steps: list[StepSeen] = []
    num_batches: int = 0
    """Batches that DataLoaders gave."""

    num_different: int = 0
    has_one_batch: bool = False
    """Whether an epoch gave one and the same batch again and again."""

    data_s: float = 0.0
    """Time that the script waited for them."""

    tokens: int | None = None
    text: str | None = None
    """The first sample of the first batch, by the tokenizer of the script's process."""

    validation: Act | None = None
    """Passes through the model without gradients."""

    saves: list[Act] = []
    """Files that `torch.save` and safetensors wrote, read back and compared."""

    reload: Act | None = None
    """The state of models and optimizers, saved, loaded into them again and compared."""

    inference: Act | None = None
    """Each model in eval mode on its last batch, twice."""

    trained: int = 0
    """Tensors that the optimizers hold and train."""

    unchanged: list[str] | None = None
    """Those with the same bytes before the first step and after the last."""

    no_gradient: list[str] = []
    """Those whose gradient was None in every step."""

    digest: str | None = None
    """Digest of all trained tensors, where this rank holds them whole."""

    backend: str | None = None
    """Backend of the process group that the script joined."""

    troubles: list[str] = []
    """What could not be observed, and why."""


def observed_file(run: Path, rank: int) -> Path:
    """Where a rank's observations are kept."""
    return run / f"observed-{rank}.json"


def read_observed(path: Path) -> Observed:
    """What a rank has kept; nothing seen where there is no such file."""
    return read_json(path, Observed) or Observed()
