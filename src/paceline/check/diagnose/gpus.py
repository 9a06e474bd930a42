"""Which rank computes on which GPU, so that a line of the kernel about a GPU names a rank.

From NCCL's `rank 3 nranks 8 cudaDev 3 busId 3b000`, and from any line with a rank and a PCI
address.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from paceline.check.diagnose.line import Line

_NCCL = re.compile(r"\brank (?P<rank>\d+) n[Rr]anks \d+.{0,60} busId (?P<bus>[0-9a-f]+)")
_ADDRESS = r"[0-9a-fA-F]{4,8}:(?P<bus>[0-9a-fA-F]{2}):[0-9a-fA-F]{2}\b"
_PAIR = re.compile(rf"\b[Rr]ank[ =:]*(?P<rank>\d+)\b.{{0,80}}\b{_ADDRESS}")
_OF_GPU = re.compile(r"\((?:PCI:)?" + _ADDRESS)

Gpu = tuple[str | None, int]
"""(host, PCI bus)."""


def gpu_of_rank(line: Line) -> tuple[Gpu, int] | None:
    """The GPU and the rank that a line puts together."""
    if match := _NCCL.search(line.raw):
        return (line.host, int(match["bus"], 16) >> 12), int(match["rank"])
    if match := _PAIR.search(line.raw):
        return (line.host, int(match["bus"], 16)), int(match["rank"])
    return None


def with_rank_of_gpu(line: Line, ranks: Mapping[Gpu, int]) -> Line:
    """The line with the rank whose GPU it is about, where that can be only one."""
    match = _OF_GPU.search(line.raw)
    if line.rank is not None or match is None:
        return line
    bus = int(match["bus"], 16)
    on_host = {rank for (host, at), rank in ranks.items() if at == bus and host == line.host}
    anywhere = {rank for (_, at), rank in ranks.items() if at == bus}
    found = on_host or anywhere
    return replace(line, rank=found.pop()) if len(found) == 1 else line
