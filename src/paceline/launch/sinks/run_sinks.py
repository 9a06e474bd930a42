"""The sinks of a run, beside it: checked before it begins, started with it, ended after it."""

import contextlib
import netrc
import os
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import msgspec

from paceline.choices.sinks import SINKS
from paceline.errors import Problem
from paceline.job.metrics import MetricsSpec
from paceline.job.packages import check_package, install_line
from paceline.launch.sinks import REFUSES
from paceline.launch.sinks.feed import LAST_S, read_mark
from paceline.launch.sinks.supervisor import log_file
from paceline.topology.node.reach import is_free

KEEPER = (sys.executable, "-m", "paceline.launch.sinks.supervisor")

_QUIET_S = 2.0
"""What is left is mostly sent within this; only a longer wait is announced."""

_MARGIN_S = 5.0
"""For the keeper to end what has not ended. A guess."""


def check_sinks(
    metrics: MetricsSpec, where: Callable[[str], str], *, names: Iterable[str] | None = None
) -> Iterator[Problem]:
    """What keeps sinks from being opened on this machine; no sink is reached for.

    Args:
        metrics: The section of the job file.
        where: The place of a dotted field, for messages.
        names: Of the sinks; left out, those that the job asks for.
    """
    for name in metrics.wanted if names is None else names:
        row, place = SINKS[name], where("metrics.sinks")
        if row.package is not None:
            fix = f"{install_line(name)}, or leave {name} out of metrics.sinks"
            yield from check_package(
                row.package, f"{row.title} was asked for", where=place, fix=fix
            )
    wanted = metrics.wanted if names is None else tuple(names)
    if "wandb" in wanted and metrics.wandb.mode == "online" and not _knows_wandb():
        yield _unknown(
            "Weights & Biases was asked for, and no key is known",
            where("metrics.sinks"),
            "set WANDB_API_KEY, or metrics.wandb.mode: offline and `wandb sync` later",
        )
    if "mlflow" in wanted and not (metrics.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI")):
        yield _unknown(
            "MLflow was asked for, and no server or database is named",
            where("metrics.mlflow.uri"),
            "set metrics.mlflow.uri: http://127.0.0.1:5000, or MLFLOW_TRACKING_URI",
        )
    if "otel" in wanted:
        yield from _check_otel(metrics, where("metrics.otel.endpoint"))
    port, host = metrics.prometheus.port, metrics.prometheus.host
    if "prometheus" in wanted and port != "auto" and not is_free(port, host):
        yield _unknown(
            f"port {port} on {host} cannot be taken for Prometheus",
            where("metrics.prometheus.port"),
            "leave it out to take a free one, or end the program that holds it",
        )


@contextmanager
def sinks_beside(
    run: Path,
    metrics: MetricsSpec,
    on_note: Callable[[str], None],
    *,
    keeper: Iterable[str] = KEEPER,
) -> Iterator[None]:
    """The sinks that the job asks for, at work while this is entered.

    Leaving it waits for what is left to be sent, `LAST_S` at most.

    Args:
        run: The run's folder.
        metrics: The section of the job file.
        on_note: Told of sinks that do not have everything.
        keeper: Command of the process that keeps them.
    """
    if not metrics.wanted:
        yield
        return
    settings = msgspec.json.encode(asdict(metrics) | {"wanted": metrics.wanted}).decode()
    try:
        process = subprocess.Popen(
            [*keeper, str(run), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the run
        )
    except OSError as error:
        on_note(f"metrics.sinks: not started: {error.strerror}")
        yield
        return
    try:
        yield
    finally:
        _end(process, on_note)
        for name in metrics.wanted:
            if (missing := what_is_missing(run, name)) is not None:
                on_note(missing)


def _end(process: "subprocess.Popen[bytes]", on_note: Callable[[str], None]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        try:
            process.wait(_QUIET_S)
        except subprocess.TimeoutExpired:
            on_note(f"metrics.sinks: the last numbers are being sent, for {LAST_S:.0f} s at most")
            process.wait(LAST_S + _MARGIN_S)
    except BaseException as error:
        # Its sinks see their pipes close, and the kernel ends each that takes too long.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def what_is_missing(run: Path, name: str) -> str | None:
    """One sentence when a sink that keeps steps has not got every line of the run's metrics."""
    if not SINKS[name].keeps_steps:
        return None
    mark = read_mark(run, name)
    sent = mark.lines.get("metrics.jsonl", 0) if mark is not None else 0
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            num = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return None
    if sent >= num:
        return None
    reason = _refusal(run, name)
    return (
        f"{SINKS[name].title} has {sent} of {num} lines of metrics: "
        + (f"{reason}; " if reason else "")
        + f"see {log_file(run, name)}; "
        f"`paceline runs send {run.name} --to {name}` sends the rest"
    )


def _refusal(run: Path, name: str) -> str:
    """Why the newest start of a sink was refused; empty where it was not."""
    try:
        lines = log_file(run, name).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((each for each in reversed(lines[-3:]) if each.startswith(REFUSES)), "")[:300]


def _unknown(what: str, where: str, fix: str) -> Problem:
    return Problem(code="R075", what=what, where=where, fix=fix)


def _knows_wandb() -> bool:
    """Whether there is a key, in the variable or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    file = os.environ.get("NETRC") or str(Path.home() / ".netrc")
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return (
            netrc.netrc(file).authenticators(urllib.parse.urlsplit(url).hostname or "") is not None
        )
    return False


def _check_otel(metrics: MetricsSpec, where: str) -> Iterator[Problem]:
    endpoint = metrics.otel.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint is None:
        what = "OpenTelemetry was asked for, and no collector is named"
    elif urllib.parse.urlsplit(endpoint).scheme not in ("http", "https"):
        what = f"the collector {endpoint!r} is no http:// or https:// address"
    else:
        return
    yield _unknown(
        what,
        where,
        "set metrics.otel.endpoint: http://127.0.0.1:4318, or OTEL_EXPORTER_OTLP_ENDPOINT",
    )
