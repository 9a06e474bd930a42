"""Environment variables, wherever they are set: NCCL's, Gloo's, PyTorch's and the launchers'. Small
configurations that set them: environment files and Dockerfiles."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from paceline.catalog.load import read_shipped
from paceline.catalog.nccl import UNWANTED, wrong_value
from paceline.check.finding import Severity
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, Fault, Placed
from paceline.check.lint.context import Context
from paceline.check.lint.words import words_of

RENAMED: Mapping[str, tuple[str, str]] = {
    old: (new, since)
    for old, (new, since) in read_shipped("software.toml")["environment"]["renamed"].items()
}
"""Old name -> what is read instead, since when. The first six and the flight recorder's are still
read by torch, which warns (ProcessGroupNCCL.hpp, Utils.hpp `getCvarInt` lists); NCCL's own are
in its user guide's list of variables."""

STILL_READ = words_of("environment", "still_read")
"""Old names that work as before."""

OTHER_VALUES = words_of("environment", "other_values")
"""Old names whose values mean something else under the new one."""

TORCH_NCCL = words_of("environment", "torch_nccl")
"""Variables of ProcessGroupNCCL.hpp, torch 2.2 to 2.13."""

KNOWN = words_of("environment", "nccl") | TORCH_NCCL | words_of("environment", "others")
"""Those, variables of NCCL's user guide 2.28 and `NCCL_PARAM` in its sources, what images name its
folders, and others'."""

_NOT_OURS = re.compile(
    r"NCCL_(FASTRAK|GPUDIRECTTCPX|OFI|SHIMNET|GPU|PROFILE|INSPECTOR|SHARP|TESTS)_.*"
    r"|.*_(LIBS?|LIBDIR|INC|INCLUDE|ROOT|PATH|DIR|HOME|VERSION|PREFIX|URL)S?"
)
"""Names that network and profiler plugins, compilers and images read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """`NAME=value` as it is set somewhere. `value` may hold `$OTHER` that is known later."""

    name: str
    value: str
    line: int
    column: int | None = None


def check_variables(variables: Iterable[Variable], context: Context) -> Iterator[Fault]:
    """What each variable does wrong by its own name and value."""
    for each in variables:
        yield from _check_name(each)
        yield from _check_value(each, context)
        yield from _check_interface(each, context)
        yield from _check_master(each, context)
        if each.name == "LD_PRELOAD" and "libnccl" in each.value:
            what = f"LD_PRELOAD puts {each.value} in place of the NCCL that torch came with"
            fix = "unset it, or be sure that every node has the same file"
            yield Fault("nccl-version-mismatch", each, what, fix)


def _check_name(each: Variable) -> Iterator[Fault]:
    """A name that nothing reads, or that got another name."""
    name, level, fix = each.name, WARNING, ""
    becomes: str | None = None
    if name in RENAMED:
        becomes, since = RENAMED[name]
        what, fix = f"{name} has been {becomes} since {since}", f"set {becomes} instead"
        level = INFO if name in STILL_READ or f"TORCH_{name}" == becomes else WARNING
    elif re.fullmatch(r"(NCCL|TORCH_NCCL|CUDA|PYTORCH|GLOO)_[A-Z0-9_]*", name) and not (
        name in KNOWN or _NOT_OURS.fullmatch(name)
    ):
        near = difflib.get_close_matches(name, KNOWN, n=3, cutoff=0.8)
        becomes = next((one for one in near if _distance(name, one) <= 2), None)
        what, fix = f"nothing reads {name}: the name is {becomes}", f"write {becomes}"
        if becomes is None and name.startswith("NCCL_") and f"TORCH_{name}" in TORCH_NCCL:
            becomes = f"TORCH_{name}"
            what, fix = (
                f"NCCL does not read {name}; PyTorch reads {becomes}",
                f"set {becomes} instead",
            )
    if becomes is not None:
        renames = None if name in OTHER_VALUES else (name, becomes)
        yield Fault("nccl-env-deprecated", each, what, fix, level, renames=renames)


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


def _check_value(each: Variable, context: Context) -> Iterator[Fault]:
    """A value that NCCL does not take as it was meant, or that does harm."""
    wrong = wrong_value(each.name, each.value)
    if wrong is not None:
        yield Fault(wrong.failure, each, wrong.what, wrong.fix, Severity(wrong.level))
        return
    row = UNWANTED.get(each.name)
    if row is None or each.name in RENAMED or not row.harms(each.value) or "$" in each.value:
        return
    if row.failure != "ethernet-fallback" or context.nodes != 1:
        what = f"{each.name}={each.value.strip()}: {row.reason}"
        yield Fault(row.failure, each, what, f"remove {each.name}", Severity(row.level))


_VIRTUAL = re.compile(r"(docker|virbr|br-|veth|cni|flannel|cali|tun|kube|lxc)")


def _check_interface(each: Variable, context: Context) -> Iterator[Fault]:
    """The interface that the settings choose for NCCL."""
    value, id = each.value.strip(), "nccl-wrong-interface"
    if each.name not in {"NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"}:
        return
    if not value or "$" in value or value.startswith("^") or context.nodes == 1:
        return
    first = re.split("[,:]", value.lstrip("="))[0]
    fix = "name the interface that the nodes reach each other by"
    level = ERROR if (context.nodes or 1) > 1 else INFO
    if first == "lo":
        what = f"{each.name}={value} is the loopback: no other node can be reached over it"
        fix += ", or exclude: ^lo,docker0; `ip -br addr` lists them"
        yield Fault(id, each, what, fix, level)
    elif _VIRTUAL.match(first):
        what = f"{each.name}={value} is a bridge inside one machine, with the same address on each"
        yield Fault(id, each, what, fix, level)
    elif re.fullmatch(r"[\d.]+(/\d+)?", first):
        what = f"{each.name}={value} is an address; it takes the name of an interface"
        fix = "write the interface that has this address: `ip -br addr` lists them"
        yield Fault(id, each, what, fix)


def _check_master(each: Variable, context: Context) -> Iterator[Fault]:
    """The port at which the ranks are told to meet."""
    refuses = (context.version("torch") or (2,)) >= (2,)
    if each.name.removeprefix("PET_") == "MASTER_PORT" and each.value.strip().isdigit() and refuses:
        yield from check_port(each, each.name, int(each.value))


def check_port(at: Placed, name: str, port: int) -> Iterator[Fault]:
    """A port that an ordinary user's process cannot bind."""
    if 0 < port < 1024 or port > 65535:
        why = "is not a port: the highest is 65535"
        if port < 1024:
            why = "is below 1024: only root may listen there"
        fix = "take one between 20000 and 32767"
        yield Fault("port-in-use", at, f"{name} {port} {why}", fix)


_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*")


def is_environment(text: str) -> bool:
    """Whether every line that says something is `NAME=value`."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)]
    return bool(lines) and all(map(_ASSIGNMENT.fullmatch, lines))


def environment_variables(text: str) -> list[Variable]:
    """The variables of an environment file such as `.deepspeed_env` or `nccl.conf`."""
    return [
        Variable(name=match[1], value=match[2].strip("\"'"), line=number, column=1)
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _ASSIGNMENT.fullmatch(line)) is not None
    ]


def is_dockerfile(text: str) -> bool:
    """Whether it is a Dockerfile: its first instruction is FROM or ARG."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first) is not None and (
        re.search(r"(?im)^\s*FROM\s+\S+", text) is not None
    )


def dockerfile_variables(text: str) -> list[Variable]:
    """The variables of ENV lines, which a `\\` at the end continues."""
    found: list[Variable] = []
    is_env = goes_on = False
    for number, line in enumerate(text.split("\n"), start=1):
        body = line.strip()
        if not goes_on:
            start = re.match(r"(?i)ENV\s", body)
            is_env, body = start is not None, body[4:].strip() if start else body
        goes_on, body = body.endswith("\\"), body.removesuffix("\\").strip()
        if is_env:
            pairs = re.findall(r"([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)", body)
            old = re.match(r"([A-Za-z_]\w*)\s+(.+)", body)  # ENV NAME value
            for name, value in pairs or ([(old[1], old[2])] if old else []):
                found.append(Variable(name=name, value=value.strip("\"'"), line=number))
    return found
