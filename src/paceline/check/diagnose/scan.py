"""Reads logs once, block by block, and keeps what matters of them: `Seen`.

Memory is bounded: by the size of a block for each source, and by what `seen` keeps of each kind.
"""

import codecs
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from paceline.catalog.load import read_shipped
from paceline.check.diagnose.exits import ExitTable, exits_of
from paceline.check.diagnose.line import MAX_LINE, Line, read_line, with_rank, without_colours
from paceline.check.diagnose.matcher import Hit, Kind, Matcher, all_patterns
from paceline.check.diagnose.own_run import WithoutDrills
from paceline.check.diagnose.ranks import gpu_of_rank, note_first_rank
from paceline.check.diagnose.seen import (
    KEEP_DISTINCT,
    KEEP_NCCL,
    ErrorLine,
    Seen,
    Sighting,
    Source,
    Watched,
)
from paceline.check.diagnose.tracebacks import Tracebacks

BLOCK_BYTES = 1 << 20
"""What is read at once. 1 MiB: the rate grows no more beyond it."""

KEEP_AROUND = 48 * 1024
"""Bytes kept whole at the head, before the first failure, behind it, and at the end of a source."""

ENOUGH = 20_000
"""Lines of one pattern after which it is no longer looked for. Its first lines, and the first of
every rank, are known long before."""

SPARSE = 2_000
"""Lines of one pattern after which only every sixteenth is taken apart."""

_ENDS_OF_LINE = 4 * MAX_LINE
"""Bytes at the beginning and at the end of a very long line in which its message is looked for."""

_BEFORE_MESSAGE = 64
"""Characters of it that are kept before the message: who writes it. More would hide it where it is
shown."""

_LINE_FEED = 10
_DROPPED = {"user-exception"}
"""Failures whose lines are found better by a reader: exceptions, by `tracebacks`."""


Item = tuple[bytes, frozenset[int]]
"""Whole lines, and the patterns that are no longer looked for."""

MapAhead = Callable[
    [Callable[[Item], Sequence[Hit]], Iterable[Item]], Iterator[tuple[Item, Sequence[Hit]]]
]
"""Gives each item with what a function gives for it, in order. The function may be called ahead, in
other processes."""


def one_by_one(
    function: Callable[[Item], Sequence[Hit]], items: Iterable[Item]
) -> Iterator[tuple[Item, Sequence[Hit]]]:
    """Call the function when its item is wanted."""
    for item in items:
        yield item, function(item)


class Scan:
    """The state of one reading of all sources."""

    def __init__(self, map_ahead: MapAhead = one_by_one) -> None:
        self.seen = Seen()
        self._map_ahead = map_ahead
        self._wanted = {
            number
            for number, each in enumerate(all_patterns())
            if each.name not in _DROPPED and each.kind is not Kind.BENIGN
        }
        self._counts = [0] * len(all_patterns())
        self._gone: frozenset[int] = frozenset()
        self._matcher = Matcher(sorted(self._wanted))

    def read(
        self,
        name: str,
        blocks: Iterable[bytes],
        *,
        rank: int | None = None,
        host: str | None = None,
    ) -> Source:
        """Read one source to its end.

        Args:
            rank: Whose it is, where its name says so.
        """
        source = Source(name, rank, host)
        self.seen.sources.append(source)
        reading = _Reading(self.seen, source, self._counts)
        for (block, gone), hits in self._map_ahead(self._find, self._items(blocks, source)):
            if late := self._gone - gone:
                kept = ((*hit[:2], [n for n in hit[2] if n not in late], hit[3]) for hit in hits)
                hits = [hit for hit in kept if hit[2]]
            reading.block(block, hits)
            self._leave_out_the_frequent()
        reading.end()
        return source

    def _items(self, blocks: Iterable[bytes], source: Source) -> Iterator[Item]:
        without_drills = WithoutDrills()
        for block in whole_lines(readable(blocks, source)):
            source.num_bytes += len(block)
            yield without_drills(without_colours(block)), self._gone

    def _find(self, item: Item) -> Sequence[Hit]:
        block, gone = item
        self._matcher.forget(gone)
        return self._matcher.find(block.replace(b"\r", b"\n"))

    def _leave_out_the_frequent(self) -> None:
        frequent = {number for number in self._wanted if self._counts[number] > ENOUGH}
        if frequent:
            self._wanted -= frequent
            self._gone |= frequent
            self.seen.saturated += [all_patterns()[number].name for number in sorted(frequent)]


def readable(blocks: Iterable[bytes], source: Source) -> Iterator[bytes]:
    """The text in a source, until it ends or cannot be read further; `source.trouble` says why."""
    pieces = iter(blocks)
    decoder: codecs.IncrementalDecoder | None = None
    is_first = True
    while True:
        try:
            piece = next(pieces, b"")
        except (OSError, EOFError, zlib.error) as error:
            why = getattr(error, "strerror", None) or str(error)
            source.trouble = f"not read{'' if is_first else ' to its end'}: {why}"
            return
        if not piece:
            return
        if is_first:
            is_first = False
            if piece[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                decoder = codecs.getincrementaldecoder("utf-16")("replace")
            elif why := not_text(piece):
                source.trouble = why
                return
        yield decoder.decode(piece).encode() if decoder is not None else piece


def not_text(start: bytes) -> str | None:
    """Why a file that begins so is no log."""
    for magic, what in _MAGIC.items():
        if start.startswith(magic):
            return what
    sample = start[:65_536]
    strange = sum(sample.count(bytes([byte])) for byte in (0, 1, 2, 3, 4, 5, 6, 14, 15, 16))
    return "binary, not a log" if strange > len(sample) // 50 else None


_MAGIC = {
    b"\x28\xb5\x2f\xfd": "packed by zstd: zstd -dc FILE | paceline diagnose -",
    b"BZh": "packed by bzip2: bzcat FILE | paceline diagnose -",
    b"\xfd7zXZ": "packed by xz: xzcat FILE | paceline diagnose -",
    b"PK\x03\x04": "a zip archive: unzip -p FILE | paceline diagnose -",
    b"\x7fELF": "a program or a core dump, not a log",
}


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks cut at line ends; a line longer than a block is cut where the block ends."""
    rest: list[bytes] = []
    size = 0
    for block in blocks:
        rest.append(block)
        size += len(block)
        if size < BLOCK_BYTES:
            continue
        joined = b"".join(rest) if len(rest) > 1 else rest[0]
        for start in range(0, len(joined), 4 * BLOCK_BYTES):
            part = joined[start : start + 4 * BLOCK_BYTES]
            if start + len(part) < len(joined):
                yield part
                continue
            end = max(part.rfind(b"\n"), part.rfind(b"\r")) + 1 or len(part)
            if end:
                yield part[:end]
            rest, size = [part[end:]], len(part) - end
    joined = b"".join(rest)
    if joined:
        yield joined


class _Reading:
    """The state of one source."""

    def __init__(self, seen: Seen, source: Source, counts: list[int]) -> None:
        self.seen, self.source = seen, source
        self._counts = counts
        num_sources = len(seen.sources)
        self._keep = KEEP_AROUND if num_sources <= 64 else KEEP_AROUND // 16
        self._number = 1
        self._numbered = 0
        self._ends = np.zeros(0, np.bool_)
        self._open = Tracebacks(seen)
        self._table = ExitTable(seen)
        self._last = b""
        self._failed_at: int | None = None
        self._after: list[bytes] = []
        self._after_size = 0

    def block(self, block: bytes, hits: Sequence[Hit]) -> None:
        """Read one block of whole lines, of which patterns match some."""
        source, keep = self.source, self._keep
        if len(source.head) < keep:
            source.head += _text(block[: keep - len(source.head)])
        self._ends = np.frombuffer(block, np.uint8) == _LINE_FEED
        self._numbered = 0
        position, is_walking = 0, self._is_walking  # asked for only where it may change
        for start, end, numbers, benign in hits:
            if is_walking:
                self._walk(block, position, start)
                is_walking = self._is_walking
            if self._is_wanted(numbers) or is_walking:
                self._count_to(start)
                self._line(block[start:end], numbers, benign, (block, start))
                is_walking = self._is_walking
            position = end + 1
        if is_walking:
            self._walk(block, position, len(block))
        self._count_to(len(block))
        if self._failed_at is not None and self._after_size < keep:
            self._after.append(block[self._failed_at : self._failed_at + keep])
            self._after_size += len(self._after[-1])
            self._failed_at = 0
        self._last = (self._last + block[-keep:])[-keep:]

    def end(self) -> None:
        """The source is over."""
        self._open.end()
        self._table.end()
        self.source.num_lines = self._number - 1
        self.source.tail = _text(self._last)
        self.source.after = _text(b"".join(self._after)[: self._keep])
        if self._failed_at is None and not self.source.before:
            self.source.before = self.source.tail

    @property
    def _is_walking(self) -> bool:
        return self._open.is_open or self._table.is_open

    def _walk(self, block: bytes, start: int, end: int) -> None:
        while start < end and self._is_walking:
            stop = _line_end(block, start, end)
            self._count_to(start)
            line = self._read(block[start : min(stop, start + MAX_LINE)])
            self._open.take(line)
            self._table.take(line)
            start = stop + 1

    def _count_to(self, position: int) -> None:
        self._number += int(np.count_nonzero(self._ends[self._numbered : position]))
        self._numbered = position

    def _read(self, raw: bytes) -> Line:
        line = read_line(_text(raw), source=self.source.name, number=self._number)
        return with_rank(line, self.source.rank, self.source.host)

    def _is_wanted(self, numbers: Sequence[int]) -> bool:
        """Whether a line is taken apart: of what comes very often, only now and then."""
        counts, is_rare = self._counts, False
        for number in numbers:
            counts[number] += 1
            is_rare = is_rare or counts[number] <= SPARSE
        return is_rare or not counts[min(numbers)] % 16

    def _line(
        self, raw: bytes, numbers: Sequence[int], benign: Sequence[int], where: tuple[bytes, int]
    ) -> None:
        patterns = all_patterns()
        if len(raw) > 2 * _ENDS_OF_LINE:
            raw = raw[:_ENDS_OF_LINE] + b" ... " + raw[-_ENDS_OF_LINE:]
        text = _text(raw)
        if len(raw) > MAX_LINE:  # a progress bar without line ends, and then the message
            found = [m.start() for n in numbers if (m := patterns[n].text.search(text))]
            at = max(0, min(found, default=0) - _BEFORE_MESSAGE)
            text = text[at : at + MAX_LINE]
        line = with_rank(
            read_line(text, source=self.source.name, number=self._number),
            self.source.rank,
            self.source.host,
        )
        if line.rank is None and line.pid is not None:
            line = with_rank(line, self.seen.rank_of.get((line.host, line.pid)))
        if line.rank is not None:
            self.seen.ranks.add(line.rank)
            note_first_rank(self.seen, line)
        is_benign = any(patterns[number].text.search(line.raw) for number in benign)
        readers, shown = set[str](), dict[tuple[str, bool], dict[str, str]]()
        for number in sorted(numbers):
            pattern = patterns[number]
            if pattern.kind is Kind.READER:
                readers.add(pattern.name)
            elif match := pattern.text.search(line.message) or pattern.text.search(line.raw):
                groups = {k: v for k, v in match.groupdict().items() if v is not None}
                key = pattern.name, pattern.kind is Kind.WEAK
                shown[key] = max(shown.get(key, {}), groups, key=len)
        for key, groups in shown.items():  # a line once for each failure
            self.seen.sightings.setdefault(key, Sighting(*key)).add(line, groups)
        is_known = not all(weak for _, weak in shown)
        self._open.take(line)
        self._table.take(line)
        if "traceback" in readers or (is_known and not is_benign):
            self._note_failure(where)
        self._readers(readers, line, is_benign=is_benign, is_known=is_known)

    def _note_failure(self, where: tuple[bytes, int]) -> None:
        if self._failed_at is None:
            block, start = where
            self._failed_at = start
            before = self._last + block[max(0, start - self._keep) : start]
            self.source.before = _text(before[-self._keep :])

    def _readers(self, names: set[str], line: Line, *, is_benign: bool, is_known: bool) -> None:
        seen = self.seen
        if "traceback" in names:
            self._open.header(line)
        if "exit-table" in names:
            self._table.header(line)
        if "exit" in names:
            seen.exits += exits_of(line)
        if "nccl-info" in names and len(seen.nccl) < KEEP_NCCL:
            seen.nccl.append(line)
            if (match := _NCCL_RANK.search(line.message)) and line.pid is not None:
                seen.rank_of[(line.host, line.pid)] = int(match["rank"])
        if "watchdog" in names:
            watch(seen.watched, line)
        if "ray-rank" in names and (match := _RAY_RANK.search(line.raw)):
            seen.rank_of[(match["ip"], int(match["pid"]))] = int(match["rank"])
        if "gpu-of-rank" in names and (pair := gpu_of_rank(line)) is not None:
            seen.rank_of_gpu[pair[0]] = pair[1]
        if "error-line" in names and not is_benign:
            self._open.alone(line)
            if not is_known:
                self._error_line(line)

    def _error_line(self, line: Line) -> None:
        is_inside = line.level is None and line.message.startswith((" ", "\t", "│"))
        if is_inside or _NOT_AN_ERROR.search(line.message):
            return
        kind = re.sub(r"0x[0-9a-f]+|\d+", "#", line.message)[:160]
        found = self.seen.error_lines.get(kind)
        if found is None:
            if len(self.seen.error_lines) >= KEEP_DISTINCT:
                return
            found = self.seen.error_lines[kind] = ErrorLine(line=line, count=0)
        found.count += 1
        if line.rank is not None:
            found.ranks.add(line.rank)


_NCCL_RANK = re.compile(r"comm 0x\w+ rank (?P<rank>\d+) n[Rr]anks \d+")
_RAY_RANK = re.compile(r"ip=(?P<ip>[\w.:]+), pid=(?P<pid>\d+)\) world_rank=(?P<rank>\d+)")
_NOT_AN_ERROR = re.compile(read_shipped("log_lines.toml")["unknown"]["no_error"])


def _line_end(block: bytes, start: int, limit: int) -> int:
    end = block.find(b"\n", start, limit)
    end = limit if end < 0 else end
    bar = block.find(b"\r", start, end)
    return end if bar < 0 else bar


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


_WATCH = re.compile(
    r"Work[A-Z]+\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<nin>\d+), NumelOut=\d+)?"
    r"(?:, TensorShape=\[[\d, ]*\])?"
    r"(?:, Timeout\(ms\)=(?P<timeout>\d+))?"
)
_ENQUEUED = re.compile(
    r"work(?: sequence id)?: (?P<seq>\d+)(?:,| PG status:) last enqueued (?:NCCL )?work: "
    r"(?P<enq>-?\d+), last completed (?:NCCL )?work: (?P<done>-?\d+)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<id>\w+)(?: PG GUID [^\]]*?\((?P<name>[^)]*)\))?")


def watch(found: list[Watched], line: Line) -> None:
    """Note where a rank stood when its watchdog gave up; two lines of it tell one thing."""
    if match := _WATCH.search(line.raw):
        if len(found) < KEEP_NCCL:
            found.append(
                Watched(
                    line=line,
                    rank=line.rank,
                    seq=int(match["seq"]),
                    op=match["op"].removeprefix("_"),
                    num_in=int(match["nin"]) if match["nin"] else None,
                    timeout_ms=int(match["timeout"]) if match["timeout"] else None,
                )
            )
    elif match := _ENQUEUED.search(line.raw):
        group = _GROUP.search(line.raw)
        for each in reversed(found[-512:]):
            if each.rank == line.rank and each.seq == int(match["seq"]):
                each.enqueued, each.completed = int(match["enq"]), int(match["done"])
                each.group = each.group or (group and (group["name"] or group["id"])) or None
                break
