"""What the job left open besides the layout, decided by stated rules; and all decisions listed."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.catalog import accelerator_named, load_accelerators
from paceline.catalog.mig import split_slice
from paceline.estimate import Case, price_one
from paceline.job import Job, JobSpec, LayoutSpec, Length
from paceline.job.fault_grammar import parse_fault
from paceline.parallel.abilities import abilities_of
from paceline.parallel.degrees import asks_for_pipeline, with_implied
from paceline.parallel.engine_laws import asked_of_all_reduce
from paceline.plan.choose import Choice
from paceline.plan.decision import Decision
from paceline.plan.loss import router_loss_of
from paceline.plan.lost_node import after_a_lost_node
from paceline.plan.reasons import reasons_of
from paceline.profile import DecoderShape, ModelProfile, left_out_of
from paceline.topology import Cluster
from paceline.units import counted, format_bytes, significant

_PARTS_OF_RUN = 10
_MAX_CHECKPOINT_EVERY = 500
"""As `checkpoint.every` says in its help. A guess: it bounds the work that a crash loses."""

_MOST_CARDS = 12
"""More cards than this that a rate was estimated from are counted, not listed."""


def decide_intervals(spec: JobSpec) -> tuple[int, int]:
    """Steps between checkpoints, and between evaluations."""
    tenth = max(1, spec.train.steps // _PARTS_OF_RUN)
    checkpoint, evaluate = spec.checkpoint.every, spec.evaluate.every
    return (
        min(tenth, _MAX_CHECKPOINT_EVERY) if checkpoint == "auto" else checkpoint,
        tenth if evaluate == "auto" else evaluate,
    )


def decisions_of(
    job: Job,
    cluster: Cluster,
    decoder: DecoderShape | None,
    profile: ModelProfile,
    choice: Choice,
) -> tuple[Decision, ...]:
    """Everything that the job left open, in the order of the job file."""
    return (
        *_model_decisions(job, decoder, profile),
        *_cluster_decisions(job, cluster),
        *_length_decision(job),
        *_precision_decision(job, choice.case),
        *_state_decision(job),
        *_layout_decisions(job, cluster, choice),
        *_interval_decisions(job.spec),
        *_balancing_decision(job, profile),
        *_left_to_program(job),
        *_on_oom(job),
        *_on_lost_node(job, cluster, choice),
        *_silent_faults(job, cluster),
    )


def _model_decisions(
    job: Job, decoder: DecoderShape | None, profile: ModelProfile
) -> Iterator[Decision]:
    spec = job.spec.model.decoder
    if spec is not None and decoder is not None:
        if spec.kv_heads == "auto":
            yield Decision(
                field="model.decoder.kv_heads",
                value=str(decoder.kv_heads),
                reason="one for each head",
            )
        if spec.ffn == "auto":
            yield Decision(
                field="model.decoder.ffn",
                value=str(decoder.ffn),
                reason=f"8/3 of hidden {spec.hidden}, rounded up to a multiple of 32",
            )
    for phrase in profile.assumed:
        yield Decision(field="model", value="assumed", reason=phrase)
    for phrase in left_out_of(job):
        yield Decision(
            field="model.hf_config",
            value=f"without {phrase}",
            reason="the built-in decoder does not do it; parameters are the same",
        )


def _cluster_decisions(job: Job, cluster: Cluster) -> Iterator[Decision]:
    spec = job.spec.cluster
    if spec.accelerator == "auto":
        yield Decision(
            field="cluster.accelerator", value=cluster.accelerator, reason="what this machine has"
        )
    yield from _unknown_card(cluster)
    if spec.per_node == "auto":
        reason = f"usual for {cluster.accelerator}"
        if split_slice(cluster.accelerator)[1] is not None:
            reason = "a process sees one slice (MIG)"
        elif cluster.is_local:
            cores = (cluster.cores_per_rank or 0) * cluster.num_ranks
            reason = (
                f"this machine has {significant(cores)} cores; one each, up to 2"
                if cluster.accelerator == "cpu"
                else "every one of this machine"
            )
        yield Decision(field="cluster.per_node", value=str(cluster.ranks_per_node), reason=reason)
    known = accelerator_named(cluster.accelerator, load_accelerators())
    usual = known.memory_bytes if known is not None else None
    if spec.memory != "auto" and usual is not None and spec.memory > usual:
        yield Decision(
            field="cluster.memory",
            value=f"{format_bytes(cluster.memory_bytes)} a rank",
            reason=f"as declared; the catalog's {cluster.accelerator} has {format_bytes(usual)}",
        )
    if cluster.num_nodes > 1 and not cluster.is_local:
        gigabits = (cluster.network_bytes_per_s or 0) * 8 / 1e9
        reason = f"usual for {cluster.accelerator}"
        if spec.rdma != "auto":
            reason = f"{cluster.network_link}, as cluster.rdma asks"
        if cluster.known["network_bytes_per_s"] == "estimated":
            reason = "assumed: the pods' network is TCP, and its rate is not known"
        elif spec.network != "auto":
            rdma = "with" if cluster.uses_rdma else "without"
            reason = f"as declared; latency is {cluster.network_link}'s, {rdma} RDMA" + (
                ""
                if spec.network_kind != "auto"
                else ": write its kind beside the rate, `100Gb/s Ethernet`, where it is another"
            )
        yield Decision(field="cluster.network", value=f"{gigabits:.4g} Gb/s a node", reason=reason)


def _unknown_card(cluster: Cluster) -> Iterator[Decision]:
    """How a card is planned that the catalog does not have."""
    within, like = cluster.rates_within, cluster.resembles
    card, profile = split_slice(cluster.accelerator)
    if profile is not None:
        value = f"rates within {significant(within, 2)} times"
        reason = f"a slice (MIG) is taken to have its share of the rates and the memory of a {card}"
        yield Decision(field="cluster.accelerator", value=value, reason=reason)
        return
    if not cluster.is_local or cluster.accelerator in load_accelerators():
        return
    if like:
        value = f"rates within {significant(within, 2)} times"
        cards = (
            f"{', '.join(like)}, by its compute capability"
            if len(like) <= _MOST_CARDS
            else f"{len(like)} cards, {like[0]} to {like[-1]}: none has its compute capability"
        )
        reason = (
            f"the catalog has no {cluster.accelerator}; estimated from {cards}. Memory and PCIe "
            "are as nvidia-smi reports them; `paceline calibrate` measures the rest"
        )
    elif not cluster.peak_flops_per_s:
        value = "rates unknown"
        reason = (
            f"the catalog has no {cluster.accelerator} and no card as old, so times are unknown; "
            "memory is as nvidia-smi reports it, process overhead as other NVIDIA cards have"
        )
    else:
        return  # a catalog file of the reader's own has it
    yield Decision(field="cluster.accelerator", value=value, reason=reason)


def _length_decision(job: Job) -> Iterator[Decision]:
    length = length_of(job)
    if length is not None:
        yield Decision(field="train.steps", value=f"{length.steps:,}", reason=str(length))


def length_of(job: Job) -> Length | None:
    """What the job's steps were made of; None where they were given, or changed since."""
    length = job.length
    return length if length is not None and length.steps == job.spec.train.steps else None


def _precision_decision(job: Job, case: Case) -> Iterator[Decision]:
    cluster, precision, engine = case.cluster, case.precision, case.engine
    if job.spec.train.precision != "auto":
        return
    if job.spec.train.states != "auto":
        reason = "that of train.states"
    elif precision == "bf16":
        reason = f"{cluster.accelerator} computes it in hardware"
        is_wide = {engine.weight_bytes, engine.sharded_bytes, engine.reduce_bytes} == {4}
        is_whole = case.profile.adapter is None and case.replica_share == 1
        if is_wide and is_whole:
            reason += "; parameters and reductions stay fp32"
    elif precision == "fp16":
        reason = (
            f"{cluster.accelerator} computes it in hardware, and no bf16; its range is narrow, so "
            "the engine must scale the loss (a loss scaler, dynamic)"
        )
    elif cluster.backend == "gloo":
        reason = "the ranks are CPUs"
    else:
        reason = f"{cluster.accelerator} is not known to have bf16"
    yield Decision(field="train.precision", value=precision, reason=reason)


def _layout_decisions(job: Job, cluster: Cluster, choice: Choice) -> Iterator[Decision]:
    fixed, layout = job.spec.layout, choice.layout
    for name, value, reason in reasons_of(choice):
        if getattr(fixed, name) == "auto":
            reason = _asked_by(fixed, name) or _asked_of_all_reduce(job, name, value) or reason
            yield Decision(field=f"layout.{name}", value=value, reason=reason)
    if layout.sharding == "full" and layout.accumulation > 1:
        yield Decision(
            field="gradient accumulation",
            value="sharded" if layout.reduce_every_micro_batch else "full",
            reason=_why_reduced(choice),
        )


def _why_reduced(choice: Choice) -> str:
    layout, estimate = choice.layout, choice.estimate
    if not layout.reduce_every_micro_batch:
        held = format_bytes(estimate.memory.parts["gradients"] or 0)
        return f"they fit ({held} a rank), so they are reduced once a step"
    if abilities_of(choice.case.engine.name).reduces_each:
        return "the engine reduces them after each micro-batch"
    late = price_one(replace(layout, reduce_every_micro_batch=False), choice.case).memory
    fits = late.known_bytes <= choice.limit_bytes
    more = format_bytes(late.known_bytes - estimate.memory.known_bytes)
    whole = f"would need {more} more" if fits else "do not fit"
    return f"full gradients {whole}, so every micro-batch runs a reduce-scatter"


def _asked_of_all_reduce(job: Job, name: str, value: str) -> str | None:
    """The field of `train` that no sharding would use; None where none asks for an all-reduce."""
    asked = asked_of_all_reduce(job.spec.train, abilities_of(job.spec.engine))
    if name != "sharding" or value != "none" or not asked:
        return None
    return f"{asked[0]} is of the all-reduce of whole gradients"


def _asked_by(fixed: LayoutSpec, name: str) -> str | None:
    """The field of the job from which this one follows; None where it was open."""
    implied = {"sharding": "shard", "schedule": "chunks", "recompute": "recompute_every"}
    implied["offload"] = "offload_parameters"
    if name == "pipeline" and asks_for_pipeline(fixed):
        field = "chunks" if fixed.schedule == "auto" else "schedule"
        return (
            f"layout.{field} {getattr(fixed, field)} needs a pipeline; of those that fit the best"
        )
    if name in implied and getattr(with_implied(fixed), name) != "auto":
        return f"layout.{implied[name]} {getattr(fixed, implied[name])} asks for it"
    return None


def _interval_decisions(spec: JobSpec) -> Iterator[Decision]:
    checkpoint, evaluate = decide_intervals(spec)
    if spec.checkpoint.every == "auto":
        yield Decision(
            field="checkpoint.every",
            value=counted(checkpoint, "step"),
            reason=f"a tenth of the run (never more than {_MAX_CHECKPOINT_EVERY} steps)",
        )
    if spec.evaluate.every == "auto":
        yield Decision(
            field="evaluate.every",
            value=counted(evaluate, "step"),
            reason="a tenth of the run",
        )


def _balancing_decision(job: Job, profile: ModelProfile) -> Iterator[Decision]:
    """What keeps a router from sending most tokens to few experts; a warning where nothing does."""
    if job.spec.engine != "paceline" or not any(block.experts for block in profile.blocks):
        return
    coefficient = router_loss_of(job)
    if not coefficient:
        yield Decision(
            field="balancing loss",
            value="none",
            reason="warning: a router trained from scratch may send most tokens to few experts; "
            "train.router_loss adds a balancing loss, 0.001 to 0.01 is usual",
        )
    elif job.spec.train.router_loss == "auto":
        yield Decision(
            field="balancing loss",
            value=f"{coefficient:g}",
            reason="router_aux_loss_coef of the model's config.json, which sets "
            "output_router_logits",
        )


_PLANNED_WITH = ("data.seq_len", "train.optimizer", "train.adapter")
_READ_BY_TRAINER = (
    *("data.path", "data.corpus", "data.held_out", "evaluate.samples"),
    *("train.betas", "train.eps", "train.weight_decay"),
)
"""Fields that a session does nothing with: those that the estimate counts, and the others."""


def _left_to_program(job: Job) -> Iterator[Decision]:
    """What was given and your own program uses, or nobody does."""
    program = job.spec.program
    if program is None or job.spec.engine != "paceline":
        return
    for field in (*_PLANNED_WITH, *_READ_BY_TRAINER):
        section, name = field.split(".")
        given = getattr(job.spec, section)
        value = getattr(given, name)
        if value == getattr(type(given), name):
            continue
        reason = f"only {program} can use it, as session.job.spec.{field}"
        if field in _PLANNED_WITH:
            reason = f"memory and time are estimated with it; {reason}"
        text = f"{value.kind}, rank {value.rank}" if field == "train.adapter" else str(value)
        yield Decision(field=field, value=text, reason=reason)


def _state_decision(job: Job) -> Iterator[Decision]:
    if job.spec.train.states == "bf16":
        yield Decision(
            field="train.states",
            value="bf16",
            reason="parameters, gradients and moments in 2 bytes each: half of the memory, and "
            "updates below about 1/256 of a parameter are lost in rounding",
        )


def _on_oom(job: Job) -> Iterator[Decision]:
    if job.spec.recovery.on_oom == "refit":
        yield Decision(
            field="recovery.on_oom",
            value="refit",
            reason="a run that is out of memory resumes in a layout that needs less, at the same "
            "global batch; from then on it equals an undisturbed run to rounding",
        )


def _on_lost_node(job: Job, cluster: Cluster, choice: Choice) -> Iterator[Decision]:
    """How the run goes on with a node less, where Paceline's own runtime does."""
    recovery = job.spec.recovery
    if choice.case.engine.name != "paceline" or not recovery.shrink:
        return
    if cluster.num_nodes > 1:
        reason = after_a_lost_node(
            job.spec, choice.layout, cluster, choice.case, choice.limit_bytes
        )
        yield Decision(field="recovery.batch", value=recovery.batch, reason=reason)
    elif recovery.batch == "shrink":
        reason = "on a single node nothing shrinks: a lost rank's place is taken by a new process"
        yield Decision(field="recovery.batch", value=recovery.batch, reason=reason)


def _silent_faults(job: Job, cluster: Cluster) -> Iterator[Decision]:
    """Faults that cannot fire, said rather than dropped."""
    for text in job.spec.drill.all_faults:
        fault = parse_fault(text)
        is_late = fault.sample is None and not 1 <= fault.step <= job.spec.train.steps
        if max(fault.ranks, default=0) >= cluster.num_ranks or is_late:
            yield Decision(
                field="drill.kill" if text in job.spec.drill.kill else "drill.faults",
                value=f"{text} never fires",
                reason=f"the ranks are 0 to {cluster.num_ranks - 1}, "
                f"the steps 1 to {job.spec.train.steps}",
            )
