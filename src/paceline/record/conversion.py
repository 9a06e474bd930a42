"""What is asked of a conversion of checkpoints, and what came of it: both as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import Problem

Form = Literal["paceline", "safetensors", "torch", "gguf"]
"""`gguf` is read only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What a job asked of its adapters."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    model_type: str
    """Of the model in transformers."""

    base: str | None
    """Name of the weights that they were trained beside; None for drawn ones."""

    weights: tuple[str, ...] = ()
    """Those weights' safetensors files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion. Paths are absolute."""

    source: str
    """A checkpoint folder of ours, verified; or a folder or file of safetensors."""

    out: str
    """A folder; for `torch` a file."""

    source_form: Form
    form: Form

    max_shard_bytes: int = 5 * 10**9
    """Size of a safetensors file at most; a larger tensor has a file of its own."""

    ranks: int = 1
    """Files of a checkpoint of ours."""

    step: int = 0
    """Of a checkpoint made from safetensors."""

    config: Mapping[str, Any] | None = None
    """config.json of the model, where it is known."""

    adapters: AdapterFacts | None = None
    """Where the checkpoint is of adapters."""

    merge: bool = False
    """Whether adapters are added to the weights that they were trained beside."""

    beside: tuple[str, ...] = ()
    """Files that go beside safetensors: the tokenizer's, and the settings of generation."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the manifest of a checkpoint that is written anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written, and the proof that it is the same."""

    files: tuple[str, ...] = ()
    num_bytes: int = 0
    tensors: int = 0

    before: str = ""
    """Digest of what was converted, read from the source."""

    after: str = ""
    """The same digest, read from what was written."""

    notes: tuple[str, ...] = ()
    """What was left out, renamed or not known."""

    problem: Problem | None = None
    """Why nothing was written."""
