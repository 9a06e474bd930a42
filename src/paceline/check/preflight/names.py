"""Names of many nodes in one short text."""

import re
from collections.abc import Sequence


def fold_names(names: Sequence[str]) -> str:
    """As Slurm writes them, for `--nodelist` and `--exclude`.

    >>> fold_names(["node01", "node02", "node03", "login", "gpu7", "node10"])
    'node[01-03,10],login,gpu7'
    >>> fold_names(["10.0.0.4", "10.0.0.5"])
    '10.0.0.4,10.0.0.5'
    """
    bare = [name.rpartition("@")[2] for name in names]
    numbered: dict[tuple[str, int, str], list[int]] = {}
    plain: dict[str, tuple[str, int, str] | None] = {}
    for name in bare:
        found = re.fullmatch(r"([A-Za-z](?:.*?\D)?)(\d+)((?:\.[A-Za-z].*)?)", name)
        if found is None:
            plain[name] = None
            continue
        key = str(found[1]), len(found[2]), str(found[3])
        numbered.setdefault(key, []).append(int(found[2]))
        plain.setdefault(f"\0{key}", key)
    parts = []
    for name, group in plain.items():
        parts.append(name if group is None else _folded(group, numbered[group]))
    return ",".join(parts)


def _folded(key: tuple[str, int, str], numbers: list[int]) -> str:
    before, width, after = key
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"{before}{ranges[0][0]:0{width}}{after}"
    words = [
        f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
        for first, last in ranges
    ]
    return f"{before}[{','.join(words)}]{after}"
