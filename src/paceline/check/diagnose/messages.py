"""Says what happened in the log's own names and numbers, failure by failure."""

import re
from collections.abc import Callable, Mapping, Sequence

from paceline.catalog.failure import load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.line import Line

Said = Mapping[str, str]


def say(name: str, line: Line, groups: Said, ranks: Sequence[int]) -> str:
    """One sentence about a failure, from the line that shows it."""
    on = who(ranks, line)
    said = _WORDS[name](line, groups) if name in _WORDS else _of_table(name, line, groups)
    return f"{on}{said or load_failures()[name].title}"


def who(ranks: Sequence[int], line: Line | None = None) -> str:
    """`Rank 3: `, `Ranks 0-7: `, the host or the local rank alone, or nothing."""
    if ranks:
        return f"Rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}: "
    if line is not None and line.host:
        return f"Host {line.host}: "
    if line is not None and line.local_rank is not None:
        return f"Local rank {line.local_rank}: "
    return ""


def spans(numbers: Sequence[int]) -> str:
    """Numbers as spans: 0-3, 7.

    >>> spans([7, 0, 1, 2, 3])
    '0-3, 7'
    """
    ordered = sorted(set(numbers))
    parts: list[list[int]] = []
    for number in ordered:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join(texts) if len(texts) <= 12 else ", ".join([*texts[:11], "..."])


_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size_bytes(text: str | None) -> float | None:
    """`2.57 GiB` -> bytes."""
    match = re.match(r"([\d.]+) ?(\w+)", text or "")
    return float(match[1]) * _SIZES[match[2]] if match and match[2] in _SIZES else None


class OutOfMemory:
    """The numbers of CUDA's out-of-memory message; None where it does not say them."""

    def __init__(self, text: str) -> None:
        def find(form: str) -> str | None:
            match = re.search(form, text)
            return match[1] if match else None

        size = r"([\d.]+ [KMG]?i?B)"
        self.want = find(rf"Tried to allocate {size}")
        self.gpu = find(r"\(?GPU (\d+)")
        self.capacity = find(rf"total capacity of {size}") or find(rf"; {size} total capacity")
        self.free = find(rf"of which {size} is free") or find(rf"; {size} free")
        self.allocated = find(rf"allocated memory {size}") or find(rf"; {size} already allocated")
        self.unallocated = find(rf"{size} is reserved by PyTorch but unallocated")
        reserved = find(rf"{size} reserved in total by PyTorch")
        if self.unallocated is None and reserved and self.allocated:
            gap = (size_bytes(reserved) or 0) - (size_bytes(self.allocated) or 0)
            self.unallocated = f"{max(0.0, gap) / 2**30:.2f} GiB"
        self.others = len(re.findall(r"Process \d+ has", text))

    @property
    def is_fragmented(self) -> bool:
        """More lies reserved and unused than was asked for, and it is a good part of the card."""
        want, idle = size_bytes(self.want), size_bytes(self.unallocated)
        capacity = size_bytes(self.capacity)
        if want is None or idle is None:
            return False
        return idle >= want and (capacity is None or idle > 0.05 * capacity)

    def __str__(self) -> str:
        parts = [f"asked for {self.want}" if self.want else "could not allocate"]
        if self.gpu is not None:
            parts[0] += f" on GPU {self.gpu}"
        if self.free:
            parts.append(f"{self.free} of {self.capacity} free" if self.capacity else self.free)
        held = [f"PyTorch holds {self.allocated}"] if self.allocated else []
        if self.unallocated:
            more = ": more than was asked for" if self.is_fragmented else ""
            held.append(f"{self.unallocated} reserved and unused{more}")
        sentences = [", ".join(parts), " and has ".join(held)]
        return "CUDA out of memory: " + ". ".join(filter(None, sentences))


def _oom(line: Line, groups: Said) -> str:
    return str(OutOfMemory(line.message))


def _batch(line: Line, groups: Said) -> str:
    if "t" not in groups or "w" not in groups:
        return ""
    t, m, g, w = (int(groups[key]) for key in "tmgw")
    return (
        f"train_batch_size {t} is not micro batch {m} x accumulation {g} x world {w} = {m * g * w}"
    )


def _gloo(line: Line, groups: Said) -> str:
    match = re.search(r"Timed out waiting (\d+) ?ms for (send|recv)", line.raw)
    if not match:
        return ""
    way = "take" if match[2] == "send" else "send"
    return f"waited {int(match[1]) / 1000:g} s for another rank, which did not {way} in time"


_REASONS: Mapping[str, str] = read_shipped("slurm_reasons.toml")["reasons"]
"""Slurm's reasons, as on slurm.schedmd.com/job_reason_codes.html."""


def _queue(line: Line, groups: Said) -> str:
    if groups.get("error"):
        return f"Slurm refuses it: {groups['error']}"
    reason = groups.get("reason", "")
    limit = reason.startswith(("QOS", "Assoc", "MaxCpu", "MaxNode", "MaxMem", "MaxGRES"))
    told = "a limit of the account or QOS is reached" if limit else _REASONS.get(reason, "")
    return f"the job waits for {reason}: {told}" if told else f"the job waits: {reason}"


_WORDS: Mapping[str, Callable[[Line, Said], str]] = {
    "cuda-oom": _oom,
    "cuda-oom-fragmentation": _oom,
    "missing-set-device": _oom,
    "ds-batch-size-mismatch": _batch,
    "ds-config-before-dist-init": _batch,
    "gloo-peer-closed": _gloo,
    "slurm-job-pending": _queue,
}
"""Failures of which numbers are computed, or looked up. What the others say is in `said.toml`."""

_SAID = read_shipped("said.toml")


def _of_table(name: str, line: Line, groups: Said) -> str:
    row = _SAID.get("xid" if name.startswith("xid-") else name, {})
    known = {key: value.strip() for key, value in groups.items() if value}
    for form in row.get("find", ()):
        if found := re.search(form, line.message) or re.search(form, line.raw):
            known = found.groupdict() | known
    says = (each for each in row.get("say", ()) if set(_NAMES.findall(each)) <= known.keys())
    return next(says, "").format_map(known)


_NAMES = re.compile(r"\{(\w+)\}")
