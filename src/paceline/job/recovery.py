"""Sections `checkpoint`, `recovery` and `drill` of the job file: what is kept, what happens when
something dies, and what is broken on purpose."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from paceline.choices import BatchPolicy
from paceline.job.fault_grammar import expand, parse_fault
from paceline.job.section import Auto, Positive, Wait, Whole, section


def _check_url(value: str) -> str:
    names, separator, place = value.partition("://")
    if not separator or not names or not place.strip("/"):
        raise ValueError("this names no place in a storage; a folder is file:///mnt/copies")
    for protocol in names.split("::"):  # fsspec chains them: simplecache::s3://
        if protocol not in (_storages() or (protocol,)):
            raise ValueError(f"fsspec knows no storage {protocol}://")
    return value


def _storages() -> list[str]:
    try:
        import fsspec
    except ImportError:  # not needed to plan; the run says that it is missing
        return []
    return list(fsspec.available_protocols())


Url = Annotated[
    str,
    AfterValidator(_check_url),
    WithJsonSchema({"type": "string", "examples": ["s3://bucket/prefix"]}),
]


@section
class CheckpointSpec:
    """When checkpoints are written and which are kept. The newest valid one is always kept."""

    every: Positive | Auto = "auto"
    """Steps between checkpoints. `auto` is a tenth of the run, 500 at most; on a
    declared cluster another number, where that leaves more time for training."""

    keep_last: Positive = 3
    """How many of the newest are kept."""

    keep_every: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this."""

    keep_best: Whole = 0
    """Also keep this many with the lowest evaluation loss."""

    copy_to: Url | None = None
    """Another storage that each checkpoint is copied to in the background, as a URL of fsspec:
    `s3://bucket/prefix`, `file:///mnt/nas/jobs`; below it the run's folder has its name. A run that
    has no checkpoint of its own any more resumes from its newest copy. Needs the extra
    `storage`."""

    copy_keep: Positive = 3
    """How many of the newest copies are kept there."""

    compress: Literal["auto", "never", "always"] = "auto"
    """Whether copies are compressed, without loss. `auto` tries it at the first copy and compresses
    where that is faster than sending all; what was measured is noted. Local files never are."""


@section
class RecoverySpec:
    """What happens when a worker or a node dies."""

    max_restarts: Whole = 3
    """Restarts in a row without progress before the run gives up. A restart makes progress when the
    run finishes a step after it and does not fail at the same step again; one that lost finished
    steps when it began later, or failed later, than all of those before. The last one, from the
    second on, ends every process and resumes from a checkpoint, unless the processes that live hold
    a whole state."""

    on_oom: Literal["stop", "refit"] = "stop"
    """What to do when a rank runs out of memory. `stop`: it restarts like any other lost rank; when
    that does not help, the run stops and names the setting that needs less memory. `refit`: the run
    changes its layout at once and resumes from the newest checkpoint, at the same global batch: a
    smaller micro-batch with more accumulation, then recompute, more sharding, offload. From then on
    it equals an undisturbed run to rounding."""

    poison: Literal["stop", "skip"] = "stop"
    """What to do with a batch that two processes raised the same exception at. `stop` the run and
    name its samples, or `skip` its step: no rank applies it, and the record says so."""

    node_strikes: Positive = 3
    """Failures of a node, such as kills and hangs, after which the ranks that it loses
    go to other nodes."""

    strike_window: Wait = 3600.0
    """How long a failure of a node counts: `1h`."""

    shrink: bool = True
    """Whether the run goes on with fewer ranks when one cannot be filled, and grows back when the
    node returns. What happens to the global batch, `batch` says."""

    batch: BatchPolicy = "keep"
    """What happens to the global batch while there are fewer ranks. `keep`: it stays, and ranks do
    more micro-batches each; from then on the run equals an undisturbed one to rounding and no
    longer to the bit. `shrink`: each rank keeps its micro-batches, the global batch shrinks with
    the number of data ranks, and the learning rate follows it: linearly for SGD, with the square
    root for the other optimizers. Every sample still comes once an epoch, but the run reads fewer
    of them in its steps, and ends otherwise than an undisturbed one."""

    replace_timeout: Wait = 60.0
    """How long a lost rank may stay empty, for its node to return or a spare to get ready, before
    the run shrinks."""

    spares: Annotated[Whole, Field(le=1024)] | Auto = "auto"
    """Warm spares: processes that have imported everything, hold no numbers of the model, and wait
    to take a lost rank's place. `auto` is one, or none on a single rank. Each takes the memory of
    one more process that has imported torch."""

    grace: Wait = 60.0
    """How long workers may take to reach a step boundary and save when asked to stop."""

    state: Literal["auto", "replica", "memory", "checkpoint"] = "auto"
    """Where a lost rank's state is kept besides the newest checkpoint. `replica`: on ranks that
    hold the same, which is free where the layout has whole copies. `memory`: snapshots in
    host memory, on the own node and on a peer. `checkpoint`: nowhere else. `auto` is what `paceline
    plan` expects the most useful time of."""

    fingerprint_every: Whole | Auto = "auto"
    """Steps between two comparisons of all ranks' parameters and optimizer state, bit by bit; 0 is
    never. They are also compared before every checkpoint and at the end. `auto` is as often as
    costs at most 0.3 % of the time, as measured in the first steps."""

    final_digest: bool = True
    """Whether the run ends with a SHA-256 of all parameters and optimizer state. It takes about the
    state's bytes over 1.7 GB/s for each core that hashes (measured, AMD EPYC), shared among
    the ranks that split the state. Without it, `paceline drill` and a comparison of two runs cannot
    say whether they ended alike, and ranks that ended with different parameters are found by
    fingerprints alone."""

    snapshot_every: Whole | Auto = "auto"
    """Steps between two copies of every rank's state in its node's memory, `/dev/shm`, where the
    newest two are kept; 0 is never. `auto` is what the plan expects where `state` is `memory`, and
    0 elsewhere."""

    snapshot_peers: bool = True
    """Whether each copy is also sent to another node's memory."""

    patience: Wait = 10.0
    """A worker is never called stuck before it has stood still for this long, or half as long when
    the kernel says that it is stopped. Beyond, what counts is how long the same phase took before:
    see `docs/concepts/detection.md`."""

    collective_timeout: Annotated[Wait, Field(ge=10)] = 1800.0
    """How long one operation between accelerators may take, waiting for other ranks included,
    before all ranks leave their groups and repeat the step with new ones. As long as a rank may
    compile or save while others wait for it (`patience`, which finds a rank that hangs long
    before); torch's default for NCCL is 600. What ranks agree on over gloo, such as a restore, has
    two hours."""

    heartbeat: Wait = 5.0
    """A node whose agent is silent for this long, and does not answer when asked another way, is
    lost."""

    lease: Wait = 30.0
    """How long training goes on while no controller is there. After that the agents ask their
    workers to stop at a step boundary and save."""

    evict_stragglers: bool = False
    """Replace a rank that is named as slower than its peers, when there is a warm spare and the
    rest of the run gains more than the replacement costs. Otherwise it is only named."""


def _check_fault(text: str) -> str:
    parse_fault(text)
    return text


FaultText = Annotated[
    str,
    AfterValidator(_check_fault),
    WithJsonSchema({"type": "string", "examples": ["kill rank=1 step=150 phase=backward"]}),
]


@section
class DrillSpec:
    """Faults to inject, to see the recovery work. Each fires once. `paceline drill` runs the job
    with and without them and compares."""

    faults: list[FaultText] = Field(default_factory=list)
    """What, who and when: `kill rank=1 step=150`, in the backward pass of that step, or
    `stop rank=0 step=20 phase=vote`. `paceline drill --list` shows every kind."""

    kill: list[FaultText] = Field(default_factory=list)
    """Shorthand of `faults` for SIGKILL: `rank=1@step=150`, or with the moment:
    `rank=1@step=150@forward`, `backward`, `apply` (the optimizer step) or `save` (while the
    checkpoint of that step is written)."""

    digest_every: Whole = 0
    """Steps between SHA-256 digests of the whole state, which go into `metrics.jsonl`; 0 is none.
    Each takes as long as hashing all of the state."""

    @property
    def all_faults(self) -> tuple[str, ...]:
        """One text for each time that something is to happen, in the order written."""
        return expand([*self.kill, *self.faults])
