"""Units at the edge: text a person writes to plain SI numbers, and back.

Inside the package every number is plain: bytes, seconds, FLOPs, bytes per second. Only this
module knows GiB, TFLOP/s, hours and billions.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

_DIGITS = r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*"
_NUMBER = re.compile(rf"^{_DIGITS}([A-Za-z/]*)")
_PART = re.compile(rf"{_DIGITS}([A-Za-z]+)")

_SEVERAL = re.compile(r"^\s*([1-9][0-9]*)\s*[xX×*]\s*(?=[0-9])")

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


def _split(text: str, kind: str, example: str, *, is_all: bool = True) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if match is None or (is_all and text[match.end() :].strip()):
        raise ValueError(f"{text!r} is not {kind}; write it like {example}")
    return float(match.group(1).replace("_", "")), match.group(2)


def _finite(number: float, value: float | str) -> float:
    """The number, which is one: `1e400` is read as infinity, and YAML has `.inf` and `.nan`.

    Raises:
        ValueError: It is infinite, no number, or too large for a float.
    """
    try:
        is_finite = math.isfinite(number)
    except OverflowError:  # an int of hundreds of digits
        is_finite = False
    if not is_finite:
        text = str(value) if isinstance(value, str | float) else "a number of hundreds of digits"
        raise ValueError(f"{text[:40]} is no finite number that can be computed with")
    return number


def counted(count: int, word: str) -> str:
    """A count with its word, in the plural but for one.

    >>> counted(1, "node"), counted(3, "node")
    ('1 node', '3 nodes')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def numbered(word: str, numbers: Iterable[int]) -> str:
    """A word with the numbers that it stands for.

    >>> numbered("rank", [3]), numbered("rank", [1, 3])
    ('rank 3', 'ranks 1, 3')
    """
    listed = [str(number) for number in numbers]
    return f"{word}{'' if len(listed) == 1 else 's'} {', '.join(listed)}"


def with_article(name: str) -> str:
    """A name with `a` or `an`, by its sound: letters are spelled, a word is read.

    >>> with_article("H100"), with_article("B200"), with_article("Gaudi3"), with_article("olmo")
    ('an H100', 'a B200', 'a Gaudi3', 'an olmo')
    """
    is_spelled = name[:1].isupper() and not name[1:2].islower()
    return f"{'an' if name[:1] in ('AEFHILMNORSX' if is_spelled else 'AEIOaeio') else 'a'} {name}"


def parse_bytes(value: float | str) -> int:
    """Bytes. GB is 10^9 and GiB is 2^30; a plain number is bytes.

    >>> parse_bytes("80 GiB")
    85899345920
    """
    if not isinstance(value, str):
        return round(_finite(value, value))
    number, unit = _split(value, "a size in bytes", "80 GiB or 512MB")
    if unit.lower() not in _BYTES:
        raise ValueError(
            f"{value!r} has no unit of bytes; write it like 80 GiB or 512MB, "
            "with a unit of B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB"
        )
    return round(_finite(number * _BYTES[unit.lower()], value))


def parse_count(value: float | str) -> int:
    """A count of parameters, tokens or samples. K, M, B and T are powers of a thousand.

    >>> parse_count("7B")
    7000000000
    """
    if not isinstance(value, str):
        if _finite(value, value) != int(value):
            raise ValueError(f"{value} is no whole number; billions are written like 7.5B")
        return int(value)
    number, unit = _split(value, "a count", "7B, 350M or 1e9")
    if unit.lower() not in _COUNTS:
        raise ValueError(f"{value!r} is not a count; write it like 7B, 350M or 1e9")
    return round(_finite(number * _COUNTS[unit.lower()], value))


def parse_bytes_per_s(value: float | str) -> float:
    """Bytes per second. A small b is bits, a capital B is bytes; words after it are no part of it.

    Several of a kind are written `8x400Gb/s` and count together.

    >>> parse_bytes_per_s("400Gb/s InfiniBand")
    50000000000.0
    >>> parse_bytes_per_s("8 x 400Gb/s")
    400000000000.0
    """
    if isinstance(value, int | float):
        return float(_finite(value, value))
    several = _SEVERAL.match(value)
    if several is not None:
        return _finite(int(several.group(1)) * parse_bytes_per_s(value[several.end() :]), value)
    number, unit = _split(value, "a bandwidth", "400Gb/s or 50GB/s", is_all=False)
    base, slash, second = unit.partition("/")
    if base.lower().endswith("bps") and not slash:
        base, slash, second = base[:-2], "/", "s"
    scale = _BYTES.get(base.lower())
    if scale is None or not slash or second.lower() != "s":
        raise ValueError(f"{value!r} is not a bandwidth; write it like 400Gb/s or 50GB/s")
    return _finite(number * scale, value) / (8 if base.endswith("b") else 1)


NETWORKS = {
    **dict.fromkeys(("infiniband", "ib", "edr", "hdr", "ndr", "xdr"), "infiniband"),
    **dict.fromkeys(("roce", "rocev2"), "roce"),
    **dict.fromkeys(("ethernet", "eth", "tcp"), "tcp"),
    **dict.fromkeys(("omni-path", "opa"), "omni-path"),
    **{kind: kind for kind in ("efa", "slingshot", "tcpx", "thunderbolt", "rdma")},
}
"""Word -> kind of the catalog's links; `rdma` is any with remote memory access."""


def split_network(text: str) -> tuple[str, str | None]:
    """A network as a person writes it -> its rate alone, and the kind of the words beside it.

    >>> split_network("8x400Gb/s InfiniBand"), split_network("100GbE")
    (('8x400Gb/s', 'infiniband'), ('100Gb/s', 'tcp'))
    >>> split_network("Ethernet, 10 Gbit/s"), split_network("400Gb/s")
    (('10 Gb/s', 'tcp'), ('400Gb/s', None))
    """
    spelled = re.sub(r"(?i)(?<=[kmgt])be\b", "b/s Ethernet", text)
    spelled = re.sub(r"(?i)(?<=[kmgt])bit(?=/s|ps\b)", "b", spelled)
    words = [word.strip(",()") for word in spelled.split()]
    named = {word for word in words if re.fullmatch(r"[A-Za-z][A-Za-z0-9-]+", word)}
    named = {word for word in named if not re.fullmatch(r"(?i)[kmgt]?i?bps", word)}
    kinds = {NETWORKS.get(word.lower()) for word in named}
    if None in kinds or len(kinds) > 1:
        raise ValueError(
            f"{text!r} names no one network; write the rate and one of InfiniBand, RoCE, EFA, "
            "Slingshot, Omni-Path, TCPX, Thunderbolt, RDMA or Ethernet"
        )
    rate = " ".join(word for word in words if word and word not in named)
    return rate, next(iter(kinds), None)


def parse_seconds(value: float | str) -> float:
    """Seconds, from `30m`, `1.5h`, `250ms`, `2m 30s`, or a plain number of seconds.

    >>> parse_seconds("30m"), parse_seconds("2 minutes 30s")
    (1800.0, 150.0)
    """
    if isinstance(value, int | float):
        return float(_finite(value, value))
    parts, end = [], 0
    while part := _PART.match(value, end):
        parts.append((float(part[1].replace("_", "")), part[2].lower()))
        end = part.end()
    if not parts or value[end:].strip() or any(unit not in _SECONDS for _, unit in parts):
        raise ValueError(
            f"{value!r} is not a duration; write it like 30m, 1.5h or 90s, "
            "with a unit of us, ms, s, m, h or d"
        )
    return _finite(sum(number * _SECONDS[unit] for number, unit in parts), value)


def _scaled(value: float, units: list[tuple[str, float]]) -> str:
    for unit, scale in units:
        if abs(value) >= scale:
            return f"{significant(value / scale)} {unit}".strip()
    return f"{significant(value)} {units[-1][0]}".strip()


def significant(value: float, digits: int = 3) -> str:
    """A number rounded to so many digits, with thousands apart and never as 1e+03.

    >>> significant(1234.5)
    '1,230'
    """
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):,.15g}" if "e+" in rounded else rounded


def format_bytes(num_bytes: float, digits: int = 3) -> str:
    """Three digits, or as many as are asked for, and a binary unit.

    >>> format_bytes(15_032_385_536)
    '14 GiB'
    """
    if abs(num_bytes) < 2**10:
        return f"{num_bytes:.0f} B"
    for unit, power in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        scaled = num_bytes / 2**power
        if abs(scaled) >= 1:
            whole = scaled >= 10 ** (digits - 1)
            return f"{scaled:.0f} {unit}" if whole else f"{scaled:.{digits}g} {unit}"
    raise AssertionError("a size of at least 1 KiB has a unit")


def bytes_apart(*sizes: float) -> list[str]:
    """Sizes side by side, a need and its limit, with as many digits as tell unequal ones apart.

    >>> bytes_apart(77_331_000_000, 77_309_411_328), bytes_apart(2**33, 2**33)
    (['72.02 GiB', '72 GiB'], ['8 GiB', '8 GiB'])
    """
    digits = range(3, 16)  # a float's
    return _apart(
        [round(size) for size in sizes], [partial(format_bytes, digits=n) for n in digits]
    )


def format_amount(value: float) -> str:
    """Whole, or two digits where it is below ten.

    >>> format_amount(0.4567), format_amount(53230.2)
    ('0.46', '53,230')
    """
    return f"{value:.2g}" if 0 < value < 9.95 else f"{value:,.0f}"


def dollars_apart(*sums: float) -> list[str]:
    """Sums of money side by side, a cost and its limit: whole dollars, with cents where unequal
    ones would look the same.

    >>> dollars_apart(1188.2, 1188), dollars_apart(1188.2, 1000)
    (['$1,188.20', '$1,188.00'], ['$1,188', '$1,000'])
    """
    return _apart(sums, ["${:,.0f}".format, "${:,.2f}".format])


def seconds_apart(*durations: float) -> list[str]:
    """Durations side by side, a time and its limit, with what tells unequal ones apart.

    >>> seconds_apart(4543, 4500), seconds_apart(7200, 4500), seconds_apart(4500.2, 4500)
    (['1h 15m 43s', '1h 15m 00s'], ['2h 00m', '1h 15m'], ['4500.2 s', '4500.0 s'])
    """
    finer = [f"{{:.{digits}f}} s".format for digits in range(10)]
    return _apart(durations, [format_seconds, _format_clock, *finer])


def format_interval(seconds: float) -> str:
    """Time between failures: whole days from ten days on.

    >>> format_interval(22_803_000), format_interval(7200)
    ('264 days', '2h 00m')
    """
    days = seconds / 86_400
    return format_seconds(seconds) if days < 10 else f"{days:,.0f} days"


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h {minutes % 60:02d}m {rest:02d}s"


def _apart(values: Sequence[float], formats: Iterable[Callable[[float], str]]) -> list[str]:
    """The values in the first of the formats, and else the last, in which unequal ones differ."""
    for shown in formats:
        texts = [shown(value) for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def format_count(count: float) -> str:
    """Three digits and a power of a thousand.

    >>> format_count(8_030_261_248)
    '8.03B'
    """
    return _scaled(count, [("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1)]).replace(
        " ", ""
    )


def format_seconds(seconds: float) -> str:
    """A duration the eye takes in at once.

    >>> format_seconds(5403)
    '1h 30m'
    """
    if seconds < 1:
        return f"{significant(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{significant(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def format_flops_per_s(flops_per_s: float) -> str:
    """Three digits and a unit of FLOP/s.

    >>> format_flops_per_s(989e12)
    '989 TFLOP/s'
    """
    return _scaled(
        flops_per_s,
        [("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1)],
    )
