"""What is asked: every field of the job file, with the text that is its help everywhere.

These are frozen dataclasses; pydantic checks them as they are read (see `load.py`). Sections with
much to say have modules of their own. Rules that need the model's or the cluster's numbers live
further down the flow, in `parallel/`.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from paceline.choices import ContextKind, Objective, Offload, Recompute, Schedule, Sharding
from paceline.job.alerts import AlertsSpec
from paceline.job.cloud import CloudSpec
from paceline.job.cluster import ClusterSpec
from paceline.job.data import DataSpec, SourceSpec
from paceline.job.engine import version_text
from paceline.job.evaluate import EvaluateSpec
from paceline.job.kubernetes import KubernetesSpec
from paceline.job.length import Length
from paceline.job.metrics import MetricsSpec
from paceline.job.model import MODEL_WAYS, DecoderSpec, ModelSpec
from paceline.job.places import RaySpec, SlurmSpec, SshSpec
from paceline.job.recovery import CheckpointSpec, DrillSpec, RecoverySpec
from paceline.job.section import Auto, Number, Positive, Seconds, section
from paceline.job.train import TrainSpec
from paceline.job.yaml_text import Place, overrides_in, where_in

__all__ = [
    "MODEL_WAYS",
    "CheckpointSpec",
    "ClusterSpec",
    "DataSpec",
    "DecoderSpec",
    "DrillSpec",
    "Job",
    "JobSpec",
    "LayoutSpec",
    "ModelSpec",
    "PlanSpec",
    "RecoverySpec",
    "SourceSpec",
]


@section
class LayoutSpec:
    """What you want fixed. Everything left at `auto` is decided, and the reason printed."""

    data: Positive | Auto = "auto"
    """Ranks that hold the same part of the model and read different samples."""

    sharding: Literal["auto", Sharding] = "auto"
    """What the data ranks share. `none`: nothing, each holds its part whole (DDP). `zero1`:
    optimizer state. `zero2`: also gradients. `full`: also parameters (FSDP2, ZeRO-3). `hybrid`: as
    `full` inside groups of `shard` ranks, whole copies between the groups (HSDP)."""

    shard: Positive | Auto = "auto"
    """Only with `hybrid`: ranks that share one copy."""

    tensor: Positive | Auto = "auto"
    """Ranks that share one layer's matrices. Decided, it stays inside one node or rack."""

    sequence_parallel: bool | Auto = "auto"
    """Whether norms and dropout are split over the tensor ranks as well. `auto` is yes, which
    costs nothing and saves memory."""

    pipeline: Positive | Auto = "auto"
    """Groups of ranks (stages) that hold consecutive blocks."""

    schedule: Literal["auto", Schedule] = "auto"
    """Order of the micro-batches in a pipeline."""

    chunks: Positive | Auto = "auto"
    """Only with `interleaved` and `zero-bubble`: parts of the model that each stage holds, not next
    to each other. Zero-bubble with 2 is ZB-V."""

    context: Positive | Auto = "auto"
    """Ranks that share the tokens of one sample."""

    context_kind: Literal["auto", ContextKind] = "auto"
    """`ring`: keys and values travel round. `ulysses`: tokens are exchanged for heads."""

    expert: Positive | Auto = "auto"
    """Ranks that share the routed experts; they are among the data and context ranks."""

    micro_batch: Positive | Auto = "auto"
    """Samples one rank computes at once. micro_batch x accumulation x data = global batch."""

    recompute: Literal["auto", Recompute] = "auto"
    """What is computed again in the backward pass instead of kept: nothing, what is cheap, or whole
    blocks."""

    recompute_every: Positive | Auto = "auto"
    """Only with `full`: every how many blocks one is recomputed. `auto` is every block where
    `recompute` is set to `full`, and planned where that is left open."""

    offload: Literal["auto", Offload] = "auto"
    """Where optimizer state is kept: on the accelerator, in the host's memory, or on its disk.
    `auto` leaves the accelerator where nothing fits there, or where that is faster."""

    offload_parameters: bool | Auto = "auto"
    """Whether parameters and gradients are offloaded with the optimizer state; `true` asks for that
    as well. `auto` is as the engine does it: DeepSpeed can do either (ZeRO-3), FSDP moves all
    three, always."""

    offload_path: str | None = None
    """Only with `nvme`: folder on each node's own disk, for engines that are told one."""


@section
class PlanSpec:
    """What the best layout is, and what a plan must keep to."""

    objective: Objective = "time"
    """`time`: the shortest run on all of the cluster. `cost`: the fewest dollars; fewer ranks are
    tried as well. `ranks`: the fewest accelerators that fit and keep the deadline."""

    head_room: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    """Share of the usable memory that is left free, for fragmentation and an estimate's error."""

    budget: Annotated[Number, Field(gt=0)] | None = None
    """Dollars that the run may cost."""

    deadline: Seconds | None = None
    """How long the run may take, failures included: `3d`."""

    provider: str | None = None
    """Whose prices count. Left out, the cheapest provider's."""

    spot: bool = False
    """Whether accelerators that may be taken away are rented, at their lower price."""

    simpler_margin: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """A simpler layout is taken when it is at most this share slower than the fastest."""

    max_ranks: Positive | None = None
    """With `ranks` and `cost`: the most accelerators to try. Left out, the cluster's."""


@section
class JobSpec:
    """One training job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "job"
    """Name of the job: letters, digits, `.`, `_` and `-`. Run folders start with it."""

    model: ModelSpec
    """What to train."""

    train: TrainSpec
    """How to train."""

    data: DataSpec = Field(default_factory=DataSpec)
    """What to train on."""

    cluster: ClusterSpec = Field(default_factory=ClusterSpec)
    """Where to train."""

    layout: LayoutSpec = Field(default_factory=LayoutSpec)
    """What you want fixed about how the work is split."""

    plan: PlanSpec = Field(default_factory=PlanSpec)
    """What the best layout is, and what a plan must keep to."""

    engine: str = "paceline"
    """Software that runs the steps; it decides what is kept in memory and what is hidden. One that
    the catalog knows, with a version or without: `torchtitan 0.2.2`, `megatron core_v0.16.1`.
    `paceline run` runs `paceline`, and starts `accelerate`, `deepspeed`, `megatron`,
    `megatron-bridge` and `torchtitan` (`paceline explain places`)."""

    engine_version: Annotated[str, BeforeValidator(version_text)] = ""
    """The engine's version, in quotes, where it is not written behind its name. Left out, the plan
    is for the release that it names."""

    engine_path: str | None = None
    """Where the engine's own program is on the machines: for `megatron` an absolute path to a
    checkout of Megatron-LM. The other engines are installed packages."""

    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """When checkpoints are written and which are kept."""

    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec)
    """Held-out evaluation."""

    recovery: RecoverySpec = Field(default_factory=RecoverySpec)
    """What happens when a worker or a node dies."""

    drill: DrillSpec = Field(default_factory=DrillSpec)
    """Faults to inject, to see the recovery work."""

    metrics: MetricsSpec = Field(default_factory=MetricsSpec)
    """Where metrics go besides the run folder."""

    alerts: AlertsSpec = Field(default_factory=AlertsSpec)
    """Rules on the run's numbers, and who is sent a message."""

    ssh: SshSpec = Field(default_factory=SshSpec)
    """How to reach the hosts, for `paceline run --on ssh`."""

    slurm: SlurmSpec = Field(default_factory=SlurmSpec)
    """What to ask Slurm for, with `paceline run --on slurm`."""

    cloud: CloudSpec = Field(default_factory=CloudSpec)
    """When a rented machine stops, and what it may cost."""

    ray: RaySpec = Field(default_factory=RaySpec)
    """Which Ray cluster, for `paceline run --on ray`."""

    kubernetes: KubernetesSpec = Field(default_factory=KubernetesSpec)
    """Image, resources and volumes, where the job goes to Kubernetes."""

    program: str | None = None
    """Your own training function, `module:function`, imported from the job's folder and called
    with a `paceline.runtime.Session`. Left out, the built-in language-model trainer runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job file as it was read: what is asked, and where it came from."""

    spec: JobSpec
    """What is asked."""

    folder: Path
    """Absolute folder that relative paths and `module:function` names start from."""

    source: str
    """The file's name as the reader gave it, for messages."""

    lines: Mapping[Place, int]
    """Line of each key, counted from 1, for messages; 0 for what `--set` gave."""

    length: Length | None = None
    """What `train.steps` was made of; None where the job gives it."""

    @property
    def words(self) -> str:
        """The job as words of a command: `job.yaml --set train.steps=9`."""
        sets = (word for each in overrides_in(self.lines) for word in ("--set", each))
        return shlex.join([self.source, *sets])

    def where(self, field: str) -> str:
        """The place of a dotted field for a message: `train.global_batch, job.yaml line 7`."""
        return where_in(self.lines, self.source)(tuple(field.split(".")))
