"""Send a run to a sink from its files: what the sink missed while it ran, or all of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.choices.sinks import SINKS
from paceline.errors import JobError
from paceline.job import MetricsSpec, load_job, load_script
from paceline.launch.sinks.feed import feed, read_mark, settings_of
from paceline.launch.sinks.run_sinks import check_sinks
from paceline.record.run import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent."""

    run: str
    sink: str
    num_steps: int
    """By this command; 0 where the sink had everything."""

    newest_step: int
    """That the sink has now."""


def send_run(
    run: RunFolder, name: str, *, overrides: Sequence[str] = (), again: bool = False
) -> Sent:
    """Send what a sink does not have yet; a run that goes on is sent as far as it is.

    Args:
        overrides: Of the run's job file, such as `metrics.wandb.project=mine`.

    Raises:
        JobError: `R075` or `R010`, the sink cannot be opened; `R004`, another process sends the run
            there.
    """
    if not SINKS[name].keeps_steps:
        raise JobError.of(
            code="R075",
            what=f"{SINKS[name].title} shows the present, and cannot be sent a run",
            where="--to",
            fix=f"add metrics.sinks: [{name}] to the job, for runs to come; or send it to another",
        )
    metrics = _metrics_of(run, name, overrides)
    where = str(run.job_file)
    JobError.raise_for(check_sinks(metrics, lambda field: f"{field}, {where}", names=[name]))
    try:
        num = feed(
            run.path,
            name,
            settings_of(asdict(metrics), name),
            every=metrics.every,
            is_over=lambda: True,
            again=again,
            patience_s=0.0,
        )
    except TimeoutError as error:
        raise JobError.of(
            code="R004",
            what=f"{run.path.name}: {error}",
            where=str(run.path),
            fix="wait until the run, or the other command, has ended",
        ) from None
    except Exception as error:  # noqa: BLE001 a tracker's library raises its own
        raise JobError.of(
            code="R075",
            what=f"{SINKS[name].title} does not take it: {str(error) or type(error).__name__}",
            where="--to",
            fix="see whether its server is up, and the key and the right to write there; then send "
            "it again: nothing is sent twice",
        ) from None
    mark = read_mark(run.path, name)
    newest = mark.step if mark is not None else 0
    return Sent(run=str(run.path), sink=name, num_steps=num, newest_step=newest)


def _metrics_of(run: RunFolder, name: str, overrides: Sequence[str]) -> MetricsSpec:
    script = run.script()
    wanted = (script or run.job()).spec.metrics.wanted
    sinks = ", ".join(dict.fromkeys((*wanted, name)))
    given = (f"metrics.sinks=[{sinks}]", *overrides)
    changed = load_script(run.job_file, given) if script is not None else None
    return (changed or load_job(run.job_file, given)).spec.metrics
