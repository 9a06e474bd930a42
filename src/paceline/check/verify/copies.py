"""What the ranks hold and read: shards, copies, samples, masks."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

from paceline.check.verify.equality import runs_named
from paceline.check.verify.line import Line, skipped
from paceline.check.verify.runs import DROPOUT, JOB, WIDE
from paceline.parallel.rank_map import coordinates
from paceline.record.verification import Facts, Piece, RankFacts
from paceline.units import counted, format_bytes


def check_ranks(facts: Facts) -> Iterator[Line]:
    """Every rank of the layout took part, at its own place, and did something."""
    name, layout = "every rank took part", facts.case.layout
    wrong = []
    if len(facts.ranks) != layout.num_ranks:
        wrong.append(
            f"{len(facts.ranks)} of {counted(layout.num_ranks, 'rank')} wrote down what they saw"
        )
    for rank in facts.ranks:
        place = coordinates(layout, rank.rank)
        told = (rank.tensor, rank.context, rank.data, rank.pipeline)
        if told != (place.tensor, place.context, place.data, place.pipeline):
            wrong.append(f"rank {rank.rank} is at {told} and belongs elsewhere")
        if rank.world_size != layout.num_ranks:
            wrong.append(f"rank {rank.rank} met {counted(rank.world_size, 'rank')}")
        run = rank.runs.get(WIDE)
        idle = run is not None and run.steps and not (run.steps[0].modules and run.pieces)
        if idle:
            wrong.append(f"rank {rank.rank} computed nothing")
    if len({(rank.host, rank.pid) for rank in facts.ranks}) != len(facts.ranks):
        wrong.append("two ranks are one process")
    if wrong:
        yield Line(
            name=name,
            status="fail",
            what=wrong[0],
            where="; ".join(wrong[1:]) or "the process group",
            fix="look at the launcher: RANK, WORLD_SIZE and the address they meet at",
        )
        return
    devices = Counter(rank.device.partition(":")[0] for rank in facts.ranks)
    on = ", ".join(f"{count} x {device}" for device, count in devices.items())
    yield Line(name=name, status="pass", what=f"{len(facts.ranks)} processes, {on}")


def check_samples(facts: Facts) -> Iterator[Line]:
    """The ranks together read every sample once an epoch, in another order each epoch."""
    yield _sampler(facts)
    yield _read(facts)


def _sampler(facts: Facts) -> Line:
    name, size = "sampler covers the data", facts.case.num_samples
    epochs = list(zip(*(rank.sampler for rank in _one_a_sample(facts)), strict=True))
    for number, parts in enumerate(epochs, 1):
        counts = Counter(sample for part in parts for sample in part)
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        never = sorted(set(range(size)) - set(counts))
        if twice or never:
            return Line(
                name=name,
                status="fail",
                what=f"epoch {number}: {len(twice)} samples twice or more, {len(never)} never",
                where=f"epoch {number}, sample {(twice or never)[0]}",
                why="two ranks read the same samples" if twice else "a rank's samples are skipped",
                fix="give each data rank its own slots of the global batch",
            )
    orders = {tuple(parts) for parts in epochs}
    if len(orders) < len(epochs):
        return Line(
            name=name,
            status="fail",
            what="two epochs have the same order",
            where="epoch 2",
            fix="let the order depend on the epoch",
        )
    return Line(
        name=name,
        status="pass",
        what=f"{size} samples once each in {len(epochs)} epochs, in different orders",
    )


def _read(facts: Facts) -> Line:
    """What was read for training: within an epoch nothing twice, and nobody the same."""
    name = "samples of each rank"
    runs = {rank.rank: rank.runs[WIDE] for rank in facts.ranks if WIDE in rank.runs}
    if not runs or not all(run.steps for run in runs.values()):
        return skipped(name, "the layout was not run")
    size, done = facts.case.num_samples, 0
    counts: Counter[int] = Counter()
    owner: dict[int, int] = {}
    first = {rank.data: rank.rank for rank in reversed(facts.ranks)}
    for index in range(len(next(iter(runs.values())).steps)):
        for rank in facts.ranks:
            mine, theirs = runs[rank.rank], runs[first[rank.data]]
            if mine.steps[index].ids != theirs.steps[index].ids:
                return Line(
                    name=name,
                    status="fail",
                    what=f"ranks {first[rank.data]} and {rank.rank} share samples and read others",
                    where=f"step {index + 1}, rank {rank.rank}",
                    fix="let tensor, context and pipeline ranks read what their data rank does",
                )
        for _data, rank_number in sorted(first.items()):
            ids = runs[rank_number].steps[index].ids
            done += len(ids)
            for sample in ids:
                counts[sample] += 1
                most = -(-_batch_end(facts, index) // size)
                if counts[sample] > most:
                    other = owner.get(sample)
                    return Line(
                        name=name,
                        status="fail",
                        what=f"sample {sample} is read {counts[sample]} times in epoch {most}",
                        where=f"step {index + 1}, rank {rank_number}",
                        why="it reads what it has read before"
                        if other in (None, rank_number)
                        else f"it reads what rank {other} reads",
                        fix="give each data rank its own slots of the global batch",
                    )
                owner[sample] = rank_number
    return Line(name=name, status="pass", what=f"{done} read in training, none twice in an epoch")


def _batch_end(facts: Facts, index: int) -> int:
    return (index + 1) * facts.case.layout.global_batch


def _one_a_sample(facts: Facts) -> list[RankFacts]:
    """One rank for each data rank: the others repeat its samples."""
    return [rank for rank in facts.ranks if rank.tensor == rank.context == rank.pipeline == 0]


def check_shards(facts: Facts) -> Iterator[Line]:
    """Together the ranks hold every parameter, as many copies as the layout says, and no more."""
    yield _shards(facts)
    yield _bytes(facts)


def _shards(facts: Facts) -> Line:
    name = "sharded as planned"
    runs = {rank.rank: rank.runs[JOB] for rank in facts.ranks if JOB in rank.runs}
    pieces = {rank: run.pieces for rank, run in runs.items()}
    if not any(pieces.values()):
        return skipped(name, "the layout was not run")
    layout = facts.case.layout
    shards = layout.shard_degree > 1
    for parameter in {each: None for here in pieces.values() for each in here}:
        held = {rank: here[parameter] for rank, here in pieces.items() if parameter in here}
        wrong = _wrong_parts(held, is_sharded=shards)
        if wrong is not None:
            return Line(
                name=name,
                status="fail",
                what=f"{parameter}: {wrong}",
                where=f"{parameter}, ranks {', '.join(map(str, held))}",
                fix="look at what is wrapped: every block, then the model itself",
            )
    whole = sum(prod(shape) for shape in facts.reference.shapes.values())
    here = [sum(piece.count for piece in each.values()) for each in pieces.values()]
    return Line(
        name=name,
        status="pass",
        what=f"{whole:,} parameters; {min(here):,} to {max(here):,} on a rank"
        if min(here) < max(here)
        else f"{whole:,} parameters; {max(here):,} on every rank",
    )


def _wrong_parts(held: Mapping[int, Piece], *, is_sharded: bool) -> str | None:
    parts = {piece.part: piece.count for piece in held.values()}
    whole = prod(next(iter(held.values())).shape)
    if sum(parts.values()) != whole:
        return f"its parts are {sum(parts.values()):,} numbers of {whole:,}"
    if is_sharded and len(parts) == 1 and whole > 0:
        return "every rank holds all of it"
    return None


def _bytes(facts: Facts) -> Line:
    name, predicted = "bytes as predicted", facts.case.predicted
    runs = {rank.rank: rank.runs[JOB] for rank in facts.ranks if JOB in rank.runs}
    held = {rank: run.held for rank, run in runs.items() if run.held is not None}
    if not held:
        return skipped(name, "the layout was not run")
    parts = ("parameters", "gradients", "optimizer")
    seen = {part: max(getattr(each, part) for each in held.values()) for part in parts}
    told = ", ".join(f"{part} {format_bytes(size)}" for part, size in seen.items())
    if predicted is None:
        return skipped(name, f"nothing is predicted for this model; held: {told}")
    spare = _rounding_bytes(facts)
    for part in parts:
        moments = 2 if part == "optimizer" else 1
        allowed = predicted[part] + moments * spare
        if seen[part] > allowed:
            worst = max(held, key=lambda rank: getattr(held[rank], part))
            return Line(
                name=name,
                status="fail",
                what=f"{part}: {seen[part]:,} bytes, {predicted[part]:,} predicted",
                seen=seen[part],
                allowed=allowed,
                where=f"rank {worst}",
                why="more is kept than this rank's share",
                fix="look at what is sharded, and for what keeps whole tensors alive",
            )
    expected = sum(predicted[part] for part in parts)
    return Line(
        name=name,
        status="pass",
        what=f"fullest rank: {told}",
        seen=float(sum(seen.values())),
        allowed=float(expected + 4 * spare),
    )


def _rounding_bytes(facts: Facts) -> int:
    """What shards may have above their even share: each rounds up to a row. Tensor ranks hold
    vectors whole, and tables outside the blocks that are not of the vocabulary (of positions)."""
    layout, vocab = facts.case.layout, facts.case.vocab
    rows = [prod(shape[1:]) if len(shape) > 1 else 1 for shape in facts.reference.shapes.values()]
    whole = [
        prod(shape)
        for name, shape in facts.reference.shapes.items()
        if len(shape) == 1 or (vocab not in shape and not any(map(str.isdigit, name.split("."))))
    ]
    spare = sum(rows) if layout.shard_degree > 1 else 0
    return 4 * (spare + (sum(whole) if layout.tensor > 1 else 0))


def check_copies(facts: Facts) -> Iterator[Line]:
    """Ranks that hold the same part hold the same bits, after every step."""
    name = "copies in sync"
    runs = {rank.rank: rank.runs[JOB] for rank in facts.ranks if JOB in rank.runs}
    if not runs or not all(run.steps for run in runs.values()):
        yield skipped(name, "the layout was not run")
        return
    num_groups = 0
    for index in range(len(next(iter(runs.values())).steps)):
        groups: dict[tuple[str, str], dict[int, str]] = {}
        for rank, run in runs.items():
            for parameter, digest in run.steps[index].digests.items():
                key = (parameter, run.pieces[parameter].part)
                groups.setdefault(key, {})[rank] = digest
        several = {key: held for key, held in groups.items() if len(held) > 1}
        num_groups = len(several)
        for (parameter, _), held in several.items():
            usual, _count = Counter(held.values()).most_common(1)[0]
            odd = [rank for rank, digest in held.items() if digest != usual]
            if odd:
                step = next(iter(runs.values())).steps[index].step
                yield Line(
                    name=name,
                    status="fail",
                    what=f"{parameter} differs between ranks {', '.join(map(str, held))}",
                    where=f"step {step}, {parameter}, rank {', '.join(map(str, odd))}",
                    why="its copy was updated with another gradient, or not at all",
                    fix="reduce its gradients over all ranks that hold it, and update it on all",
                )
                return
    steps = len(next(iter(runs.values())).steps)
    if num_groups:
        what = f"{num_groups} tensors with copies, the same bits after each of {steps} steps"
        yield Line(name=name, status="pass", what=what)
    else:
        yield skipped(name, "the layout keeps no copies: every number is on one rank")


def check_dropout(facts: Facts) -> Iterator[Line]:
    """Ranks that hold different numbers drop different ones; ranks that hold the same, the same."""
    name = "dropout masks"
    runs = {rank.rank: rank for rank in facts.ranks if DROPOUT in rank.runs}
    if not facts.reference.has_dropout:
        yield skipped(name, "the model has no dropout")
        return
    refused = next((run.refused for run in runs_named(facts, DROPOUT) if run.refused), None)
    if refused is not None or not runs:
        yield skipped(name, refused or "it was not run")
        return
    layout = facts.case.layout
    seen = 0
    for module in {m: None for each in runs.values() for m in each.runs[DROPOUT].steps[0].masks}:
        truth = facts.reference.wide[0].modules.get(module)
        if truth is None:
            continue
        masks = {
            rank: (each, each.runs[DROPOUT].steps[0].masks[module])
            for rank, each in runs.items()
            if module in each.runs[DROPOUT].steps[0].masks
        }
        seen += 1
        share = truth.count // (layout.data * layout.context)
        for one, (a, mask_a) in masks.items():
            for other, (b, mask_b) in masks.items():
                if other <= one:
                    continue
                same_tokens = (a.data, a.context) == (b.data, b.context)
                count = a.runs[DROPOUT].steps[0].mask_counts[module]
                must_agree = same_tokens and count == share
                if (mask_a == mask_b) != must_agree:
                    yield Line(
                        name=name,
                        status="fail",
                        what=f"{module}: ranks {one} and {other} drop "
                        + ("the same" if mask_a == mask_b else "different numbers"),
                        where=f"step 1, {module}, ranks {one}, {other}",
                        why="they hold the same activations"
                        if must_agree
                        else "they hold different activations and draw from one seed",
                        fix="seed tensor ranks alike where activations are whole, and apart where "
                        "they are split; all other ranks apart",
                    )
                    return
    yield Line(name=name, status="pass", what=f"{seen} dropout modules on {len(runs)} ranks")
