"""Who is behind in a hang, from the watchdogs' lines; and what the lines before them speak for.

A watchdog's line is never the cause. Which rank has no line, or stands at an earlier collective,
is; and what the run was doing last says why.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.check.diagnose.seen import Seen, Watched
from paceline.check.diagnose.words import spans

_NEAR = 6_000
"""Characters before the first failure that count as what the run was doing then. A guess: some
sixty lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the ranks stood."""

    what: str
    """In words."""

    seq: int
    op: str | None
    num_in: int | None
    behind: Sequence[int]
    absent: Sequence[int]
    num_heard: int
    """Ranks whose watchdogs say where they stood."""

    sizes: Sequence[int]
    """Elements that ranks bring to it; more than one where ranks differ."""

    ops: Sequence[str]
    """Operations at that number; more than one where ranks differ."""

    is_early: bool
    """Among the first collectives of its group."""

    is_small: bool
    """One element: mostly a barrier."""

    crossed: str | None = None
    """That a rank finished a collective in which another still waits, in words."""


def stand(seen: Seen) -> Standing | None:
    """Where the ranks stood when the first watchdogs gave up."""
    first = _first_of_each(seen.watched)
    if not first:
        return None
    waiting = Counter(each.seq for each in first)
    seq, _ = max(waiting.items(), key=lambda item: (item[1], item[0]))
    at = [each for each in first if each.seq == seq]
    ranks = [each.rank for each in first if each.rank is not None]
    world = max([*ranks, *seen.ranks], default=-1) + 1
    absent = [rank for rank in range(world) if rank not in ranks] if world <= 65_536 else []
    lowest = min((each.enqueued for each in first if each.enqueued is not None), default=None)
    behind = [
        each.rank
        for each in first
        if each.rank is not None
        and (each.seq < seq or (lowest is not None and each.enqueued == lowest < seq))
    ]
    ops = sorted({each.op for each in at if each.op})
    size = next((each.num_in for each in at if each.num_in is not None), None)
    limit = next((each.timeout_ms for each in at if each.timeout_ms), None)
    parts = [f"collective {seq}" + (f" ({', '.join(ops)}" if ops else "")]
    if ops:
        parts[0] += f", {size} elements)" if size is not None else ")"
    waited = [each.rank for each in at if each.rank is not None]
    if waited:
        parts.append(f"rank{'s' if len(waited) > 1 else ''} {spans(waited)} waited")
    if limit:
        parts[-1] += f" {limit / 1000:.0f} s"
    if behind:
        lower = min(each.seq for each in first if each.rank in behind)
        parts.append(f"rank {spans(behind)} stood at {lower}")
    if absent and len(absent) < world:
        parts.append(f"rank {spans(absent)} says nothing")
    return Standing(
        what="; ".join(parts),
        seq=seq,
        op=ops[0] if ops else None,
        num_in=size,
        behind=behind,
        absent=absent,
        num_heard=len(set(ranks)),
        ops=ops,
        sizes=sorted({each.num_in for each in at if each.num_in is not None}),
        is_early=seq <= 10,
        is_small=size is not None and size <= 8,
        crossed=_crossed(first),
    )


_NEEDS_ALL = re.compile(r"ALLREDUCE|ALLGATHER|REDUCE_SCATTER|ALLTOALL|BARRIER")
"""Operations that no rank finishes before all have come. A broadcast's source may."""


def _crossed(first: Sequence[Watched]) -> str | None:
    """A rank beyond a collective that it cannot have finished: it called another one there."""
    named = [each for each in first if each.group is not None and each.rank is not None]
    for waits in sorted(named, key=lambda each: each.seq):
        for ahead in named:
            same = ahead.group == waits.group and ahead.rank != waits.rank
            beyond = ahead.seq > waits.seq and (ahead.completed or waits.seq) >= waits.seq
            if same and beyond and waits.op and _NEEDS_ALL.search(waits.op):
                return (
                    f"rank {ahead.rank} stands at collective {ahead.seq} ({ahead.op}) and rank "
                    f"{waits.rank} still waits in {waits.seq} ({waits.op}), which needs all ranks"
                )
    return None


def _first_of_each(watched: Sequence[Watched]) -> list[Watched]:
    found: dict[object, Watched] = {}
    for each in watched:
        key = each.rank if each.rank is not None else ("line", each.seq, each.op)
        if key not in found or (each.seq < found[key].seq and each.rank is not None):
            found[key] = each
    return list(found.values())


def near(seen: Seen) -> str:
    """What the logs say just before the first failure."""
    texts = [source.before[-_NEAR:] for source in seen.sources[:64] if source.before]
    return "\n".join(texts)[-16 * _NEAR :]


def around(seen: Seen) -> str:
    """Heads, and what is near the failure and behind it: for what the run is, not what it did."""
    texts = [f"{s.head}\n{s.before}\n{s.after}\n{s.tail}" for s in seen.sources[:16]]
    return "\n".join(texts)


_PREPROCESS = re.compile(
    r"(?i)tokeniz\w+( on)?( the)? dataset|running tokenizer"
    r"|Map( \(num_proc=\d+\))?:? +\d+%|Generating \w+ split"
    r"|Downloading (data|shards)|Filter( \(num_proc=\d+\))?: +\d+%|preprocess"
    r"|Converting format|Grouping texts"
    r"|Packing|Loading (the )?(data|checkpoint shards)|Saving the dataset|Tokeniz(e"
    r"|ing)|Creating json|cach(ing|e) (data|latents|text)"
    r"|extracting features|building (the )?(index|dataset|vocab)|main_process_first|Flattening"
)
_SAVE = re.compile(
    r"(?i)sav(e|ing)\b.{0,60}(checkpoint|model|state|weights|ckpt|optimizer|to )"
    r"|save_checkpoint|save_state"
    r"|save_pretrained|global_step\d+|state_dict|checkpoint-\d+|consolidat|mp_rank_00"
)
_EVALUATE = re.compile(
    r"(?i)\beval|\bvalidat|\btest(ing)?\b.{0,30}%|inference|sampling|sanity check"
)
_GENERATE = re.compile(r"(?i)generat(e|ing|ion)\b|max_new_tokens|rollout|vllm")
_SHARDED = re.compile(r"(?i)zero[_ -]?(stage[_ -]?)?3|zero3|stage3|\"stage\": 3|fsdp|full_shard")
_EXPERTS = re.compile(
    r"(?i)mixtral|\bmoe\b|_moe|moe_|-moe|experts?\b|deepseek-?v[23]|qwen\d[\w.-]*-a\d+(\.\d+)?b|num_experts|glm-?4\.5|gpt-?oss"
)
_COMPILE = re.compile(
    r"(?i)torch\.compile|inductor|torch\._dynamo|autotun|recompil|triton.*(compil"
    r"|kernel)|compil(e|ing) (the )?model"
)
_TRAINING = re.compile(r"(?i)\b(epoch|batch|step|iter(ation)?)\b.{0,40}\d|\bloss\b")
_P2P = re.compile(
    r"(?i)RTX|A6000|A40\b|L40|A10\b|4090|3090|5090|via P2P|P2P/|IOMMU|\bACS\b|PHB|\bSYS\b"
)
_EPOCH_END = re.compile(r"(?i)\b(9[5-9]|100)%\|")
_STEP_OF = re.compile(r"\b(\d+)/(\d+)\b")
_PIPELINE = re.compile(r"(?i)pipeline|\bpp\b|pp_size|send_forward|recv_forward|1f1b")
_MODAL = re.compile(
    r"(?i)multi-?modal|\bimages?\b|vision|llava|qwen2?\.?5?-?vl|audio|mixed (data|batch)"
)
_SKIP = re.compile(
    r"(?i)skip|nan|inf\b|no valid|empty batch|continue|early stop|best (model|metric)"
)


def reasons(seen: Seen, standing: Standing | None) -> Iterator[tuple[str, float, str]]:
    """(failure, weight, why) that the lines before a hang speak for, in no order.

    A weight of 1 or above is a second fact; below it, the failure fits and no more.
    """
    last, run = near(seen), around(seen)
    op = (standing.op or "") if standing else ""
    early = standing is not None and standing.is_early
    small = standing is not None and standing.is_small
    gathers = "GATHER" in op or "REDUCE_SCATTER" in op or not op
    sharded = bool(_SHARDED.search(run))
    if standing is not None and len(standing.ops) > 1:
        yield (
            "collective-mismatch",
            2.5,
            f"at collective {standing.seq} ranks call different operations: "
            + ", ".join(standing.ops),
        )
    if standing is not None and standing.crossed:
        yield "rank-divergent-decision", 1.25, standing.crossed
        yield "collective-mismatch", 1.2, standing.crossed
    if _PREPROCESS.search(last) and (early or not standing):
        yield (
            "rank0-preprocess-timeout",
            2.2 if small else 1.6,
            "data were being prepared just before",
        )
    if early and small:
        yield (
            "rank0-preprocess-timeout",
            1.1,
            "it is among the first collectives and holds one element",
        )
    tail = last[-2500:]
    if _SAVE.search(tail):
        yield "rank0-only-collective-save", 1.5, "a checkpoint was being saved just before"
        if "GATHER" in op:
            yield (
                "fsdp-full-state-dict-gather",
                1.7 if sharded else 1.2,
                "parameters were gathered for a save",
            )
    if _GENERATE.search(last) and gathers and sharded:
        yield "zero3-generate-hang", 1.6, "it generates with sharded parameters"
    if _EXPERTS.search(run) and gathers:
        yield (
            "zero3-moe-hang",
            1.8 if sharded else 1.1,
            "the model has experts and its parameters are sharded",
        )
    if "Invalidate trace cache" in last:
        yield "zero3-moe-hang", 2.0, "ZeRO-3 saw the ranks' layers in another order than before"
    if standing is not None and len(standing.sizes) > 1:
        sizes = ", ".join(str(each) for each in standing.sizes)
        yield "rank-divergent-decision", 1.3, f"ranks bring different sizes to it: {sizes}"
    if standing is None and _TRAINING.search(last):
        yield "uneven-inputs-hang", 1.0, "a rank waited in the middle of training"
    if _EVALUATE.search(tail) and not early:
        yield "rank0-only-validation", 1.5 if small else 1.0, "it was evaluating just before"
    if _COMPILE.search(last):
        yield "compile-rank-skew", 1.2, "graphs were being compiled just before"
    if _EPOCH_END.search(tail) or _ends_epoch(tail):
        yield "uneven-inputs-hang", 1.5, "it was at the end of an epoch"
    if standing is not None and standing.behind and not early:
        yield "uneven-inputs-hang", 0.9, f"rank {spans(standing.behind)} is behind the others"
    if early and not small and _P2P.search(run):
        yield (
            "acs-p2p-hang",
            1.2,
            "the first large collective never ended, between GPUs of one machine",
        )
    if _PIPELINE.search(run) and op in {"SEND", "RECV", "COALESCED"}:
        yield "pp-p2p-order", 1.3, "a pipeline stage waited for another"
    if _MODAL.search(run) and not early:
        yield "rank-divergent-decision", 0.8, "batches may differ in kind between ranks"
    if _SKIP.search(tail):
        yield "rank-divergent-decision", 0.7, "a rank may have skipped a step"
    if "broadcast_object_list" in run:
        yield "divergent-filesystem-branch", 1.0, "it broadcast objects"
    if not early:
        yield "uneven-inputs-hang", 0.5, "a collective in the middle of training"
        yield "rank-divergent-decision", 0.4, "a collective in the middle of training"
    else:
        yield "acs-p2p-hang", 0.4, "one of the first collectives"
        yield "rank0-preprocess-timeout", 0.45, "one of the first collectives"


def _ends_epoch(text: str) -> bool:
    steps = _STEP_OF.findall(text)
    if not steps:
        return False
    done, of = (int(each) for each in steps[-1])
    return of >= 10 and of * 0.95 <= done <= of
