"""What one line of a log says of itself: rank, host, time, and the message that is left.

Launchers and loggers write these in front, often several one after another: torchrun `[rank3]:`,
`[default3]:`; `srun -l` `3: `; mpirun and Horovod `[1,3]<stderr>:`; Ray `(Worker pid=7, ip=...)`;
stern and docker compose; pdsh (DeepSpeed) `node2: `; time stamps of Python, loguru, glog,
TensorFlow, Kubernetes and syslog; NCCL `host:pid:tid [device]`. They are taken off one by one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.catalog.load import read_shipped

MAX_LINE = 4096
"""Characters of a line that are looked at. The longest message in the catalog's sources that
carries its numbers late (CUDA out of memory, with its advice) has about 700."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line. What it does not say is None."""

    source: str
    number: int
    raw: str
    """As it stands in the file, without colours; cut at MAX_LINE."""

    message: str
    """Without what launchers and loggers put in front."""

    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    time_s: float | None = None
    """Seconds in the year, as no form but one says the year; for order alone."""

    level: str | None = None
    """One capital letter: I, W, E, F, D."""

    writer: str = field(default="")
    """Who wrote it, as far as the line says: lines of one traceback share it."""


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_ANSI_BYTES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_LEVELS = {"WARNING": "W", "WARN": "W", "ERROR": "E", "CRITICAL": "F", "FATAL": "F", "INFO": "I"}
_TOKENS = {
    "<CLOCK>": r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d+)?)",
    "<DATE>": r"\d{4}[-/](?P<mo>\d\d)[-/](?P<d>\d\d)",
    "<MONTH_DAY>": r"(?P<mo>\d\d?)(?P<d>\d\d)",
    "<SYSLOG_DAY>": r"(?P<mon>[A-Z][a-z]{2}) +(?P<d>\d\d?)",
    "<LEVEL>": r"(?P<level>DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)",
}
_MONTHS = {
    name: number + 1
    for number, name in enumerate(re.findall("...", "JanFebMarAprMayJunJulAugSepOctNovDec"))
}
_FORMS = [
    re.sub("<[A-Z_]+>", lambda token: _TOKENS[token[0]], form)
    for row in read_shipped("line_forms.toml").values()
    for form in row["forms"]
]
_NAME = re.compile(r"\(\?P<(\w+)>")
_ANY_FORM = re.compile(
    "|".join(
        _NAME.sub(rf"(?P<\1_{at}>", form) + f"(?P<form_{at}>)" for at, form in enumerate(_FORMS)
    )
)
"""All forms in one expression: names of groups end in the form's number; `form_7` is of form 7."""

_GROUPS = [
    {name: _ANY_FORM.groupindex[f"{name}_{at}"] for name in _NAME.findall(form)}
    for at, form in enumerate(_FORMS)
]
"""Numbers of each form's groups, by their names."""
_RAY_NODE = re.compile(r"\bnode \((?:ID: \w+, )?IP: (?P<host>[\w.:]+?)[,)]")
_ANYWHERE = re.compile(
    r"\[Rank (?P<a>\d+)\]|\bRank (?P<b>\d+)\]|^\[rank(?P<c>\d+)\]|\[RANK[:= ](?P<d>\d+)\]"
)


def without_colours(text: bytes) -> bytes:
    """The text without terminal colours and titles; line ends stay."""
    return _ANSI_BYTES.sub(b"", text) if b"\x1b" in text else text


def read_line(raw: str, *, source: str, number: int) -> Line:
    """Take off, one by one, what was written in front of the message.

    >>> read_line("[rank3]:[E321 02:07:08.4 P.cpp:607] [Rank 3] bad", source="-", number=1).message
    'bad'
    """
    raw = _ANSI.sub("", raw.rstrip("\r\n"))[:MAX_LINE] if "\x1b" in raw else raw.rstrip("\r\n")
    raw = raw[:MAX_LINE]
    rest, writer = raw, ""
    seen: dict[str, str] = {}
    for _ in range(8):
        match = _ANY_FORM.match(rest)
        if match is None or match.lastgroup is None:
            break
        form = int(match.lastgroup.removeprefix("form_"))
        said = {name: match[group] for name, group in _GROUPS[form].items() if match[group]}
        writer += _take(seen, said)
        rest = rest[match.end() :]
    is_named = "rank" not in seen and any(word in raw for word in ("Rank ", "[rank", "[RANK"))
    if is_named and (named := _ANYWHERE.search(raw)):
        seen["rank"] = next(group for group in named.groups() if group)
    if "host" not in seen and "IP: " in raw and (node := _RAY_NODE.search(raw)):
        seen["host"] = node["host"]
    return Line(
        source=source,
        number=number,
        raw=raw,
        message=rest,
        rank=int(seen["rank"]) if "rank" in seen else None,
        local_rank=int(seen["local"]) if "local" in seen else None,
        host=seen.get("host"),
        pid=int(seen["pid"]) if "pid" in seen else None,
        time_s=_seconds(seen) if "h" in seen else None,
        level=seen.get("level"),
        writer=writer,
    )


def with_rank(line: Line, rank: int | None, host: str | None = None) -> Line:
    """The line, with what its file's name says where it says nothing itself."""
    if (rank is None or line.rank is not None) and (host is None or line.host is not None):
        return line
    return replace(
        line,
        rank=line.rank if line.rank is not None else rank,
        host=line.host if line.host is not None else host,
    )


def _take(seen: dict[str, str], said: Mapping[str, str]) -> str:
    """Note what a prefix says that none before it has; what of it tells writers apart."""
    who = ""
    for name, word in (("rank", "rank"), ("local", "local"), ("host", ""), ("pid", "pid")):
        if name in said and name not in seen:
            seen[name] = said[name]
            who += f"{word}{said[name]} " if name != "pid" or "actor" in said else ""
    if "h" in said and "h" not in seen:
        seen |= {name: said[name] for name in ("mon", "mo", "d", "h", "m", "s") if name in said}
    if level := said.get("glog") or _LEVELS.get(said.get("level", "")):
        seen.setdefault("level", level)
    return who


def _seconds(clock: Mapping[str, str]) -> float:
    month = _MONTHS.get(clock.get("mon", ""), 0) or int(clock.get("mo", 0))
    days = month * 31 + int(clock.get("d", 0))
    minutes = int(clock["h"]) * 60 + int(clock["m"])
    return days * 86400.0 + minutes * 60 + float(clock["s"].replace(",", "."))
