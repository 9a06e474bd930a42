"""What is asked of a conversion of checkpoints, and what came of it; the same of the comparison of
an exported model with the run's own. All as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import Problem

Form = Literal[
    "paceline", "safetensors", "torch", "gguf", "dcp", "adapter", "deepspeed", "megatron"
]
"""`megatron` and `gguf` are read only; `adapter` is a folder of peft."""

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What a job asked of its adapters."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    model_type: str
    base: str | None
    """Name of the weights that they were trained beside; None for drawn ones."""

    weights: tuple[str, ...] = ()
    """Their files; empty where the run drew them."""

    run: str = ""
    """Folder of the run that drew them, and can again; empty where there are files."""

    quantised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion. Paths are absolute."""

    source: str
    """A checkpoint folder of ours, verified; or a folder or file of another program."""

    out: str
    """A folder; for `torch` a file."""

    key: str | None = None
    """Where in files of torch the weights are; None finds it."""

    source_form: Form
    form: Form

    max_shard_bytes: int = 5 * 10**9
    ranks: int = 1
    """Files of a checkpoint of ours."""

    step: int = 0
    config: Mapping[str, Any] | None = None
    """config.json of the model, where it is known."""

    adapters: AdapterFacts | None = None
    merge: bool = False
    """Whether adapters are added to the weights that they were trained beside."""

    dtype: DType | None = None
    """Only for safetensors: the type of floating values; None keeps the source's."""

    beside: tuple[str, ...] = ()
    """Files that go beside safetensors: the tokenizer's, and the settings of generation."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the manifest of a checkpoint that is written anew."""

    weights_only: bool = False
    """Whether optimizer state is left out, which is carried along otherwise, or refused."""

    optimizer_elsewhere: bool = False
    """Whether the source has optimizer state in files that no reader of ours takes."""

    allow_nonfinite: bool = False
    """Whether tensors with NaN or infinite values are written; they are refused otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written, and the proof that it is the same."""

    files: tuple[str, ...] = ()
    num_bytes: int = 0
    tensors: int = 0
    before: str = ""
    """Digest of what was converted, read from the source."""

    after: str = ""
    """The digest of what was written, read back."""

    weights: str = ""
    """Digest of the types, shapes and bytes of the written tensors without the optimizer's: names
    and copies of one tensor do not change it."""

    notes: tuple[str, ...] = ()
    """What was left out, renamed or not known."""

    problem: Problem | None = None
    """Why nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is to be seen of another program's checkpoint."""

    path: str
    form: Form
    key: str | None = None
    scan: bool = False
    """Whether every value is read, and compared with what is known of the model."""

    config: Mapping[str, Any] | None = None
    """config.json beside it; of an adapter's base."""

    tokenizer: str | None = None
    optimizers: tuple[str, ...] = ()
    """Files of torch that have optimizer state alone; their values are read too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    """As torch names it: `bfloat16`."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a checkpoint holds."""

    tensors: tuple[HeldTensor, ...] = ()
    optimizer: str = ""
    """What its optimizer state is, as far as it is read; empty where there is none."""

    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    """config.json of the model; where there is none, what the checkpoint itself tells."""

    checked: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """What was not checked, with the reason."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    """What is to be known of a checkpoint that is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compare the logits of an exported folder with those of the run's own model."""

    run: str
    checkpoint: str
    folder: str
    base: str | None = None
    """Only for adapters: the folder of the weights that they were trained beside."""

    dtype: DType | None = None
    """Only for whole models: the type that the run's weights were rounded to."""

    tolerance: float
    """The largest difference that passes, as a share of the largest logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsCheck:
    """What came of it."""

    samples: int = 0
    """Compared; 0 where the check was not made."""

    kind: str = ""
    """What the samples are: `held-out`, `training` or `random tokens`."""

    positions: int = 0
    """Logits were compared at so many places of a sample, its last ones."""

    largest_difference: float | None = None
    """Between the run's model and the exported one, as transformers computes it, in float32; the
    run's weights rounded as the exported ones are."""

    largest_logit: float | None = None
    largest_rounding: float | None = None
    """What rounding the weights to `dtype` alone changes; None where they were not rounded."""

    same_choice: float | None = None
    """Share of places where both models give the highest logit to the same token."""

    versions: Mapping[str, str] = field(default_factory=dict)
    not_made: str = ""
    """Why the check was not made."""

    problem: Problem | None = None
    """Why the folder is not the run's model."""
