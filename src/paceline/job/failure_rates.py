"""How often and in which ways a cluster fails: a preset, a line of text, or a YAML file.

    6.5e-3/node-day, weibull 0.8, rack 0.05
    kokolis-rsc1, repeat 0.02 x 10
    failures.yaml

A failure process is an input: operators differ in rate and mix, so none is built in but those that
were published.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from paceline.errors import JobError, Problem, did_you_mean
from paceline.job.misread import read_as
from paceline.job.section import Number, Positive, Seconds, section, shipped

Share = Annotated[Number, Field(ge=0, le=1)]
Above = Annotated[Number, Field(gt=0)]


@section
class FailuresSpec:
    """The failures of a cluster. Shares are of all failures; the rest take one whole node."""

    name: str = "given"
    """What the process is called."""

    per_node_day: Above
    """Failures of one node in a day, on the mean: those that stop the job. The presets' nodes have
    eight accelerators."""

    shape: Annotated[Number, Field(gt=0.2, le=5)] = 1.0
    """Shape of the Weibull gaps between two failures of one node. 1 is a Poisson process; below 1
    failures come in bursts, above 1 they come regularly. The mean rate stays."""

    process: Share = 54 / 419
    """Share that ends a process and leaves its node as it is. Llama 3's software bugs."""

    hang: Share = 0.0
    """Share in which a process stops making progress and does not end."""

    rack: Share = 0.0
    """Share that takes every node of a rack."""

    rack_size: Positive = 8
    """Nodes of a rack, next to each other."""

    switch: Share = 0.0
    """Share that takes every node behind a switch."""

    switch_size: Positive = 32
    """Nodes behind a switch, next to each other."""

    infant: Annotated[Number, Field(ge=1)] = 1.0
    """How many times as often nodes fail at the start; it falls exponentially to 1."""

    infant_days: Above = 3.0
    """Days in which the excess at the start falls to 37 %."""

    repeat_share: Share = 0.0
    """Share of the nodes that fail far more often than the others. The mean rate stays."""

    repeat_factor: Annotated[Number, Field(ge=1)] = 1.0
    """How many times as often."""

    excess_from_nodes: Positive | None = None
    """Nodes from which failures come more often than in proportion."""

    excess_exponent: Annotated[Number, Field(ge=0, le=2)] = 0.0
    """The rate of a node grows with (nodes / excess_from_nodes) to this power."""

    repair: Seconds = 4 * 3600.0
    """Until a lost node is back as a spare. A guess: a reboot and its checks; broken hardware takes
    days."""

    source: str = "given by the user"
    """Where the rate is from."""

    def at(self, num_nodes: int) -> float:
        """Failures of one node in a day, in a job of so many nodes."""
        if self.excess_from_nodes is None or num_nodes <= self.excess_from_nodes:
            return self.per_node_day
        excess = float((num_nodes / self.excess_from_nodes) ** self.excess_exponent)
        return self.per_node_day * excess

    def times(self, factor: float) -> "FailuresSpec":
        """Failures that come so many times as often."""
        return replace(self, per_node_day=self.per_node_day * factor)


PRESETS: Mapping[str, FailuresSpec] = {
    name: FailuresSpec(name=name, **values)
    for name, values in shipped("failure_rates.toml").items()
}
"""Published processes. The mix differs between operators: give your own where you have it."""

_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
_Change = Callable[[tuple[str, ...]], dict[str, Any]]

# What a term of the line looks like, how it is shown, and the fields that it sets.
_TERMS: tuple[tuple[str, str, _Change], ...] = (
    (
        rf"{_NUMBER} ?/ ?node-day",
        "6.5e-3/node-day",
        lambda found: {"per_node_day": float(found[0])},
    ),
    (rf"x ?{_NUMBER}", "x 2", lambda found: {"_times": float(found[0])}),
    (r"poisson", "poisson", lambda found: {"shape": 1.0}),
    (rf"weibull {_NUMBER}", "weibull 0.8", lambda found: {"shape": float(found[0])}),
    (rf"process {_NUMBER}", "process 0.1", lambda found: {"process": float(found[0])}),
    (rf"hang {_NUMBER}", "hang 0.05", lambda found: {"hang": float(found[0])}),
    (
        rf"(rack|switch) {_NUMBER}(?: of (\d+))?",
        "rack 0.05 of 16",
        lambda found: {
            found[0]: float(found[1]),
            **({f"{found[0]}_size": int(found[2])} if found[2] else {}),
        },
    ),
    (
        rf"infant {_NUMBER}(?: for {_NUMBER} days?)?",
        "infant 3 for 5 days",
        lambda found: {
            "infant": float(found[0]),
            **({"infant_days": float(found[1])} if found[1] else {}),
        },
    ),
    (
        rf"repeat {_NUMBER} ?x ?{_NUMBER}",
        "repeat 0.02 x 10",
        lambda found: {"repeat_share": float(found[0]), "repeat_factor": float(found[1])},
    ),
    (r"repair (\S+)", "repair 4h", lambda found: {"repair": found[0]}),
)


def read_failures(text: str) -> FailuresSpec:
    """The failure process that `--failures` names, describes, or has in a file.

    Raises:
        JobError: It is none of these; the message has what was not understood.

    >>> read_failures("kokolis-rsc1, rack 0.05").rack
    0.05
    >>> read_failures("2e-3/node-day, weibull 0.8").shape
    0.8
    """
    if text.strip().endswith((".yaml", ".yml")):
        return _from_file(Path(text.strip()))
    values: dict[str, Any] = {}
    times = 1.0
    for number, term in enumerate(text.split(",")):
        term = " ".join(term.split())
        if number == 0 and term in PRESETS:
            values = asdict(PRESETS[term])
            continue
        found = _read_term(term)
        if found is None:
            raise JobError(_not_understood(term))
        times *= found.pop("_times", 1.0)
        values |= found
    if "per_node_day" not in values:
        values = asdict(PRESETS["llama3"]) | values
    values["name"] = " ".join(text.split())
    return _checked(values, "--failures").times(times)


def _read_term(term: str) -> dict[str, Any] | None:
    for pattern, _, change in _TERMS:
        found = re.fullmatch(pattern, term)
        if found is not None:
            return change(tuple(group or "" for group in found.groups()))
    return None


def _not_understood(term: str) -> Problem:
    shown = [example for _, example, _ in _TERMS]
    meant = did_you_mean(term, [*PRESETS, *shown], cutoff=0.4)
    return Problem(
        code="S001",
        what=f"{term!r} is no failure process that is known",
        where="--failures",
        fix=f"{meant} Start with one of {', '.join(PRESETS)} or a rate, then terms such as "
        f"{', '.join(shown)}".lstrip(),
    )


def _from_file(path: Path) -> FailuresSpec:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not YAML"
        raise JobError.of(
            code="S001",
            what=f"{path} cannot be read: {reason}",
            where="--failures",
            fix="give a YAML file with per_node_day and what else is known, such as "
            "{per_node_day: 6.5e-3, rack: 0.05}",
        ) from None
    if not isinstance(values, dict):
        values = {}
    base = values.pop("preset", None)
    if base is not None and base not in PRESETS:
        raise JobError(_not_understood(str(base)))
    return _checked((asdict(PRESETS[base]) if base else {}) | values, str(path))


def _checked(values: dict[str, Any], where: str) -> FailuresSpec:
    spec = read_as(FailuresSpec, values, {}, where)
    total = spec.process + spec.hang + spec.rack + spec.switch
    if total > 1:
        what = f"process, hang, rack and switch are {total:.3g} of all failures together"
        raise JobError.of(
            code="S001", what=what, where=where, fix="lower them to 1 or less together"
        )
    return spec
