"""`paceline status`: how a run stands, wherever it is."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import RunName, json_option, runs_option
from paceline.cli.screen import show

if TYPE_CHECKING:
    from paceline.launch.run_status import Standing


@click.command()
@click.argument("run", metavar="RUN", type=RunName())
@runs_option
@json_option
def command(run: str, runs: Path, as_json: bool) -> int:
    """Show RUN's state: steps, loss, where it is, what the queue reports, cost, time left.

    RUN is a run's folder, its name in the folder of all runs, or the id that a queue has given it.
    It may run in another terminal, on other hosts or in a queue; asking does not disturb it.
    HOST:/FOLDER is a run on a machine that ssh reaches, with Paceline on its PATH. PLACE:ID is a
    job that you submitted from the files of `paceline render`: slurm, kubernetes, ray, sky, modal,
    runpod, vertex or kfp, each asked by its own tool.

    \b
    Examples:
      paceline status runs/my-job-20261121-101500
      paceline status 4711 --json
      paceline status login-node:/data/runs/my-job-20261121-101500
      paceline status slurm:4711
      paceline status kubernetes:default.trainjob.my-job
    """
    from paceline.launch.remote_jobs import FarRun, find_elsewhere, stand_elsewhere
    from paceline.launch.run_status import stand

    there = find_elsewhere(run)
    if isinstance(there, FarRun):
        return there.do("status", *(["--json"] if as_json else []))
    if there is not None:
        _print_job(stand_elsewhere(there), as_json=as_json)
        return 0
    standing = stand(run, runs)
    if as_json:
        click.echo(json.dumps(asdict(standing), indent=2))
        return 0
    for name, text in _lines(standing):
        show(f"{name:<10}  {text}")
    return 0


def _print_job(found: dict[str, Any], *, as_json: bool) -> None:
    queue = found["queue"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif queue is None:
        click.echo(found["text"], nl=False)
    else:
        show(f"job         {found['job_id']} at {found['place']}")
        show(f"queue       {queue['state']}: {queue['detail']}")
        if queue["nodes"]:
            show(f"nodes       {' '.join(queue['nodes'])}")


def _lines(standing: "Standing") -> list[tuple[str, str]]:
    from paceline.launch.places import PLACES
    from paceline.record.events import PlanChanged, read_events
    from paceline.record.run import RunFolder
    from paceline.report.alert_text import summarise_alerts
    from paceline.report.event_text import exactness_text
    from paceline.units import counted, format_seconds

    run, queue = standing.run, standing.queue
    lines = [("run", run.folder), ("state", run.state)]
    if run.damage is not None:
        lines.append(("damaged", run.damage))
    if standing.place != "local":
        title = PLACES[standing.place].title if standing.place in PLACES else standing.place
        job = f", job {standing.job_id}" if standing.job_id else ""
        lines.append(("place", f"{title}{job}"))
    if queue is not None:
        again = f", started again {queue.restarts} times" if queue.restarts else ""
        lines.append(("queue", f"{queue.state}: {queue.detail}{again}"))
        if queue.nodes:
            lines.append(("nodes", " ".join(queue.nodes)))
        if queue.limit_s is not None and queue.started_at is not None and queue.state == "running":
            left_s = max(0.0, queue.started_at + queue.limit_s - time.time())
            lines.append(("limit", f"{format_seconds(left_s)} of {format_seconds(queue.limit_s)}"))
    if standing.queue_silent is not None:
        lines.append(("queue", f"not known: {standing.queue_silent}"))
    if standing.hosts:
        lines.append(("hosts", " ".join(standing.hosts.values())))
    if run.num_steps or run.step:
        loss = "" if run.loss is None else f", loss {run.loss:.4f}"
        steps = f" of {run.num_steps}" if run.num_steps else ""
        lines.append(("step", f"{run.step}{steps}{loss}"))
    if run.eval_loss is not None:
        where = "" if run.eval_step is None else f" after step {run.eval_step}"
        lines.append(("eval loss", f"{run.eval_loss:.4f}{where}"))
    if standing.mfu is not None and standing.mfu_planned is not None:
        planned = f"{standing.mfu_planned:.1%} planned"
        lines.append(("MFU", f"{standing.mfu:.1%} measured over the newest steps, {planned}"))
    busy = [
        (gpu.utilization, name)
        for name, gpu in standing.gpus.items()
        if gpu.utilization is not None
    ]
    if busy:
        least, where = min(busy)
        text = f"{counted(len(busy), 'GPU')} used {fmean(share for share, _ in busy):.0%}"
        least_text = f", {where} the least: {least:.0%}" if len(busy) > 1 else ""
        lines.append(("GPUs", f"{text} of the time{least_text}"))
    events = read_events(RunFolder(Path(run.folder)).events_file)
    lines += [("alert", text) for text in summarise_alerts(events)]
    changed = [each for each in events if isinstance(each, PlanChanged)]
    lines += [("changed", f"{', '.join(each.settings)}: {each.reason}") for each in changed]
    lines.append(("restarts", str(run.restarts)))
    lines.append(("exactness", exactness_text(run.exactness, events)))
    lines.append(("ran for", format_seconds(standing.ran_s)))
    if standing.usd is not None:
        to_come = "" if standing.usd_at_end is None else f", ${standing.usd_at_end:,.2f} at the end"
        lines.append(("cost", f"${standing.usd:,.2f} so far{to_come} ({standing.usd_source})"))
    if standing.left_s is not None:
        lines.append(("left", f"about {format_seconds(standing.left_s)}, at the newest pace"))
    return lines
