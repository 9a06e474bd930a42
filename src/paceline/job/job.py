"""What is asked: every field of the job file, with the text that is its help everywhere.

These are frozen dataclasses; pydantic checks them as they are read (see `load.py`). Rules that
need the model's or the cluster's numbers live further down the flow, in `parallel/`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import ArgsKwargs

from paceline.choices import (
    BatchPolicy,
    ContextKind,
    NetworkKind,
    Objective,
    Offload,
    Recompute,
    Schedule,
    Sharding,
)
from paceline.job.alerts import AlertsSpec
from paceline.job.cloud import CloudSpec
from paceline.job.engine import version_text
from paceline.job.evaluate import EvaluateSpec
from paceline.job.faults import expand, parse_fault
from paceline.job.kubernetes import KubernetesSpec
from paceline.job.metrics import MetricsSpec
from paceline.job.places import RaySpec, SlurmSpec, SshSpec
from paceline.job.section import (
    Auto,
    Bytes,
    Count,
    NetworkRate,
    Number,
    Positive,
    Seconds,
    Wait,
    Whole,
    kind_of_network,
    section,
)
from paceline.job.train import TrainSpec


def _named(value: object) -> object:
    """Truth values as names, which Python would count as 1 and 0."""
    return str(value).lower() if isinstance(value, bool) else value


def _check_url(value: str) -> str:
    names, separator, place = value.partition("://")
    if not separator or not names or not place.strip("/"):
        raise ValueError("this names no place in a storage")
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
class DecoderSpec:
    """The built-in decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    layers: Positive
    """Decoder blocks."""

    hidden: Positive
    """Width of the residual stream."""

    heads: Positive
    """Attention heads; must divide `hidden`."""

    kv_heads: Positive | Auto = "auto"
    """Key and value heads; must divide `heads`. `auto` is one for each head."""

    ffn: Positive | Auto = "auto"
    """Width of the feed-forward layer. `auto` is 8/3 of `hidden`, up to a multiple of 32."""

    vocab: Positive = 256
    """Size of the vocabulary. 256 is one entry a byte, which needs no tokenizer."""

    tied_embeddings: bool = False
    """Whether the output layer reuses the input embedding."""


MODEL_WAYS = ("decoder", "preset", "hf_config", "size", "factory", "pretrained")
"""Fields of `model` of which a job gives one."""


@section
class ModelSpec:
    """What to train. Exactly one of `decoder`, `preset`, `hf_config`, `size`, `factory` and
    `pretrained`."""

    decoder: DecoderSpec | None = None
    """The built-in decoder, by its sizes."""

    preset: str | None = None
    """A published model by name, such as `llama-3-8b`; `paceline catalog models` lists them."""

    hf_config: str | None = None
    """Path to a Hugging Face `config.json`, or a published model by name. Thirty families are
    planned for; the built-in trainer runs those that predict the next token
    (docs/guides/models.md)."""

    size: Count | None = None
    """Parameters alone, such as `7B`: a Llama-like decoder between published ones."""

    factory: str | None = None
    """Your own `module:function` that returns an `nn.Module`, imported from the job's folder."""

    pretrained: str | None = None
    """Trained weights to start from: a folder with safetensors files and a `config.json`, relative
    to the job file, or the name of a model in this machine's Hugging Face cache."""

    revision: str | None = None
    """Branch, tag or commit of `pretrained` in the Hugging Face cache. Left out, `main`."""

    weights: Literal["drawn"] | None = None
    """`drawn` trains from random weights although trained ones lie beside the config. Left out, it
    is an error when weights lie beside `hf_config`, and `pretrained` loads its own."""

    tokenizer: str = "auto"
    """Text to token numbers: a folder with a `tokenizer.json`, or that file, relative to the job
    file. `bytes` is one token a byte. `auto` is that of `pretrained`, and `bytes` without one."""

    chat_template: str = "auto"
    """A `.jinja` file that writes conversations as text. `auto` is the tokenizer's own."""


Share = Annotated[Number, Field(ge=0, lt=1)]


@section
class SourceSpec:
    """Files that are read together, and their share of what is trained on."""

    path: str | list[str]
    """Glob, folder or list of them, relative to the job file, or a URL of fsspec:
    `s3://bucket/chats/*.jsonl`."""

    weight: Annotated[Number, Field(gt=0)] | None = None
    """Share of the samples, beside the other sources' weights. Left out everywhere: by size."""

    name: str | None = None
    """Name on screens and in the record. Left out, it is made from `path`."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of a row is what, where the names differ: `{text: content}`. What there can be:
    text, messages, conversations, prompt, completion, instruction, input, output, history,
    system, tools, tokens, chosen, rejected, label."""


Kind = Literal["auto", "text", "chat", "completion", "preference", "classification", "tokens"]


@section
class DataSpec:
    """What to train on: text, conversations or tokens."""

    path: str | list[str] | None = None
    """Glob, folder or list of them, relative to the job file: `corpus/**/*.txt`. Without a
    tokenizer these files are read as bytes. With `engine: megatron` or `megatron-bridge`, prefixes
    of token files as its tools/preprocess_data.py writes them (PREFIX.bin, PREFIX.idx); with
    `torchtitan`, one folder of rows (JSON, Parquet) with a column `text`."""

    corpus: Literal["python-stdlib", "mock"] | None = None
    """`python-stdlib`: a corpus every Python has, the source of its own standard library (about
    30 MB). `mock`: samples that Megatron makes up, to try a plan's speed; other engines refuse
    it."""

    sources: list[SourceSpec] | None = None
    """In place of `path`: several sources, with weights. Rows are read from jsonl, json, csv,
    parquet and arrow files, also compressed (gz, zst); of any other file the whole text is one
    document."""

    kind: Kind = "auto"
    """What a row is. `text`: a document. `chat`: a conversation. `completion`: a prompt, and what
    follows it. `preference`: a prompt with a chosen and a rejected answer, which are one sample.
    `classification`: a text and its label, one of `labels`.
    `tokens`: tokenized already (nanoGPT's .bin, Megatron's .bin with .idx, a column). `auto` looks
    at the columns, and never takes pairs by itself."""

    labels: list[Annotated[str | int, BeforeValidator(_named)]] | None = None
    """Only with `kind: classification`: the classes, in the order of their numbers. Rows name them,
    or give the number; true and false are names too."""

    seq_len: Annotated[Positive, Field(gt=1)] = 256
    """Tokens in one sample."""

    pack: Literal["auto", "windows", "documents"] = "auto"
    """How documents become samples. `windows`: joined, and cut every `seq_len` tokens.
    `documents`: whole documents packed together, which do not see each other. `auto` is documents
    for conversations and completions, else windows. Of preferences a sample is always a pair."""

    too_long: Literal["refuse", "drop", "cut", "split"] = "refuse"
    """Only with documents: what happens to one that is longer than a sample. `refuse` the job,
    `drop` the document, `cut` its end off, or `split` it into several (text only)."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Only with conversations and completions: which tokens count in the loss. `assistant`: all
    of its turns, and of a completion all but the prompt. `last`: the last turn. `all`: every
    token."""

    held_out: Share = 0.05
    """Share kept for evaluation. Without a tokenizer, of the files, chosen by a hash of each file's
    name, and of a single file its end. Else of the documents, by a hash of each one's content."""

    held_out_path: str | list[str] | None = None
    """In place of `held_out`: files of their own for evaluation. Needs a tokenizer or `sources`."""

    broken_rows: Share = 0.01
    """Share of a source's rows that may be broken, or left out because they are empty, one-sided or
    hold special tokens; they are counted. More stop the preparation, with file and line."""

    cache: str | None = None
    """Folder for what is prepared. Left out, `.paceline/data` beside the job file."""


@section
class ClusterSpec:
    """Where to train. Left out, it is this machine."""

    accelerator: str | Auto = "auto"
    """An accelerator from the catalog, such as `H100-SXM`, or `cpu`. `auto` is what this machine
    has."""

    nodes: Positive = 1
    """Machines. On this machine, each is simulated by an agent of its own."""

    per_node: Positive | Auto = "auto"
    """Ranks on each node: one for an accelerator. `auto` is every accelerator found, or one rank
    for every physical core up to 2 on a CPU."""

    memory: Bytes | Auto = "auto"
    """Memory of one accelerator (of one node, on CPU). `auto` is the catalog's or the machine's."""

    host_memory: Bytes | Auto = "auto"
    """Memory of one node's host, for what is offloaded there. `auto` is this machine's, or assumed:
    256 GiB for each accelerator, as in a DGX H100."""

    network: NetworkRate | Auto = "auto"
    """Bandwidth between nodes, for each node and direction: `8x400Gb/s InfiniBand`, `100GbE`; the
    word is `network_kind`. `auto` is the catalog's usual network for the accelerator."""

    network_kind: Literal["auto", NetworkKind] = "auto"
    """Only with `network`: what it is. `tcp` is Ethernet without RDMA; `rdma` any network with it;
    `auto` the accelerator's usual kind where the rate is one of its ports'."""

    rdma: bool | Auto = "auto"
    """Whether nodes talk by RDMA. `auto` is as usual for the accelerator's network. On Macs `true`
    is JACCL over Thunderbolt 5 (macOS 26.2); on GPUs `false` is TCP."""

    mlx_backend: Literal["auto", "ring", "mpi"] = "auto"
    """Only with MLX: what its ranks talk through. `ring` is TCP sockets, `mpi` Open MPI, which is
    installed on every machine and reaches the others by ssh; both are without RDMA. `auto` is JACCL
    where there is RDMA (`rdma`), else `ring`."""

    topology: str | None = None
    """A file with what `nvidia-smi topo -m` prints on a node, or a recording of `paceline preflight
    --record`, relative to the job file: the links inside a node are then as it shows them. Left
    out, this machine is asked, and another cluster's are the catalog's."""

    catalog: str | None = None
    """A catalog file of your own, relative to the job file: hardware, links and prices that the
    built-in one lacks or has otherwise. Left out, `paceline-catalog.toml` beside the job file is
    read if it is there."""

    rendezvous_port: Annotated[int, Field(gt=0, lt=65536)] | Auto = "auto"
    """TCP port where the ranks meet. `auto` takes a free one."""

    @model_validator(mode="before")
    @staticmethod
    def _take_kind(values: Any) -> Any:
        """The word beside the rate is the kind."""
        given = values.kwargs if isinstance(values, ArgsKwargs) else values
        if not isinstance(given, Mapping):
            return values
        text, asked = given.get("network", "auto"), given.get("network_kind", "auto")
        kind = kind_of_network(text) if isinstance(text, str) else None
        if asked != "auto" and text == "auto":
            raise ValueError(
                f"network_kind goes with a rate: set cluster.network to 400Gb/s {asked}, or what "
                "it is"
            )
        if kind is None:
            return values
        if asked not in ("auto", kind):
            raise ValueError(f"network is {text!r}, and network_kind {asked!r}")
        return {**given, "network_kind": kind}


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
    """Only with `full`: every how many blocks one is recomputed."""

    offload: Literal["auto", Offload] = "auto"
    """Where optimizer state is kept: on the accelerator, in the host's memory, or on its disk.
    `auto` leaves the accelerator only when nothing fits there."""

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
class CheckpointSpec:
    """When checkpoints are written and which are kept. The newest valid one is always kept."""

    every: Positive | Auto = "auto"
    """Steps between checkpoints. `auto` is a tenth of the run, 500 at most."""

    keep_last: Positive = 3
    """How many of the newest are kept."""

    keep_every: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this."""

    keep_best: Whole = 0
    """Also keep this many with the lowest held-out loss."""

    copy_to: Url | None = None
    """Another storage that each checkpoint is copied to in the background, as a URL of fsspec:
    `s3://bucket/prefix`, `file:///mnt/nas/jobs`; below it the run's folder has its name. A run that
    has no checkpoint of its own any more goes on from its newest copy. Needs the extra
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
    """The same, for SIGKILL alone and in short: `rank=1@step=150`, or with the moment:
    `rank=1@step=150@forward`, `backward`, `apply` (the optimizer step) or `save` (while the
    checkpoint of that step is written)."""

    digest_every: Whole = 0
    """Steps between SHA-256 digests of the whole state, which go into `metrics.jsonl`; 0 is none.
    Each takes as long as hashing all of the state."""

    @property
    def all_faults(self) -> tuple[str, ...]:
        """One text for each time that something is to happen, in the order written."""
        return expand([*self.kill, *self.faults])


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
    `megatron-bridge` and `torchtitan` (docs/guides/places.md)."""

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
