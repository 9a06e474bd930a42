"""A bench for people: one row a number of ranks, where the time goes, the verdict, what helps."""

from collections.abc import Iterator, Sequence

from paceline.check.bench import Advice, Verdict
from paceline.check.bench_row import Row
from paceline.check.bench_setting import Settings
from paceline.record.bench import PHASES
from paceline.report.table import format_table, wrapped
from paceline.units import counted, format_bytes, format_count, format_seconds, significant

_PHASES_METHOD = (
    "A step is the slowest rank's; phases are means over ranks, then medians over steps, from "
    "clocks where the session goes from one to the next. On an accelerator they are of steps of "
    "their own that wait for the device at each phase."
)
_COMMUNICATION_METHOD = (
    "Communication is of steps under PyTorch's profiler: collectives in flight, waiting for slower "
    "ranks included; exposed while the rank runs no operation meanwhile, hidden the rest. Python's "
    "time between operations counts as exposed: an upper bound. Seconds are its share of a "
    "profiled step x the timed step. It is inside the phases."
)
METHODS = (_PHASES_METHOD, _COMMUNICATION_METHOD)
"""How the numbers are measured, and what they are off by."""


def bench_lines(verdict: Verdict) -> Iterator[str]:
    """The whole answer, top to bottom."""
    yield f"bench       {verdict.scaling} scaling, {verdict.rows[0].device}, measured"
    yield ""
    yield format_table([*zip(*_throughput(verdict.rows), strict=True)])
    for row in verdict.rows:
        for note in row.notes:
            yield from wrapped(f"  {counted(row.num_ranks, 'rank')}: ", note)
    yield ""
    yield format_table([*zip(*_times(verdict.rows), strict=True)])
    yield from map("  {}".format, idle_lines(verdict.rows))
    stretches = [row.profiler_stretch for row in verdict.rows if row.profiler_stretch is not None]
    if stretches:
        yield (
            "  communication is from profiled steps, whose time differs from the timed ones' by "
            + " to ".join(dict.fromkeys(f"{each(stretches):+.0%}" for each in (min, max)))
        )
    yield ""
    yield from wrapped("verdict     ", verdict.sentence)
    if verdict.communication is not None:
        yield from wrapped("waits for   ", f"communication: {verdict.communication}")
    if verdict.caution is not None:
        yield from wrapped("caution     ", verdict.caution)
    seen = list(dict.fromkeys(advice.what for advice in verdict.advice))
    for number, what in enumerate(seen, start=1):
        yield from wrapped(f"{number}.".rjust(10) + "  ", f"{what}.")
        for advice in verdict.advice:
            if advice.what == what:
                yield from wrapped(" " * 12, f"-> {advice.change}{gain_text(advice)}", indent=15)


def idle_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Each pipeline's bubble as measured beside what its schedule gives, and idle by stage."""
    for row in rows:
        if not row.stages_held_up:
            continue
        bubble = "not measured" if row.bubble is None else f"{row.bubble:.0%} of a step, measured"
        head = f"{counted(row.num_ranks, 'rank')}: bubble {bubble}"
        yield f"{head}; {row.ideal_bubble:.0%} by the schedule"
        for stage, held_up in enumerate(row.stages_held_up):
            waits = f", {row.stages_idle[stage]:.0%} for other stages" if row.stages_idle else ""
            yield f"  stage {stage}: waits for communication {held_up:.0%} of a step{waits}"


def setting_lines(found: Settings) -> Iterator[str]:
    """A sweep over one field's values, and which to take."""
    yield f"{found.field}, on {counted(found.num_ranks, 'rank')}, measured"
    rows = [("value", "median step", "its 95% interval", "p5-p95", "n", "communication exposed")]
    for row in found.rows:
        span = f"{format_seconds(row.step_low_s)}-{format_seconds(row.step_high_s)}"
        exposed = "?" if row.exposed_s is None else format_seconds(row.exposed_s)
        interval = "?" if row.median_s is None else "-".join(map(format_seconds, row.median_s))
        cells = (row.value, format_seconds(row.step_s), interval, span, str(row.num_steps), exposed)
        rows.append(cells)
    yield format_table(rows)
    yield from wrapped("verdict     ", found.sentence)
    if found.caution is not None:
        yield from wrapped("caution     ", found.caution)


def gain_text(advice: Advice) -> str:
    """What it would add, and how that is known."""
    if advice.gain is None:
        return ""
    words = {"bound": "at most, if it took no time at all", "unknown": ""}
    return f" ({advice.gain:+.0%}, {words.get(advice.how, advice.how)})"


def rate_of(row: Row) -> tuple[float, str]:
    """Tokens a second, else samples a second, and which."""
    if row.tokens_per_s is not None:
        return row.tokens_per_s, "tokens"
    return row.samples_per_s, "samples"


def _throughput(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A column of the screen each: as many fit as anybody measures, and every layout's name."""
    yield (
        *("ranks", "layout", "batch", "step", "p5-p95", "n"),
        *(f"{rate_of(rows[0])[1]}/s", "samples/s", "speed-up", "efficiency", "memory", "planned"),
    )
    for row in rows:
        planned = "?" if row.predicted_bytes is None else format_bytes(row.predicted_bytes)
        yield (
            str(row.num_ranks),
            row.layout,
            str(row.global_batch),
            format_seconds(row.step_s),
            spread_text(row),
            str(row.num_steps),
            format_count(rate_of(row)[0]),
            f"{significant(row.samples_per_s)}",
            f"{row.speedup:.2f}",
            f"{row.efficiency:.0%}",
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            planned,
        )


def spread_text(row: Row) -> str:
    """5th to 95th percentile of a step."""
    return f"{format_seconds(row.step_low_s)}-{format_seconds(row.step_high_s)}"


def _times(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    yield ("of a step", *PHASES, "communication, exposed", "communication, hidden")
    for row in rows:
        yield (
            counted(row.num_ranks, "rank"),
            *(_phase_text(row, phase) for phase in PHASES),
            share_text(row.exposed_s, row.step_s),
            share_text(row.hidden_s, row.step_s),
        )


def _phase_text(row: Row, phase: str) -> str:
    """A pipeline's passes alternate, and are timed together."""
    if phase == "forward" and row.stages_held_up and not row.phases_s.get(phase):
        return "in backward"
    return share_text(row.phases_s.get(phase), row.phases_total_s)


def share_text(seconds: float | None, step_s: float) -> str:
    """Seconds and their share of a step.

    `?` where it was not looked at.
    """
    if seconds is None:
        return "?"
    return f"{format_seconds(seconds)} {seconds / step_s:.0%}"
