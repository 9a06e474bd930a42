"""Environment variables, wherever they are set: NCCL's, Gloo's, PyTorch's and the launchers'."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.catalog.nccl import UNWANTED, wrong_value
from paceline.check.finding import Finding, Severity
from paceline.check.lint.configs.known_variables import (
    NCCL,
    OTHER_VALUES,
    OTHERS,
    PLUGINS,
    PREFIXES,
    RENAMED,
    STILL_READ,
    TORCH_NCCL,
)
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found
from paceline.check.lint.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """`NAME=value` as it is set somewhere. `value` may hold `$OTHER` that is known later."""

    name: str
    value: str
    path: str
    line: int
    column: int | None = None


def is_many(context: Context) -> bool:
    return context.nodes is not None and context.nodes > 1


def check_variables(variables: Sequence[Variable], context: Context) -> Iterator[Finding]:
    """What each variable does wrong by its own name and value, and with those beside it."""
    for each in variables:
        yield from _check_name(each)
        yield from _check_value(each, context)
        yield from _check_interface(each, context)
        yield from _check_libraries(each)
        yield from _check_master(each, context)


def _say(
    each: Variable,
    failure: str,
    what: str,
    fix: str | None = None,
    *,
    becomes: str | None = None,
    level: Severity = ERROR,
) -> Finding:
    said = found(failure, each.path, each.line, what, fix=fix, column=each.column, level=level)
    return replace(said, renames=(each.name, becomes)) if becomes else said


_OF_A_BUILD = re.compile(r"_(LIBS?|LIBDIR|INC|INCLUDE|ROOT|PATH|DIR|HOME|VERSION|PREFIX|URL)S?$")
"""Endings of names that compilers and images read."""


def _check_name(each: Variable) -> Iterator[Finding]:
    """A name that nothing reads, or that got another name."""
    if each.name in RENAMED:
        new, since = RENAMED[each.name]
        what = f"{each.name} has been {new} since {since}"
        fix = f"set {new} instead"
        yield _say(
            each,
            "nccl-env-deprecated",
            what,
            fix,
            becomes=None if each.name in OTHER_VALUES else new,
            level=INFO if each.name in STILL_READ or f"TORCH_{each.name}" == new else WARNING,
        )
        return
    known = NCCL | TORCH_NCCL | OTHERS
    if (
        each.name in known
        or not each.name.startswith(PREFIXES)
        or each.name.startswith(PLUGINS)
        or not re.fullmatch(r"[A-Z0-9_]+", each.name)
        or _OF_A_BUILD.search(each.name)
    ):
        return
    near = [name for name in _near(each.name, known) if _distance(each.name, name) <= 2]
    if near:
        what = f"nothing reads {each.name}: the name is {near[0]}"
        fix = f"write {near[0]}"
        yield _say(each, "nccl-env-deprecated", what, fix, becomes=near[0], level=WARNING)
    elif each.name.startswith("NCCL_") and f"TORCH_{each.name}" in TORCH_NCCL:
        what = f"NCCL does not read {each.name}; PyTorch reads TORCH_{each.name}"
        fix = f"set TORCH_{each.name} instead"
        yield _say(
            each, "nccl-env-deprecated", what, fix, becomes=f"TORCH_{each.name}", level=WARNING
        )


def _check_value(each: Variable, context: Context) -> Iterator[Finding]:
    """A value that NCCL does not take as it was meant, or that does harm."""
    wrong = wrong_value(each.name, each.value)
    if wrong is not None:
        level = Severity(wrong.level)
        yield _say(each, wrong.failure, wrong.what, wrong.fix, level=level)
        return
    row = UNWANTED.get(each.name)
    if row is None or each.name in RENAMED or not row.harms(each.value) or "$" in each.value:
        return
    if row.failure == "ethernet-fallback" and context.nodes == 1:
        return
    what = f"{each.name}={each.value.strip()}: {row.reason}"
    yield _say(each, row.failure, what, f"remove {each.name}", level=Severity(row.level))


def _near(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=3, cutoff=0.8)


def _distance(one: str, other: str) -> int:
    """Letters to change, add or take away (Levenshtein)."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        before, row[0] = row[0], number
        for place, against in enumerate(other, start=1):
            before, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, before + (letter != against)),
            )
    return row[-1]


_VIRTUAL = re.compile(r"(docker|virbr|br-|veth|cni|flannel|cali|tun|kube|lxc)")


def _check_interface(each: Variable, context: Context) -> Iterator[Finding]:
    """The interface that NCCL or Gloo is told to use."""
    if each.name not in {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"}:
        return
    value = each.value.strip()
    if not value or "$" in value or context.nodes == 1:
        return
    is_gloo = each.name.startswith("GLOO")
    taken = value.lstrip("=")
    if is_gloo and value[0] in "^=!":
        what = (
            f"Gloo takes the whole name of an interface, not `{value}`: signs such as ^ are NCCL's"
        )
        fix = "write the whole name of the interface between the nodes"
        yield _say(each, "gloo-ifname-missing", what, fix)
        return
    if value.startswith("^"):
        return
    first = taken.split(",")[0].split(":")[0]
    if first == "lo" or first.startswith("lo,"):
        what = f"{each.name}={value} is the loopback: no other node can be reached over it"
        fix = (
            "name the interface that the nodes reach each other by, "
            + ("" if is_gloo else "or exclude: ^lo,docker0; ")
            + "`ip -br addr` lists them"
        )
        yield _say(
            each,
            "gloo-loopback-fullmesh" if is_gloo else "nccl-wrong-interface",
            what,
            fix,
            level=ERROR if is_many(context) else INFO,
        )
    elif _VIRTUAL.match(first):
        what = f"{each.name}={value} is a bridge inside one machine, with the same address on each"
        fix = "name the interface that the nodes reach each other by"
        yield _say(
            each,
            "gloo-ifname-missing" if is_gloo else "nccl-wrong-interface",
            what,
            fix,
            level=ERROR if is_many(context) else INFO,
        )
    elif re.fullmatch(r"[\d.]+(/\d+)?", first):
        what = f"{each.name}={value} is an address; it takes the name of an interface"
        fix = "write the interface that has this address: `ip -br addr` lists them"
        yield _say(each, "gloo-ifname-missing" if is_gloo else "nccl-wrong-interface", what, fix)


def _check_libraries(each: Variable) -> Iterator[Finding]:
    """Libraries that are put before those that torch was built with."""
    if each.name == "LD_PRELOAD" and "libnccl" in each.value:
        what = f"LD_PRELOAD puts {each.value} in place of the NCCL that torch came with"
        fix = "unset it, or be sure that every node has the same file"
        yield _say(each, "nccl-version-mismatch", what, fix)


LOOPBACK = re.compile(r"(?i)^\[?(localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0)\]?$")


FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def wrong_host(value: str) -> tuple[str, str] | None:
    """The failure and why, where a text stands for no machine of the job."""
    if re.fullmatch(r"\$\{?SLURM_(JOB_|STEP_)?NODELIST\}?", value):
        return "dns-unresolvable-master", "a list of nodes, node[01-04], is not a host name"
    if re.fullmatch(r"\$\{?SLURM_SUBMIT_HOST\}?", value):
        return "rendezvous-c10d-timeout", "the host that ran sbatch is not one of the job's nodes"
    return None


def _check_master(each: Variable, context: Context) -> Iterator[Finding]:
    """Where the ranks are told to meet."""
    value = each.value.strip()
    if each.name in {"MASTER_ADDR", "PET_MASTER_ADDR"}:
        if context.nodes != 1 and (wrong := wrong_host(value)) is not None:
            yield _say(each, wrong[0], f"{each.name}={value}: {wrong[1]}", FIRST_NODE, level=ERROR)
        elif LOOPBACK.match(value) and is_many(context):
            what = f"{each.name}={value} names a different machine on each of {context.nodes} nodes"
            fix = "set it to an address of the first node that the others reach"
            yield _say(each, "rendezvous-c10d-timeout", what, fix)
    refuses = (context.version("torch") or (2,)) >= (2,)
    if each.name in {"MASTER_PORT", "PET_MASTER_PORT"} and value.isdigit() and refuses:
        yield from check_port(each.path, each.line, each.name, int(value), column=each.column)


def check_port(
    path: str, line: int, name: str, port: int, *, column: int | None = None
) -> Iterator[Finding]:
    """A port that an ordinary user's process cannot bind."""
    if 0 < port < 1024:
        what = f"{name} {port} is below 1024: only root may listen there"
        fix = "take one between 20000 and 32767"
        yield found("port-in-use", path, line, what, fix, column=column)
    elif port > 65535:
        what = f"{name} {port} is not a port: the highest is 65535"
        fix = "take one between 20000 and 32767"
        yield found("port-in-use", path, line, what, fix, column=column)
