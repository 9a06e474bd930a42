"""A simulation for people: what is useful by system and rate, where the rest goes, and on what it
rests."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.report.recovery_text import RECOVERS_FROM
from paceline.report.table import format_table, wrapped
from paceline.simulation.costs import Costs, Phase
from paceline.simulation.failures import expected_per_s
from paceline.simulation.goodput import Part
from paceline.simulation.study import Case, Question, Result
from paceline.units import counted, format_seconds

_LEAST_SHARE = 5e-5
"""Parts below this are left out of the line; `--json` has all."""


def simulate_lines(
    question: Question, cases: Sequence[Case], results: Sequence[Result]
) -> Iterator[str]:
    """The whole answer, top to bottom."""
    failures = question.failures
    for case in cases:
        yield from _lost(case, question, [r for r in results if r.num_nodes == case.num_nodes])
    yield from wrapped(
        "simulated   ",
        f"{question.days:g} days, {counted(question.seeds, 'run')} for each failure rate; the "
        "controller's own code runs under a virtual clock",
    )
    yield from wrapped("failures    ", f"{failures.name}: {failures.source}")
    for case in cases:
        mine = [each for each in results if each.num_nodes == case.num_nodes]
        yield ""
        yield from _case(case, question, mine)
    yield ""
    yield from _phases(cases)
    if question.compare:
        yield from wrapped(
            "others      ",
            "; ".join(
                f"{each.name}: {_known(each.restart)}, {each.restart.source}"
                for each in question.compare
            )
            + ". Their restart times are used at every size, which favours them",
        )
    yield from wrapped(
        "not covered ",
        "slow nodes that do not fail, silent corruption, planned maintenance, and queues",
    )


def _lost(case: Case, question: Question, results: Sequence[Result]) -> Iterator[str]:
    """The answer: what failures cost at the lowest rate asked for."""
    rate = min(question.rates)
    own = [each for each in results if each.rate == rate and each.recoveries is not None]
    lost = 1 - own[0].useful
    low, high = (
        1 - pick for pick in (max(r.useful_high for r in own), min(r.useful_low for r in own))
    )
    often = "" if rate == 1 else f", {rate:g} x as often"
    yield from wrapped(
        "lost        ",
        f"{lost:.2%} of {question.days:g} days on {counted(case.num_nodes, 'node')}, "
        f"{format_seconds(lost * question.horizon_s)}, to failures{often} and to the saves against "
        f"them ({low:.2%} to {high:.2%} in single runs)",
    )


def _case(case: Case, question: Question, results: Sequence[Result]) -> Iterator[str]:
    failures = question.failures
    mtbf = format_seconds(1 / expected_per_s(failures, case.num_nodes))
    yield from wrapped(
        f"{counted(case.num_nodes, 'node')}  ".ljust(12),
        f"{case.num_ranks:,} {case.accelerator} ranks and {counted(case.num_spares, 'spare')}; "
        f"{case.layout}, batch {case.global_batch:,}, {format_seconds(case.step_s)} a step "
        f"({case.step_known}); a failure every {mtbf}",
    )
    tier = case.state.tier(case.tier)
    asked = "asked for" if case.state.is_asked else "chosen"
    yield from wrapped(
        " " * 12,
        f"recovery from {RECOVERS_FROM[case.tier]} ({asked}), which costs "
        f"{format_seconds(tier.step_s)} a step; a checkpoint every "
        f"{counted(case.save_every, 'step')}",
    )
    rates = sorted({each.rate for each in results})
    rows = [("goodput", *(_often(rate) for rate in rates))]
    for system in dict.fromkeys(each.system for each in results):
        cells = [
            _cell(each)
            for rate in rates
            for each in results
            if (each.system, each.rate) == (system, rate)
        ]
        rows.append((system, *cells))
    yield format_table(rows)
    for each in results:
        if each.rate == rates[0] and each.recoveries is not None:
            yield from _where(each)
    gave_up = [each for each in results if each.given_up]
    for each in gave_up:
        yield from wrapped(
            "    ",
            f"{each.system}, {_often(each.rate)}, gave up {each.given_up:.1f} times in a "
            "run, and waited for a person",
        )


def _often(rate: float) -> str:
    return "failures as given" if rate == 1 else f"{rate:g} x as often"


def _cell(result: Result) -> str:
    spread = ""
    if result.useful_high - result.useful_low >= _LEAST_SHARE:
        spread = f" ({100 * result.useful_low:.2f}-{100 * result.useful_high:.2f})"
    return f"{result.useful:.2%}{spread}"


def _count(mean: float) -> str:
    """A mean of whole numbers, which is not rounded to none.

    >>> _count(0.25), _count(12.3)
    ('0.25', '12')
    """
    return f"{mean:.0f}" if mean >= 10 else f"{mean:.2g}"


_NAMES: Mapping[Part, str] = {
    "fence": "leaving process groups (fence)",
    "meet": "rendezvous (meet)",
    "state": "loading state",
    "recompute": "repeated steps",
    "stall": "waiting for saves",
    "degraded": "slower steps",
    "idle": "waiting for machines",
}


def _where(result: Result) -> Iterator[str]:
    """Where the rest of the time goes, at the process's own rate."""
    lost = [
        f"{_NAMES.get(part, part)} {share:.2%}"
        for part, share in result.shares.items()
        if part != "useful" and share >= _LEAST_SHARE
    ]
    down = ""
    if result.downtime_s is not None:
        down = (
            f"; {_count(result.recoveries or 0.0)} recoveries on average, with a median of "
            f"{format_seconds(result.downtime_s)} from fault to the end of the next step"
        )
    yield from wrapped("    ", f"{result.system}: {', '.join(lost) or 'all goodput'}{down}")


def _phases(cases: Sequence[Case]) -> Iterator[str]:
    """What every phase rests on, at the sizes that were asked for."""
    yield "phases      of a recovery: seconds at each number of nodes, and their source"
    (first, usual), *others = cases[0].costs
    for name, phase in usual.phases().items():
        yield from _phase(name, phase, [dict(case.costs)[first] for case in cases], cases)
    for variant, costs in others:
        for name, phase in costs.phases().items():
            if phase != usual.phases()[name]:
                yield f"  {variant}"
                mine = [dict(case.costs)[variant] for case in cases]
                yield from _phase(name, phase, mine, cases)


def _phase(name: str, phase: Phase, costs: Sequence[Costs], cases: Sequence[Case]) -> Iterator[str]:
    seconds = [
        format_seconds(each.phases()[name].at(case.num_ranks, case.step_s))
        for each, case in zip(costs, cases, strict=True)
    ]
    shown = ", ".join(dict.fromkeys(seconds))
    text = f"{shown}, {_PHASES[name]} ({_known(phase)}: {phase.source})"
    yield from wrapped(f"  {name:<12}", text, indent=14)


_PHASES: Mapping[str, str] = {
    "detect": "until a lost process is noticed",
    "detect_node": "until a lost node is noticed",
    "detect_hang": "until a hang is noticed",
    "fence": "for the others to leave their process groups",
    "meet": "for the rendezvous, with new process groups",
    "state": "to load the state from another rank",
    "reload": "to load it from a checkpoint",
    "cold_start": "to start processes anew",
    "first_step": "longer than usual for the first step",
}


def _known(phase: Phase) -> str:
    return phase.known.replace("cited", "published")
