"""Sinks: what they are sent of a run's files, and that a bad one costs only itself."""

import fcntl
import json
import os
import sys
import threading
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from paceline.choices.sinks import SINKS, SinkRow
from paceline.cli.runs_send import command as send_command
from paceline.errors import JobError
from paceline.job import MetricsSpec
from paceline.job.metrics import OtelSpec, PrometheusSpec
from paceline.job.packages import install_line
from paceline.launch import sinks
from paceline.launch.sinks import Told, lock_file, supervisor
from paceline.launch.sinks.feed import Feeder, Mark, feed, read_mark, settings_of
from paceline.launch.sinks.otel import open_sink as open_otel
from paceline.launch.sinks.prometheus import open_sink as open_prometheus
from paceline.launch.sinks.run_sinks import check_sinks, sinks_beside, what_is_missing
from paceline.launch.sinks.send import send_run
from paceline.launch.sinks.supervisor import MOST_STARTS, keep_sinks, log_file, secret_values
from paceline.launch.sinks.tensorboard import open_sink as open_tensorboard
from paceline.record.machines import MachineSample, machine_log
from paceline.record.media import MediaLog, png_of
from paceline.record.run import RunFolder

KEEPS, GOES_BACK = SinkRow(title="keeps"), SinkRow(title="goes back", goes_back=True)


class Kept:
    """A sink that only remembers."""

    def __init__(self):
        self.steps, self.begun, self.shown = [], [], []

    def begin(self, done):
        self.begun.append(done)

    def write(self, step, at, values):
        self.steps.append((step, dict(values)))

    def media(self, step, at, name, file):
        self.shown.append((step, name, file.name))

    def flush(self):
        pass

    @property
    def losses(self):
        return [
            (step, values["train/loss"]) for step, values in self.steps if "train/loss" in values
        ]


def step(number, *, generation=1, loss=None, **more):
    return {"step": number, "generation": generation, "at": 1000.0 + number} | {
        "loss": float(number) if loss is None else loss,
        **more,
    }


def evaluation(number, loss, generation=1):
    return {"event": "Evaluated", "step": number, "loss": loss, "seconds": 0.1} | {
        "generation": generation,
        "at": 1000.0,
    }


def append(run, name, *lines):
    with (run / name).open("ab") as file:
        for line in lines:
            file.write(json.dumps(line).encode() + b"\n")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").write_text('{"name": "tiny", "created_at": 1.5}')
    (tmp_path / "job.yaml").write_text("train: {steps: 9}\nenvironment: {WHERE: here}\n")
    return tmp_path


def told(run, **settings):
    return Told(run=run, id="0123", settings=settings, job={"train.steps": 9})


def sent(run, row=KEEPS, *, mark=None, every=1):
    sink = Kept()
    feeder = Feeder(run, sink, row, Mark() if mark is None else mark, every=every)
    while feeder.look(0.0, is_over=True):
        pass
    return sink


# What is sent


def test_every_step_is_sent_once_under_the_names_of_the_table(run):
    append(run, "metrics.jsonl", step(1, step_s=0.5, mfu=None, logged={"own": 2.0}), step(2))
    first = {"train/loss": 1.0, "speed/step_s": 0.5, "own": 2.0}
    assert sent(run).steps == [(1, first), (2, {"train/loss": 2.0})]


def test_an_evaluation_comes_after_its_step_and_before_the_next_one(run):
    append(run, "metrics.jsonl", step(1), step(2), step(3))
    append(run, "events.jsonl", {"event": "Noted", "text": "x"}, evaluation(0, 9.0))
    append(run, "events.jsonl", evaluation(2, 8.0), evaluation(3, 7.0))
    names = [(number, next(iter(values))) for number, values in sent(run).steps]
    assert names == [
        (0, "eval/loss"),
        (1, "train/loss"),
        (2, "train/loss"),
        (2, "eval/loss"),
        (3, "train/loss"),
        (3, "eval/loss"),
    ]


def test_a_step_waits_a_moment_for_its_evaluation_while_the_run_goes_on(run):
    append(run, "metrics.jsonl", step(1))
    sink = Kept()
    feeder = Feeder(run, sink, KEEPS, Mark())
    assert feeder.look(0.0) == 0
    assert sink.steps == []
    assert feeder.look(2.0) == 1
    assert sink.losses == [(1, 1.0)]


def test_steps_that_a_run_repeats_take_the_place_of_the_old_ones_where_a_sink_can_go_back(run):
    append(run, "metrics.jsonl", *(step(number) for number in (1, 2, 3)))
    append(run, "metrics.jsonl", *(step(n, generation=2, loss=10.0 + n) for n in (2, 3, 4)))
    sink = sent(run, GOES_BACK)
    assert sink.begun == [1]
    assert sink.losses == [(1, 1.0), (2, 2.0), (3, 3.0), (2, 12.0), (3, 13.0), (4, 14.0)]


def test_steps_that_a_run_repeats_are_left_out_where_a_sink_cannot_go_back(run):
    append(run, "metrics.jsonl", *(step(number) for number in (1, 2, 3)))
    append(run, "metrics.jsonl", *(step(n, generation=2, loss=10.0 + n) for n in (2, 3, 4)))
    append(run, "events.jsonl", evaluation(3, 8.0), evaluation(3, 8.0, generation=2))
    sink = sent(run)
    assert sink.losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0)]
    assert [n for n, values in sink.steps if "eval/loss" in values] == [3]


def test_a_mark_makes_the_next_process_begin_after_what_is_safe(run):
    append(run, "metrics.jsonl", *(step(number) for number in (1, 2, 3)))
    append(run, "events.jsonl", evaluation(2, 8.0))
    mark = Mark()
    sent(run, mark=mark)
    append(run, "metrics.jsonl", *(step(n, generation=2, loss=10.0 + n) for n in (3, 4)))
    append(run, "events.jsonl", evaluation(4, 6.0, generation=2))
    assert sent(run, mark=mark).steps == [(4, {"train/loss": 14.0}), (4, {"eval/loss": 6.0})]


def test_what_is_not_finite_and_a_torn_line_are_left_out(run):
    append(run, "metrics.jsonl", {**step(1), "loss": None, "grad_norm": 2.0})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "gener\n')
    append(run, "metrics.jsonl", step(3))
    assert sent(run).steps == [(1, {"train/grad_norm": 2.0}), (3, {"train/loss": 3.0})]


def test_only_multiples_of_every_are_sent_and_all_evaluations(run):
    append(run, "metrics.jsonl", *(step(number) for number in range(1, 8)))
    append(run, "events.jsonl", evaluation(5, 8.0))
    sink = sent(run, every=3)
    assert sink.losses == [(3, 3.0), (6, 6.0)]
    assert [n for n, values in sink.steps if "eval/loss" in values] == [5]


def test_pictures_and_texts_are_sent_from_their_files(run, np):
    log = MediaLog(run)
    assert log.write(1, 1, 1001.0, {"a/b": np.zeros((2, 3), np.uint8), "words": "<b>x"}) is None
    log.close()
    append(run, "metrics.jsonl", step(1))
    assert sent(run).shown == [(1, "a/b", "a__b.png"), (1, "words", "words.txt")]


def test_s0_21_samples_of_machines_are_sent_with_the_step_of_their_time(run):
    append(run, "metrics.jsonl", step(1), step(2), step(3))
    for node in (0, 1):
        log = machine_log(run, node)
        for at in (1001.5 + node, 1009.0):
            log.write(MachineSample(at=at, node=node, cpu_utilization=0.5))
        log.close()
    mark = Mark()
    sink = sent(run, mark=mark)
    found = [(n, *values) for n, values in sink.steps if "train/loss" not in values]
    names = ["host/cpu_utilization/node_0", "host/cpu_utilization/node_1"]
    assert found == [(2, names[0]), (3, names[1]), (3, names[0]), (3, names[1])]
    assert sent(run, mark=mark).steps == []


@pytest.fixture
def np():
    import numpy

    return numpy


# What sinks make of it


def scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_s0_21_tensorboard_shows_each_step_once_after_a_rewind_and_a_kill(run):
    append(run, "metrics.jsonl", *(step(number) for number in (1, 2, 3)))
    row, mark = SINKS["tensorboard"], Mark()
    for begun in (mark.step, 1):  # the second was killed before it kept a mark past step 1
        with open_tensorboard(told(run)) as sink:
            sink.begin(begun)
            again = Mark(lines={"metrics.jsonl": begun}, step=begun)
            feeder = Feeder(run, sink, row, again)
            while feeder.look(0.0, is_over=True):
                pass
        append(run, "metrics.jsonl", *(step(n, generation=2, loss=10.0 + n) for n in (3, 4)))
    found = [(event.step, event.value) for event in scalars(run).Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]


def test_tensorboard_takes_pictures_and_texts(run, np):
    picture, text = run / "a.png", run / "b.txt"
    picture.write_bytes(png_of(np.zeros((2, 3, 3), np.uint8)))
    text.write_text("hello")
    with open_tensorboard(told(run)) as sink:
        sink.media(5, 1.0, "samples", picture)
        sink.media(5, 1.0, "words", text)
    events = scalars(run)
    (image,) = events.Images("samples")
    assert (image.width, image.height, image.step) == (3, 2, 5)
    (tensor,) = events.Tensors("words")
    assert tensor.tensor_proto.string_val == [b"hello"]


def get(url):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=60) as got:
        return got.read().decode()


def test_prometheus_is_answered_with_the_newest_numbers(run, capsys):
    with open_prometheus(told(run, host="127.0.0.1", port="auto")) as sink:
        sink.write(1, 0.0, {"train/loss": 4.0, "own loss": 2.0})
        sink.write(2, 0.0, {"train/loss": 3.0})
        page = get(capsys.readouterr().out.strip())
    assert f'paceline_train_loss{{run="{run.name}"}} 3.0' in page
    assert "# TYPE paceline_train_loss gauge" in page
    assert f'paceline_own_loss{{run="{run.name}"}} 2.0' in page
    assert f'paceline_run_step{{run="{run.name}"}} 2.0' in page


@contextmanager
def collector(*codes):
    """A server that answers POST with each of the codes, then with 200; its requests."""
    taken, left = [], list(codes)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            code = left.pop(0) if left else 200
            if code == 200:
                taken.append((self.path, dict(self.headers), json.loads(content)))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_every_step_at_its_time(run, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x=1")
    with collector() as (endpoint, taken), open_otel(told(run, endpoint=endpoint)) as sink:
        sink.write(1, 1000.5, {"speed/tokens_per_s": 4.0})
        sink.write(2, 1001.5, {"speed/tokens_per_s": 3.0})
    ((path, headers, content),) = taken
    assert path == "/v1/metrics"
    assert headers["Authorization"] == "Bearer abc"
    (metric, _) = content["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert (metric["name"], metric["unit"]) == ("paceline.speed.tokens_per_s", "{token}/s")
    assert metric["gauge"]["dataPoints"] == [
        {"timeUnixNano": "1000500000000", "asDouble": 4.0},
        {"timeUnixNano": "1001500000000", "asDouble": 3.0},
    ]


def test_a_collector_that_is_away_is_waited_for(run, monkeypatch):
    pauses = []
    clock = SimpleNamespace(sleep=pauses.append)  # `time` itself belongs to other threads too
    monkeypatch.setattr("paceline.launch.sinks.otel.time", clock)
    with collector(503, 429) as (endpoint, taken), open_otel(told(run, endpoint=endpoint)) as sink:
        sink.write(1, 1000.5, {"train/loss": 4.0})
    assert len(taken) == 1
    assert pauses == [1.0, 2.0]


# Processes

FAKE = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from paceline.choices.sinks import SINKS, SinkRow
from paceline.launch import sinks
from paceline.launch.sinks import feed

class Fake:
    def __init__(self, run): self.file = (run / "sent.txt").open("a", buffering=1)
    def begin(self, done): print("begin", done)
    def write(self, step, at, values):
        self.file.write(f"{step}\\n")
        BODY
    def media(self, *_): pass
    def flush(self): pass

@contextmanager
def opened(told):
    yield Fake(told.run)

SINKS["wandb"] = SinkRow(title="Fake")
feed.opener = lambda name: opened
feed.main(sys.argv[1:])
"""


def fake(folder: Path, body: str):
    script = folder.with_name(f"{folder.name}-fake.py")
    script.write_text(FAKE.replace("BODY", body))
    return (sys.executable, str(script))


def kept_to_the_end(run, command, monkeypatch, last_s=60.0):
    """Keeps one sink of a run that is over."""
    monkeypatch.setattr("paceline.launch.sinks.supervisor._PAUSE_S", 0.0)
    settings = {"wandb": {}, "every": 1, "wanted": ["wandb"]}
    over, end = os.pipe()
    os.close(end)
    try:
        keep_sinks(run, ["wandb"], json.dumps(settings), over, feed=command, last_s=last_s)
    finally:
        os.close(over)
    return log_file(run, "wandb").read_text()


def test_a_sink_sends_what_is_there_when_the_run_is_over_and_keeps_its_mark(run, monkeypatch):
    append(run, "metrics.jsonl", step(1), step(2))
    log = kept_to_the_end(run, fake(run, "pass"), monkeypatch)
    assert (run / "sent.txt").read_text() == "1\n2\n"
    assert read_mark(run, "wandb") == Mark(lines={"metrics.jsonl": 2}, step=2)
    assert "all is sent: 2 steps" in log
    assert what_is_missing(run, "wandb") is None


def test_a_sink_that_fails_waits_twice_as_long_before_each_start(run):
    command = ["sh", "-c", "exit 3"]
    kept, now_s, starts_s = supervisor._Kept(run, "wandb", command, frozenset()), 100.0, []
    while kept.look(now_s):
        if kept._process is not None:
            starts_s.append(now_s)
            kept._process.wait()
            kept._process.stdin.close()
        now_s += 1.0
    kept.close()
    assert [after - before for before, after in pairwise(starts_s)] == [3.0, 5.0, 9.0]


def test_a_sink_that_raises_is_started_again_three_times_and_no_more(run, monkeypatch):
    append(run, "metrics.jsonl", step(1))
    log = kept_to_the_end(run, fake(run, "raise OSError('full')"), monkeypatch)
    assert log.count("--- start") == MOST_STARTS == 4
    assert "OSError: full" in log
    assert log.endswith("not started again\n")
    missing = what_is_missing(run, "wandb")
    assert missing is not None
    assert "0 of 1 lines" in missing
    assert f"paceline runs send {run.name} --to wandb" in missing


def test_a_sink_whose_credentials_are_refused_says_so_once_and_is_not_started_again(
    run, monkeypatch
):
    append(run, "metrics.jsonl", step(1))
    log = kept_to_the_end(
        run, fake(run, "raise sinks.SinkRefused('401: no such key')"), monkeypatch
    )
    assert log.count("--- start") == log.count("refused: 401: no such key") == 1
    assert "Traceback" not in log
    missing = what_is_missing(run, "wandb")
    assert missing is not None
    assert "has 0 of 1 lines of metrics: refused: 401: no such key; see " in missing


def test_a_sink_that_was_killed_goes_on_in_a_new_process(run, monkeypatch):
    append(run, "metrics.jsonl", step(1), step(2))
    dies_once = (
        "died = Path(self.file.name).with_name('died')\n"
        "        if not died.exists(): died.touch(); os.kill(os.getpid(), 9)"
    )
    log = kept_to_the_end(run, fake(run, dies_once), monkeypatch)
    assert "ended with -9" in log
    assert (run / "sent.txt").read_text() == "1\n1\n2\n"  # no mark was kept before it died
    assert what_is_missing(run, "wandb") is None


def test_a_sink_that_hangs_is_ended_when_its_time_is_over(run, monkeypatch):
    append(run, "metrics.jsonl", step(1))
    command = fake(run, "time.sleep(3600)")
    log = kept_to_the_end(run, command, monkeypatch, last_s=0.0)
    assert "all is sent" not in log


def test_a_secret_of_the_environment_is_not_in_a_sinks_log(run, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-1234567")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20planted-7654321")
    append(run, "metrics.jsonl", step(1))
    shows = "print(os.environ['WANDB_API_KEY'], 'Bearer planted-7654321', 'http://a:planted@b/')"
    log = kept_to_the_end(run, fake(run, shows), monkeypatch)
    assert "***" in log
    kept = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(b"planted-" in content or b":planted@" in content for content in kept)


def test_names_that_are_like_secrets_and_headers_hide_their_values():
    found = secret_values({"HF_TOKEN": "hf_abcdef", "A_HEADERS": "k=Bearer%20xyzxyz", "A": "/b"})
    assert found == {"hf_abcdef", "Bearer%20xyzxyz", "Bearer xyzxyz", "xyzxyz"}


def test_the_run_is_not_touched_by_a_keeper_that_cannot_be_started(run):
    notes = []
    metrics = MetricsSpec(sinks=["tensorboard"])
    with sinks_beside(run, metrics, notes.append, keeper=[str(run / "nothing")]):
        append(run, "metrics.jsonl", step(1))
    assert notes == ["metrics.sinks: not started: No such file or directory"]


def test_sinks_beside_a_run_send_what_it_wrote(run):
    notes = []
    with sinks_beside(run, MetricsSpec(sinks=["tensorboard"]), notes.append):
        append(run, "metrics.jsonl", step(1), step(2))
    assert [note for note in notes if "are being sent" not in note] == []
    assert [event.step for event in scalars(run).Scalars("train/loss")] == [1, 2]


def test_a_finished_run_is_sent_and_sent_again(run):
    append(run, "metrics.jsonl", step(1), step(2))
    send = {"every": 1, "is_over": lambda: True}
    assert feed(run, "tensorboard", {}, **send) == 2
    assert feed(run, "tensorboard", {}, **send) == 0
    assert feed(run, "tensorboard", {}, again=True, **send) == 2
    assert [event.step for event in scalars(run).Scalars("train/loss")] == [1, 2]


def test_a_run_is_sent_by_one_process_at_a_time(run):
    send = {"every": 1, "is_over": lambda: True, "patience_s": 0.0}
    with lock_file(run, "tensorboard").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process sends the run there"):
            feed(run, "tensorboard", {}, **send)
    assert feed(run, "tensorboard", {}, **send) == 0


def test_runs_send_takes_the_runs_settings_and_those_of_the_command(run):
    append(run, "metrics.jsonl", step(1), step(2))
    (run / "job.yaml").write_text("command: [python, train.py]\nmetrics: {every: 2}\n")
    (run / "run.json").write_text('{"name": "a", "job_folder": "/", "created_at": 1.5}')
    words = ["send", str(run), "--to", "tensorboard", "--json"]
    answer = CliRunner().invoke(send_command, words[1:], catch_exceptions=False)
    assert json.loads(answer.stdout) == {
        "run": str(run),
        "sink": "tensorboard",
        "num_steps": 1,
        "newest_step": 2,
    }
    words += ["--again", "--set", "metrics.every=1"]
    answer = CliRunner().invoke(send_command, words[1:], catch_exceptions=False)
    assert json.loads(answer.stdout)["num_steps"] == 2


def test_a_run_cannot_be_sent_where_only_the_present_is_shown(run):
    with pytest.raises(JobError, match="shows the present"):
        send_run(RunFolder(run), "prometheus")


def test_a_run_that_was_moved_has_the_same_id(run, monkeypatch):
    ids = []

    @contextmanager
    def opened(given):
        ids.append((given.id, dict(given.job)))
        yield Kept()

    monkeypatch.setattr("paceline.launch.sinks.feed.opener", lambda name: opened)
    feed(run, "tensorboard", {}, every=1, is_over=lambda: True)
    moved = run.parent / "elsewhere"
    run.rename(moved)
    feed(moved, "tensorboard", {}, every=1, is_over=lambda: True)
    assert ids[0] == ids[1]
    assert ids[0][1] == {"train.steps": 9}  # nothing of the environment


# Before the run


def where(field):
    return field


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_package_that_is_missing_is_named_with_its_install_line(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    (problem,) = check_sinks(MetricsSpec(sinks=[name]), where)
    assert problem.code == "R010"
    assert problem.fix is not None
    assert install_line(name) in problem.fix


def test_what_a_sink_needs_to_know_is_asked_for_before_the_run(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    asked = MetricsSpec(sinks=["wandb", "mlflow", "otel"])
    whats = [problem.what for problem in check_sinks(asked, where)]
    assert whats == [
        "Weights & Biases was asked for, and no key is known",
        "MLflow was asked for, and no server or database is named",
        "OpenTelemetry was asked for, and no collector is named",
    ]
    wrong = MetricsSpec(sinks=["otel"], otel=OtelSpec(endpoint="file:///etc/passwd"))
    (problem,) = check_sinks(wrong, where)
    assert "is no http:// or https:// address" in problem.what


def test_a_port_that_is_in_use_is_named_before_the_run():
    with collector() as (endpoint, _):
        port = int(endpoint.rpartition(":")[2])
        asked = MetricsSpec(sinks=["prometheus"], prometheus=PrometheusSpec(port=port))
        (problem,) = check_sinks(asked, where)
    assert f"port {port} on 127.0.0.1 cannot be taken" in problem.what


def test_every_sink_of_the_job_file_has_its_row_and_settings():
    assert set(SINKS) == set(MetricsSpec.__annotations__["sinks"].__args__[0].__args__)
    settings = msgspec.json.decode(msgspec.json.encode(asdict(MetricsSpec())))
    assert [name for name in SINKS if not settings_of(settings, name)] == ["tensorboard"]
    assert sinks.opener("otel") is open_otel
