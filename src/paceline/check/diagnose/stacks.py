"""Stacks of many ranks (py-spy, faulthandler, gdb): which rank stands elsewhere than the rest.

Of each process the main thread counts. Ranks are grouped by where they stand in the reader's own
code, or in any code where nothing of it is on the stack.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.catalog.load import read_shipped
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.seen import Found, Frame


@dataclass(slots=True, kw_only=True)
class Stack:
    """The main thread of one process."""

    source: str
    line: int
    rank: int | None
    pid: int | None
    frames: list[Frame] = field(default_factory=list)
    """Deepest first."""

    @property
    def place(self) -> str:
        """Where it stands."""
        return str(self.own or self.frames[0])

    @property
    def own(self) -> Frame | None:
        """The deepest frame in the reader's own code."""
        own = (frame for frame in self.frames if frame.is_users and not _is_pythons(frame.file))
        return next(own, None)

    @property
    def told(self) -> str:
        """The frames that matter: the deepest three that wait for others, or are deepest at all,
        and the reader's own."""
        waits = [frame for frame in self.frames if _WAITS.search(frame.function)]
        shown = (waits or self.frames)[:3]
        if self.own is not None and self.own not in shown:
            shown.append(self.own)
        return "; ".join(
            _IN_PACKAGES.sub("", str(each)) if each.file != "?" else each.function for each in shown
        )

    @property
    def waits(self) -> bool:
        """Whether it stands in a call by which ranks meet."""
        return any(_WAITS.search(frame.function) for frame in self.frames)

    @property
    def meets(self) -> bool:
        """Whether it may be in a collective: in a call of one, or in a backward pass."""
        return self.waits or self.call is not None

    @property
    def call(self) -> str | None:
        """The collective that it is in; `backward` where DDP's or FSDP's own begin in C++."""
        functions = [frame.function.rpartition(".")[2] for frame in self.frames]
        named = (name for name in functions if _WAITS.match(name))
        return next(named, "backward" if "_engine_run_backward" in functions else None)

    @property
    def stood(self) -> str:
        """The collective that it is in, and where in the reader's code."""
        return f"in {self.call}, {self.place}" if self.call else f"at {self.place}"

    def as_line(self, text: str) -> Line:
        """A line of its source that says where it stands."""
        return Line(source=self.source, number=self.line, raw=text, message=text)

    @property
    def doing(self) -> str:
        """The functions of its frames, deepest first, for what it is busy with."""
        return " ".join(f"{frame.file}:{frame.function}" for frame in self.frames)


_WAITS = re.compile(
    r"(?i)^(?:p?nccl|bootstrap[A-Z]|gloo::|c10d::|ProcessGroup|all_?(?:reduce|gather|to_all)|barrier"
    r"|reduce_scatter|broadcast|monitored_barrier|init_process_group|rendezvous)"
)
"""Functions of torch, NCCL and Gloo in which a rank waits for others."""


_IN_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")


def _is_pythons(file: str) -> bool:
    """Whether a file is Python's own, as py-spy shortens it: `selectors.py`, `queue.py`."""
    return file.split("/")[0].removesuffix(".py") in sys.stdlib_module_names


_PROCESS = re.compile(r"^Process (?P<pid>\d+): (?P<command>.*)")
_PYSPY_FRAME = re.compile(
    r"^ +(?P<function>[\w<>.]+(?: \([^)]*\))?) \((?P<file>[^():]+):(?P<line>\d+)\)$"
)
_FAULT_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_THREAD = re.compile(
    r"^(?:(?P<fault>(?:Current t|T)hread 0x[0-9a-f]+ .*most recent call first)"
    r'|Thread (?:0x[0-9A-Fa-f]+|\d+) \([^)]*\): "(?P<name>[^"]*)"|Thread (?P<number>\w+) \()'
)
"""The first line of a thread, of faulthandler, py-spy and gdb."""

_GDB_FRAME = re.compile(
    r"^#\d+ +(?:0x[0-9a-f]+ in )?(?P<function>[\w:~<>, ]+?) ?\(.*?\)"
    r"(?: at (?P<file>\S+):(?P<line>\d+))?"
)
_RANK = re.compile(
    r"--local[_-]rank[= ](?P<local>\d+)|\bRANK=(?P<rank>\d+)|\brank[ =:]+(?P<other>\d+)"
)


_OF_RANK = re.compile(r"^[=#*-]* ?(?:rank|RANK)[ =:_-]*\d+")


def has_stacks(start: str) -> bool:
    """Whether a text that begins so is a dump of stacks."""
    lines = start.splitlines()[:400]
    heads = sum(bool(_PROCESS.match(line) or _THREAD.match(line)) for line in lines)
    frames = sum(_frame(line) is not None for line in lines)
    told = sum(bool(line.strip()) for line in lines)
    return heads > 0 and frames >= 2 and 5 * (heads + frames) >= 2 * told


def read_stacks(text: str, *, source: str, rank: int | None) -> Iterator[Stack]:
    """The main thread of each process in a text."""
    own_rank, pid = rank, None
    threads: list[tuple[re.Match[str], Stack]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        process = _PROCESS.match(raw)
        if process or _OF_RANK.match(raw):
            yield from _main_ones(threads)
            threads = []
            own_rank = _rank_in(raw) if rank is None or process is None else rank
            pid = int(process["pid"]) if process else pid
        elif head := _THREAD.match(raw):
            stack = Stack(source=source, line=number, rank=own_rank, pid=pid)
            threads.append((head, stack))
        elif threads and (frame := _frame(raw)) and len(threads[-1][1].frames) < 200:
            threads[-1][1].frames.append(frame)
    yield from _main_ones(threads)


def _main_ones(threads: Sequence[tuple[re.Match[str], Stack]]) -> Iterator[Stack]:
    """py-spy names the main thread, for gdb it is the first, and faulthandler dumps it last."""
    last_fault = next((head for head, _ in reversed(threads) if head["fault"]), None)
    for head, stack in threads:
        is_main = head["name"] == "MainThread" or head["number"] == "1" or head is last_fault
        if is_main and stack.frames:
            yield stack


def _frame(raw: str) -> Frame | None:
    found = _PYSPY_FRAME.match(raw) or _FAULT_FRAME.match(raw) or _GDB_FRAME.match(raw)
    if found is None:
        return None
    file, line, function = found["file"] or "?", int(found["line"] or 0), found["function"].strip()
    return Frame(file=file, line=line, function=function)


def _rank_in(text: str) -> int | None:
    match = _RANK.search(text) or re.search(r"(?i)rank[ =:_-]*(?P<rank>\d+)", text)
    if match is None:
        return None
    return next((int(each) for each in match.groupdict().values() if each), None)


_BUSY: Mapping[str, str] = read_shipped("log_lines.toml")["busy"]


_TITLES: Mapping[str, str] = {"dataloader-timeout": "A rank waits for its DataLoader"}
"""Failure -> what is seen of it on a stack, where its title tells of what a log would print."""


def _by_place(stacks: Mapping[int, Stack], *, lines: bool) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    # One line may call one of two collectives: `f(x) if rank else g(x)`.
    calls = all(stack.call not in (None, "backward") for stack in stacks.values())
    for rank, stack in stacks.items():
        place = stack.stood if calls else stack.place
        place = place if lines else re.sub(r":\d+ in", " in", place)
        groups.setdefault(place, []).append(rank)
    return groups


def ending(text: str, *, source: str, rank: int | None) -> Stack | None:
    """Where a process stood at the end of its log: by faulthandler's dump, which a process that
    aborts leaves, or by its last traceback."""
    stacks = list(read_stacks(text, source=source, rank=rank)) if _ABORTED in text else []
    if stacks:
        return stacks[-1]
    _, header, last = text.rpartition("Traceback (most recent call last):")
    frames = [
        Frame(file=found["file"], line=int(found["line"]), function=found["function"])
        for found in _TRACEBACK_FRAME.finditer(last if header else "")
    ]
    stack = Stack(source=source, line=0, rank=rank, pid=None, frames=frames[::-1])
    return stack if frames else None


def all_in_one(stacks: Sequence[Stack]) -> Found | None:
    """The collective in which every rank stands, all in the same one: what they bring to it may be
    of different size, for which gloo waits without a word; None where that cannot be."""
    first = next(iter(stacks), None)
    if first is None or first.call is None or not _SIZED.match(first.call):
        return None
    if len(stacks) < 2 or any(each.stood != first.stood for each in stacks):
        return None
    return Found(
        id="gloo-size-mismatch",
        what=f"{'both' if len(stacks) == 2 else f'all {len(stacks)}'} ranks stand {first.stood}, "
        "and it does not end",
        line=first.as_line(f"stands in {first.told}"),
        place=first.place,
        title="All ranks are in one collective: sizes may differ",
        check="does each rank bring as many elements? TORCH_DISTRIBUTED_DEBUG=DETAIL compares them "
        "and names the ranks; if so, the network between them",
    )


_SIZED = re.compile(r"all_?(reduce|gather|to_all)|reduce_scatter|broadcast")
"""Collectives to which ranks bring tensors."""

_ABORTED = "most recent call first"
_TRACEBACK_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def unlike_calls(stacks: Sequence[Stack]) -> str | None:
    """Which rank stood in which collective, where several ranks did and not in the same one."""
    calls = {each.rank: each for each in stacks if each.rank is not None and each.call is not None}
    if len({(each.call, each.place) for each in calls.values()}) < 2:
        return None
    shown = sorted(calls.items())[:_MOST_RANKS]
    return "; ".join(f"rank {rank} {stack.stood}" for rank, stack in shown)


_MOST_RANKS = 4
"""Ranks whose places are shown. A guess."""


def _is_before(stack: Stack, other: Stack) -> bool:
    """Whether a process stands above the line at which another waits, in the same function."""
    mine, its = stack.own, other.own
    if mine is None or its is None or not other.meets:
        return False
    return (mine.file, mine.function) == (its.file, its.function) and mine.line < its.line


def _busy_with(stack: Stack) -> str | None:
    return next((name for name, form in _BUSY.items() if re.search(form, stack.doing)), None)


def _alone(stack: Stack) -> Found | None:
    """What the only process that is shown is busy with, if others may wait for it."""
    name = None if stack.meets else _busy_with(stack)
    if name is None:
        return None
    return Found(
        id=name,
        what=f"stands {stack.stood}; no other rank's stack is given",
        line=stack.as_line(stack.told),
        place=stack.place,
        title=_TITLES.get(name),
        check="do the other ranks wait in a collective? py-spy dump of each shows it",
    )


def compare(stacks: Sequence[Stack]) -> Found | None:
    """Which rank stands elsewhere, or what the only one does; None where all stand alike."""
    if len(stacks) < 2:
        return next(filter(None, map(_alone, stacks)), None)
    by_rank = {
        stack.rank if stack.rank is not None else at: stack for at, stack in enumerate(stacks)
    }
    groups = _by_place(by_rank, lines=True)
    if len(groups) > max(2, len(by_rank) // 3):  # busy ranks: lines tell little
        groups = _by_place(by_rank, lines=False)
    if len(groups) < 2:
        return None
    order = sorted(groups.values(), key=lambda ranks: (len(ranks), by_rank[ranks[0]].meets, ranks))
    odd, rest = order[0], order[-1]
    stack = by_rank[odd[0]]
    is_late = not stack.meets and _is_before(stack, by_rank[rest[0]])
    otherwise = "straggler-throttle" if is_late else "rank-divergent-decision"
    name = _busy_with(stack) or otherwise
    others = f"{len(rest)} others" if len(rest) > 1 else f"rank {rest[0]}"
    return Found(
        id=name,
        what=f"stands {stack.stood}; {others} {by_rank[rest[0]].stood}",
        line=stack.as_line(stack.told),
        ranks=tuple(odd),
        place=stack.place,
        title=_TITLES.get(name),
    )
