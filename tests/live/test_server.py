"""The live page's server: what it answers from a run's files, and what it does not let out."""

import asyncio
import json
from dataclasses import replace
from urllib.parse import unquote

import pytest

pytest.importorskip("starlette", reason="the live page needs the live extra")
pytest.importorskip("jinja2", reason="the live page needs the live extra")

from tests.live.folder import append, write_run
from tests.report import made

from paceline.job import dump_job
from paceline.live.server import Live, Seen, news_since
from paceline.live.watched import Watched
from paceline.record.run_row import read_row

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text("secret")
    record = made.killed_and_finished()
    found = {"good": write_run(folder / "good", record)}
    hostile = replace(record, name=EVIL, events=(*record.events, made.lost(90, 30, generation=9)))
    found["hostile"] = write_run(folder / "hostile", hostile)
    log = found["hostile"].rank_log(0)
    log.write_text(f"{EVIL}\n\x1b[31mred\x1b[0m \x1b]0;title\x07\n\u202egnp.exe\n{'x' * 200_000}\n")
    found["hostile"].rank_log(1).symlink_to(folder / "secret.txt")
    return found


def get(runs, path):
    """Status, type and body of one request, decoded as uvicorn decodes a path."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
    }
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    live = Live(lambda: {key: read_row(run.path) for key, run in runs.items()})
    asyncio.run(live.app()(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    kind = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return sent[0]["status"], kind, body


def get_json(runs, path):
    status, kind, body = get(runs, path)
    assert (status, kind) == (200, "application/json"), body
    return json.loads(body)


def test_picture_has_the_head_the_curves_the_ranks_and_what_happened(runs):
    picture = get_json(runs, "/api/run/good")
    assert picture["head"]["outcome"] == "finished"
    assert "recovered by itself once" in picture["head"]["sentence"]
    steps, evaluations = picture["tables"]
    assert steps["step"] == list(range(1, 201))
    assert evaluations["curves"]["eval/loss"]["mean"][0] == 5.67
    assert picture["happened"]["ranks"]["usual"] == "ended"
    (recovery,) = picture["happened"]["marks"]["recoveries"]
    assert next(phase["key"] for phase in recovery["phases"]) == "detect"
    assert sum(phase["seconds"] for phase in recovery["phases"]) == pytest.approx(4.3)
    assert picture["happened"]["marks"]["repeated"] == [{"from": 100, "to": 114}]


def test_curves_have_the_band_that_the_plan_expects(runs):
    charts = {chart["name"]: chart for chart in get_json(runs, "/api/run/good")["head"]["charts"]}
    assert charts["speed/step_s"]["band"] == [0.08, 0.1]
    low, high = charts["speed/tokens_per_s"]["band"]
    assert low == pytest.approx(22_000 * 0.9)
    assert high == pytest.approx(22_000 * 0.09 / 0.08)
    assert charts["memory/peak_bytes"]["lines"][0][1] == "estimated"
    assert charts["train/loss"]["lines"] == [[2.38, "evaluation loss of a bigram model"]]


def test_zoomed_curves_have_only_the_steps_asked_for(runs):
    table, *_ = get_json(runs, "/api/run/good/curves?first=20&last=30")
    assert table["step"] == list(range(20, 30))
    table, *_ = get_json(runs, "/api/run/good/curves?first=nonsense")
    assert len(table["step"]) == 200


def test_runs_are_listed_with_their_states_and_compared_by_what_differs(runs):
    states = {row["key"]: row["state"] for row in get_json(runs, "/api/runs")}
    assert states["good"] == "finished"
    compared = get_json(runs, "/api/compare?runs=good,hostile")
    assert compared["runs"] == ["good", "hostile"]
    assert compared["differ"] == {}
    assert compared["same"] > 10


def test_settings_that_differ_and_damage_are_those_of_the_registry(tmp_path):
    one, other = made.record(), made.record()
    other = replace(other, job=replace(other.spec, train=replace(other.spec.train, steps=300)))
    found = {"one": write_run(tmp_path / "one", one), "other": write_run(tmp_path / "other", other)}
    compared = get_json(found, "/api/compare?runs=one,other")
    assert compared["differ"] == {"train.steps": [200, 300]}
    found["other"].info_file.write_text("not json")
    assert [row["state"] for row in get_json(found, "/api/runs")] == ["new", "damaged"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/..",
        "/api/run/../../etc/passwd",
        "/api/run/..%2f..%2fetc%2fpasswd",
        "/api/run/%252e%252e",
        "/api/run/%252e%252e%252f/log/0",
        "/api/run/good%2f..%2f../log/0",
        "/api/run/good%00/log/0",
        "/api/run/good/log/..%2f..%2frun.json",
        "/api/run/good/log/%252e%252e",
        "/api/run/good/log/-1",
        "/static/..%2fpage.py",
        "/static/%252e%252e%252fpage.py",
        "/static/uplot.LICENSE",
        "/secret.txt",
        "/api/live?runs=..%2fsecret.txt",
        "/api/compare?runs=..,good",
    ],
)
def test_nothing_outside_a_run_is_answered(runs, path):
    status, _, body = get(runs, path)
    assert status == 404
    assert b"secret" not in body
    assert b"Traceback" not in body


def test_text_of_a_run_comes_as_json_or_escaped(runs):
    picture = get_json(runs, "/api/run/hostile")
    assert picture["head"]["name"] == EVIL  # set as text by the page
    status, kind, body = get(runs, "/api/run/hostile/tables")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert b"<script" not in body


def test_log_lines_come_without_escape_codes_and_huge_lines_are_cut(runs):
    lines = get_json(runs, "/api/run/hostile/log/0")["lines"]
    assert lines[:2] == [EVIL, "red "]
    assert lines[2] == "gnp.exe"
    assert max(map(len, lines)) < 4200


def test_log_that_is_not_there_or_leads_out_of_the_folder_has_no_lines(runs):
    assert get_json(runs, "/api/run/good/log/9")["lines"] is None
    assert get_json(runs, "/api/run/hostile/log/1")["lines"] is None


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    run = write_run(tmp_path / "run", made.record())
    text = "".join(f"line {i}\n" for i in range(200_000)) + "10%|#   |\r50%|##  |\r"
    run.rank_log(0).write_bytes(text.encode())
    lines = get_json({"run": run}, "/api/run/run/log/0")["lines"]
    assert lines[-2:] == ["line 199999", "50%|##  |"]
    assert len(lines) == 200


def test_run_that_cannot_be_read_is_refused_with_its_reason(tmp_path):
    run = write_run(tmp_path / "run", made.record())
    run.info_file.write_text("not json")
    status, _, body = get({"run": run}, "/api/run/run")
    assert status == 409
    assert b"run.json" in body


def test_news_has_new_rows_once_and_events_only_when_there_are_some(tmp_path):
    record = made.record([made.started(), made.training(1, 1)], [made.line(1, 1.2)])
    run = write_run(tmp_path / "run", record)
    watched = Watched(run)
    watched.look()
    before = Seen.of(watched)
    append(run.metrics_file, [made.line(2, 1.3), made.line(3, 1.4)])
    watched.look(at_once=True)
    after = Seen.of(watched)
    news = news_since("run", watched, before)
    assert news["rows"]["step"] == [2, 3]
    assert news["happened"] is None
    assert "step 3 of 200" in news["head"]["sentence"]
    append(run.events_file, [made.evaluated(1.5, 3, 4.0)])
    watched.look(at_once=True)
    news = news_since("run", watched, after)
    assert news["rows"] is None
    assert news["happened"]["tables"][0]["curves"]["eval/loss"]["mean"] == [4.0]


def test_news_of_a_run_that_went_back_begin_where_it_went_back_to(tmp_path):
    lines = [made.line(step, step) for step in range(1, 11)]
    run = write_run(tmp_path / "run", made.record([made.started()], lines))
    watched = Watched(run)
    watched.look()
    before = Seen.of(watched)
    append(run.metrics_file, [made.line(step, 10 + step, generation=2) for step in (6, 7)])
    watched.look(at_once=True)
    assert news_since("run", watched, before)["rows"]["step"] == [6, 7]
    assert watched.series.column("step").tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_resumed_run_has_the_steps_that_it_was_resumed_with(tmp_path):
    record = made.record([made.started()], [made.line(1, 1)])
    run = write_run(tmp_path / "run", record)
    watched = Watched(run)
    watched.look()
    assert watched.show(lambda view: view.num_steps) == 200
    longer = replace(record.spec, train=replace(record.spec.train, steps=300))
    run.job_file.write_text(dump_job(longer))
    append(run.events_file, [made.started(50, resumed=True)])
    watched.look(at_once=True)
    assert watched.show(lambda view: view.num_steps) == 300
