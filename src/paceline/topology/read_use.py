"""What `nvidia-smi` and `rocm-smi` print of accelerators at work: use, heat, power, memory.

The fields of `nvidia-smi` are those of `nvidia-smi --help-query-gpu`. The keys of `rocm-smi --json`
changed between releases, so they are found by their words.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator. None is what its tool does not say."""

    gpu: int
    """Its number on the node, as its driver counts."""

    utilization: float | None = None
    """Share of the time, 0 to 1, in which it ran some kernel. A collective that waits is one."""

    memory_bytes: int | None = None
    """Used by all processes."""

    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_hz: float | None = None
    """Clock of its streaming multiprocessors, or compute units."""

    @property
    def power_share(self) -> float | None:
        """Power over its limit."""
        if self.power_w is None or not self.power_limit_w:
            return None
        return self.power_w / self.power_limit_w


NVIDIA_USE = (
    *("index", "utilization.gpu", "memory.used", "temperature.gpu", "power.draw"),
    *("enforced.power.limit", "clocks.sm"),
)
"""Fields of `nvidia-smi`."""

ROCM_USE = (
    *("--showuse", "--showmeminfo", "vram", "--showtemp", "--showpower", "--showmaxpower"),
    *("--showclocks", "--json"),
)
"""Arguments of `rocm-smi`."""


def read_nvidia_use(text: str) -> list[GpuSample]:
    """The GPUs in the output of `nvidia-smi` with the query above.

    >>> read_nvidia_use("0, 97, 61034, 71, 412.5, 700.00, 1755\\n")[0].power_share
    0.5892857142857143
    >>> read_nvidia_use("0, [N/A], 1, 40, [N/A], [N/A], [N/A]\\n")[0].utilization is None
    True
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(NVIDIA_USE) or not cells[0].isdecimal():
            continue
        use, memory, heat, power, limit, clock = map(_number, cells[1:])
        found.append(
            GpuSample(
                gpu=int(cells[0]),
                utilization=_times(use, 0.01),
                memory_bytes=None if memory is None else round(memory * 2**20),
                temperature_c=heat,
                power_w=power,
                power_limit_w=limit,
                clock_hz=_times(clock, 1e6),
            )
        )
    return found


def read_rocm_use(text: str) -> list[GpuSample]:
    """The accelerators in the output of `rocm-smi` with the arguments above.

    >>> read_rocm_use('{"card0": {"GPU use (%)": "55", "Average Graphics Package Power (W)": "9"}}')
    [GpuSample(gpu=0, utilization=0.55, ..., power_w=9.0, ...)]
    """
    try:
        cards: Any = json.loads(text[text.index("{") :])  # warnings may come before it
    except ValueError:
        return []
    numbered = sorted((int(key[4:]), key) for key in cards if re.fullmatch(r"card\d+", key))
    return [_rocm(number, cards[key]) for number, key in numbered]


def _rocm(number: int, card: Mapping[str, Any]) -> GpuSample:
    memory = _find(card, r"VRAM Total Used Memory \(B\)")
    return GpuSample(
        gpu=number,
        utilization=_times(_find(card, r"GPU use \(%\)"), 0.01),
        memory_bytes=None if memory is None else round(memory),
        temperature_c=_find(card, r"Temperature \(Sensor (junction|edge)\).*"),
        power_w=_find(card, r"(Average|Current Socket) Graphics Package Power \(W\)"),
        power_limit_w=_find(card, r"Max Graphics Package Power \(W\)"),
        clock_hz=_times(_find(card, r"sclk clock speed:?.*"), 1e6),
    )


def _find(card: Mapping[str, Any], key: str) -> float | None:
    """The first value whose key fits and that is a number; junction comes before edge."""
    fitting = sorted((name for name in card if re.fullmatch(key, name)), reverse=True)
    values = (_number(str(card[name]).strip("()").removesuffix("Mhz")) for name in fitting)
    return next((value for value in values if value is not None), None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # `[N/A]`, `[Not Supported]`


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 4)
