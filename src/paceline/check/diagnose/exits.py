"""How processes ended, as launchers tell it in lines and torchrun in a table, and what it says."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.catalog.failure import load_failures
from paceline.check.diagnose.candidate import Candidate, level_of
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.line import Line, read_line
from paceline.check.diagnose.messages import say
from paceline.check.diagnose.ranks import note_first_rank
from paceline.check.diagnose.seen import Exit, Seen

_CODE = re.compile(
    r"(?:exit ?code:? *(?P<a>-?\d+)\) local_rank: (?P<local>\d+)(?: \(pid: (?P<pid>\d+)\))?)"
    r"|(?:sigkill_handler\].*return code = (?P<b>-?\d+))"
    r"|(?:return code = (?P<c>-?\d+))"
    r"|(?:srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+))"
    r"|(?:Process (?P<pid2>\d+) got signal: (?P<sig>\d+))"
    r"|(?:Signal (?P<sig2>\d+) \(SIG\w+\) received by PID (?P<pid3>\d+))"
    r"|(?:(?P<svc>[\w.-]+) exited with code (?P<d>-?\d+))"
    r"|(?i:\b(?:exit|return|termination)[ _-]?(?:code|status)(?:s| of| was| is)?[\"']?"
    r"\s*[:=(]*\s*(?P<e>-?\d{1,3})\b(?![.,]\d))"
    r"|(?i:\b(?:exit[ _-]?value|error[ _-]?code)(?: of| was| is)?[\"']?"
    r"\s*[:=(]*\s*(?P<h>-\d{1,2})\b(?![.,]\d))"
    r"|(?i:\bexit(?:s|ed|ing)?(?: with| on| due to)?(?: (?:code|status|value))?[:=]? "
    r"?(?P<f>-?\d{1,3})\b(?![.,]\d| [a-z]))"
    r"|(?:\] Error (?P<g>1\d\d)\b)"
    r"|(?i:\b(?:by|on|with|to|got|received|caught|due to) (?:a )?(?:signal:? ?)(?P<sig4>\d{1,2})\b)"
    r"|(?:\b(?:by|on|with|got|signal:?)[ (<]*(?:Signals\.)?(?P<named>SIG[A-Z]+)\b(?! by OOM))"
)
_SIGNALS = {"SIGKILL": 9, "SIGSEGV": 11, "SIGBUS": 7, "SIGABRT": 6, "SIGFPE": 8, "SIGILL": 4}
_HOW = {
    "Killed": -9,
    "Out Of Memory": -9,
    "Segmentation fault": -11,
    "Bus error": -7,
    "Aborted": -6,
    "Terminated": -15,
    "Floating point exception": -8,
}


def exits_of(line: Line) -> list[Exit]:
    """The ends of processes that a launcher's line tells."""
    match = _CODE.search(line.raw)
    if match is None:
        return []
    said = match.groupdict()
    code = next((int(said[name]) for name in "abcdefgh" if said[name]), None)
    if said["named"]:
        code = -_SIGNALS[said["named"]] if said["named"] in _SIGNALS else None
    rank, host = line.rank, line.host
    if said["how"]:
        number = re.search(r"Exited with exit code (\d+)", said["how"])
        code = (
            int(number[1])
            if number
            else next((each for name, each in _HOW.items() if said["how"].startswith(name)), 1)
        )
        rank, host = int(re.split(r"[,-]", said["tasks"])[0]), said["host"]
    for name in ("sig", "sig2", "sig4"):
        if said[name]:
            code = -int(said[name])
    if code is not None and 128 < code < 128 + 65:  # as a shell says that a signal ended it
        code = 128 - code
    if code is None or code == 0 or not -64 <= code <= 255:
        return []
    pid = said["pid"] or said["pid2"] or said["pid3"]
    return [Exit(line=line, code=code, rank=rank, host=host, pid=int(pid) if pid else None)]


class ExitTable:
    """torchrun's table of failures, read line by line."""

    _FIELD = re.compile(
        r"^\s*(?P<name>time|host|rank|exitcode|error_file|traceback)\s+: (?P<value>.*)"
    )

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._left = 0
        self._fields: dict[str, str] = {}
        self._is_root = False
        self._line: Line | None = None

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def header(self, line: Line) -> None:
        """A line that begins the table, or its part about the root cause."""
        self._commit()
        self._is_root = "Root Cause" in line.raw
        self._left = 400

    def take(self, line: Line) -> None:
        """The next line."""
        if not self._left:
            return
        self._left -= 1
        match = self._FIELD.match(line.message) or self._FIELD.match(line.raw)
        if match is None:
            return
        if match["name"] == "time":
            self._commit()
        self._fields[match["name"]] = match["value"]
        if match["name"] == "exitcode":
            self._line = line

    def end(self) -> None:
        """The source is over."""
        self._commit()
        self._left = 0

    def _commit(self) -> None:
        fields, line = self._fields, self._line
        self._fields, self._line = {}, None
        code = re.match(r"(-?\d+)(?: +\(pid: (\d+)\))?", fields.get("exitcode", ""))
        if code is None or line is None:
            return
        rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", fields.get("rank", ""))
        if rank and rank[2]:
            note_first_rank(self._seen, replace(line, rank=int(rank[1]), local_rank=int(rank[2])))
        when = read_line(fields.get("time", "") + " x", source=line.source, number=line.number)
        self._seen.exits.append(
            Exit(
                line=replace(line, time_s=when.time_s),
                code=int(code[1]),
                rank=int(rank[1]) if rank else None,
                host=fields.get("host", "").strip() or None,
                pid=int(code[2]) if code[2] else None,
                first_observed=self._is_root,
            )
        )


_ENDS = {
    -11: "segfault-exit-11",
    -7: "sigbus-exit-7",
    -9: "host-oom-sigkill",
    -1: "sighup-terminal-closed",
}
_CODES = {name: code for code, name in _ENDS.items()} | {"shm-too-small": -7}


def ended(seen: Seen, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """What the way in which a process ended says."""
    for code, name in _ENDS.items():
        ends = [each for each in seen.exits if each.code == code]
        if not ends:
            continue
        first = min(ends, key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
        known = next((each for each in candidates if each.id == name), None)
        if known is not None:
            known.rank = known.rank if known.rank is not None else first.rank
            continue
        yield Candidate(
            id=name,
            level=level_of(load_failures()[name]),
            confidence=Confidence.LIKELY,
            lines=[each.line for each in ends],
            what=say(name, first.line, {}, [first.rank] if first.rank is not None else []),
            count=len(ends),
            rank=first.rank,
        )


def rank_of_exit(seen: Seen, failure: str | None = None) -> int | None:
    """Rank of the process that ended first as a failure ends it; else with an error of its own."""
    code = _CODES.get(failure or "")
    ends = [
        each
        for each in seen.exits
        if each.rank is not None and (each.code == code if code else each.code > 0)
    ]
    ends.sort(key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
    return ends[0].rank if ends else None
