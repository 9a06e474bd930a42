"""The public call: logs in, the root cause out."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from paceline.check.diagnose.conclusion import Diagnosis
from paceline.check.diagnose.flight import (
    MAX_BYTES,
    Dump,
    first_difference,
    is_dump,
    last_calls,
    of_newest_generation,
    read_dump,
)
from paceline.check.diagnose.hang import stood_still
from paceline.check.diagnose.judge import cause, judge
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.nccl import (
    network_causes,
    network_facts,
    network_fields,
    read_network,
)
from paceline.check.diagnose.own_run import is_events, read_own_run
from paceline.check.diagnose.progress import open_end, ranks_at_the_end
from paceline.check.diagnose.ranks import name_ranks
from paceline.check.diagnose.scan import MapAhead, Scan, one_by_one
from paceline.check.diagnose.seen import ErrorLine, Seen, Source
from paceline.check.diagnose.stacks import (
    Stack,
    all_in_one,
    compare,
    ending,
    has_stacks,
    read_stacks,
    unlike_calls,
)
from paceline.check.diagnose.symptoms import TROUBLE, is_told, told_causes
from paceline.record.log_files import Log

_EVENTS_BYTES = 256 << 20
"""Bytes of a run's events that are read: some million of them."""

_STACKS_BYTES = 64 << 20
"""Bytes of stacks that are read whole: some 100,000 threads."""


def diagnose(logs: Iterable[Log], map_ahead: MapAhead = one_by_one) -> Diagnosis:
    """Read logs, stacks and flight-recorder dumps, and say what went wrong.

    Args:
        map_ahead: How blocks are searched: one by one here, or ahead in other processes.
    """
    given = list(logs)
    spoken = b". ".join(piece for log in given if log.is_words for piece in log.blocks)
    read = [log for log in given if not log.is_words]
    if not read:
        read = [Log(name="words", blocks=[spoken], is_words=True)] if given else []
    scan = Scan(map_ahead)
    dumps: list[Dump] = []
    stacks: list[Stack] = []
    starts: list[tuple[str, Log]] = []
    for log in read:
        start, blocks = _peek(log.blocks)
        starts.append((start[:1000].decode("utf-8", "replace"), log))
        if is_dump(start):
            dumps += _dump(log, blocks, scan.seen)
            continue
        if is_events(start):
            run = read_own_run(_whole(blocks, _EVENTS_BYTES))
            scan.seen.facts |= run.facts
            scan.seen.has_finished = run.has_finished
            stacks += run.stacks
            blocks = iter([run.text])
        elif has_stacks(start[:1_000_000].decode("utf-8", "replace")):
            text = _whole(blocks, _STACKS_BYTES)
            stacks += read_stacks(text.decode("utf-8", "replace"), source=log.name, rank=log.rank)
            blocks = iter([text])
        scan.read(log.name, blocks, rank=log.rank, host=log.host)
    name_ranks(scan.seen)
    _conclude(scan.seen, of_newest_generation(dumps), stacks)
    diagnosis = _with_progress(judge(scan.seen), scan.seen)
    if spoken and not read[0].is_words:  # words beside logs: behind what the logs show
        sentence, known = spoken.decode("utf-8", "replace"), {each.id for each in diagnosis.causes}
        candidates = told_causes(sentence, "words", [], by_likeness=True)
        more = [cause(each, scan.seen) for each in candidates if each.id not in known]
        return replace(diagnosis, causes=[*diagnosis.causes, *more])
    if len(starts) != 1:
        return diagnosis
    [(words, log)] = starts
    diagnosis = replace(diagnosis, is_words=log.is_words)
    is_known = diagnosis.causes or diagnosis.has_failed
    if not (all if is_known else any)((log.is_words, is_told(words))):
        return diagnosis
    printed, has_failed = [each.id for each in diagnosis.causes], diagnosis.has_failed
    is_trouble = log.is_words or TROUBLE.search(words) is not None
    by_likeness = is_trouble and not has_failed
    candidates = told_causes(words, log.name, printed, by_likeness=by_likeness)
    causes = [cause(each, scan.seen) for each in candidates]
    return replace(diagnosis, causes=causes, has_failed=has_failed or bool(causes))


def _with_progress(diagnosis: Diagnosis, seen: Seen) -> Diagnosis:
    """What the last steps show, where nothing else ended the run: training stands, or stops."""
    if diagnosis.has_failed or diagnosis.notes or "run" in seen.facts:
        return diagnosis
    stands = open_end(seen)
    if stands is None:
        return diagnosis
    if diagnosis.causes or not stands.has_stopped:
        return replace(diagnosis, open_end=stands.what)
    causes = [cause(each, seen) for each in stood_still(seen, stands)]
    return replace(diagnosis, causes=causes, has_failed=True)


def _conclude(seen: Seen, dumps: list[Dump], stacks: list[Stack]) -> None:
    """What the readers of dumps, stacks and NCCL's report say."""
    seen.ranks |= ranks_at_the_end(seen)
    seen.ranks |= {dump.rank for dump in dumps if dump.rank is not None}
    seen.ranks |= {stack.rank for stack in stacks if stack.rank is not None}
    kept = [dump for dump in dumps if dump.generation]
    if kept and (seen.has_finished or len(kept) == 1):  # of a hang that was recovered from, or of
        difference = first_difference(kept)  # one rank: who hung could not answer
        seen.facts["dump"] = difference.what if difference is not None else last_calls(kept[0])
        dumps = [dump for dump in dumps if not dump.generation]
    if len(dumps) == 1:
        seen.facts["dump"] = "one rank's flight recorder alone; the other ranks' are needed too"
        _waits(seen, dumps[0].source, last_calls(dumps[0]), rank=dumps[0].rank)
    difference, odd = first_difference(dumps), compare(stacks)
    if difference is not None and odd is not None and set(difference.ranks) == set(odd.ranks):
        name = _nearer(difference.id, odd.id)
        what = f"{difference.what}; it {odd.what}"
        certain = name == difference.id and difference.is_certain
        difference = replace(difference, id=name, what=what, place=odd.place, is_certain=certain)
        odd = None
    ends = (ending(each.tail, source=each.name, rank=each.rank) for each in seen.sources)
    if odd is None and (calls := unlike_calls([each for each in ends if each is not None])):
        seen.facts["collectives"] = calls
    same = None if difference or odd else all_in_one(stacks)
    seen.found += [each for each in (difference, odd, same) if each is not None]
    waiting = next((each for each in stacks if each.waits), None)
    if not (difference or odd or same) and waiting is not None:
        text = f"stands in {waiting.told}"
        _waits(seen, waiting.source, text, number=waiting.line, rank=waiting.rank)
    network = read_network(seen.nccl)
    if network is not None:
        seen.facts |= network_facts(network)
        seen.nccl_fields = network_fields(network)
        seen.found += network_causes(network)


def _nearer(by_dump: str, by_stack: str) -> str:
    """Which of two readers' failures says more: a stack that shows what the rank is busy with, then
    a dump that shows what it called."""
    if by_stack != "rank-divergent-decision" or by_dump == "collective-watchdog-timeout":
        return by_stack
    return by_dump


def _dump(log: Log, blocks: Iterator[bytes], seen: Seen) -> list[Dump]:
    source = Source(log.name, log.rank, log.host)
    seen.sources.append(source)
    data = _whole(blocks, MAX_BYTES)
    source.num_bytes = len(data)
    try:
        return [read_dump(data, source=log.name, rank=log.rank)]
    except ValueError as error:
        source.trouble = str(error)
        return []


def _waits(seen: Seen, source: str, text: str, *, number: int = 0, rank: int | None) -> None:
    """Show where a rank waits, as a line of its dump or stack."""
    line = Line(source=source, number=number, raw=text, message=text, level="E", rank=rank)
    seen.error_lines[f"waits {source}"] = ErrorLine(line=line)


def _peek(blocks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    pieces = iter(blocks)
    try:
        start = next(pieces, b"")
    except (OSError, EOFError, zlib.error) as error:
        return b"", _raising(error)
    return start, chain([start], pieces)


def _raising(error: Exception) -> Iterator[bytes]:
    yield from ()
    raise error


def _whole(blocks: Iterator[bytes], limit: int) -> bytes:
    parts, size = [], 0
    for block in blocks:
        parts.append(block)
        size += len(block)
        if size > limit:
            break
    return b"".join(parts)[:limit]
