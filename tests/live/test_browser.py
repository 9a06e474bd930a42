"""The pages in a real browser: what they draw, and that text of a run stays text."""

import http.client
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from urllib.parse import quote

import msgspec
import pytest

pytest.importorskip("starlette", reason="the live page needs the live extra")
pytest.importorskip("uvicorn", reason="the live page needs the live extra")
pytest.importorskip("jinja2", reason="the live page needs the live extra")

from tests.live.browser import PROGRAM, browser
from tests.live.folder import append, write_run
from tests.report import made

from paceline.report.page import render_page

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")


def hostile():
    """A run whose every text tries to be markup."""
    record = made.killed_and_finished()
    lost = msgspec.structs.replace(made.lost(40, 30, generation=9), how=EVIL)
    return replace(record, name=EVIL, job_text=EVIL, events=(*record.events, lost))


@pytest.fixture
def served(tmp_path):
    """Address and folder of a server of three runs."""
    write_run(tmp_path / "one", made.killed_and_finished())
    write_run(tmp_path / "evil", hostile()).rank_log(0).write_text(f"{EVIL}\n\x1b[31mred\n")
    write_run(tmp_path / "on", made.record([made.started(), made.training(1, 1)]))
    command = [sys.executable, "-m", "paceline", "watch", "--runs", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        printed = process.stderr.readline()
        yield re.search(r"http://\S+", printed)[0], tmp_path
    finally:
        process.send_signal(signal.SIGINT)
        with process.stderr:
            process.stderr.read()
        assert process.wait() in (0, 130, -signal.SIGINT)


def test_server_refuses_who_has_no_token_and_sends_a_step_as_it_is_written(served):
    address, folder = served
    port, token = re.search(r":(\d+)/\?token=(\S+)", address).groups()
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("GET", "/api/runs")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (
        401,
        b"open the address that `paceline watch` printed",
    )
    connection.request("GET", f"/api/run/on?token={token}")
    seen = json.dumps(json.load(connection.getresponse())["seen"])
    connection.request("GET", f"/api/live?runs=on&seen=[{quote(seen)}]&token={token}")
    stream = connection.getresponse()
    assert stream.readline() == b"retry: 1000\n"
    append(folder / "on/metrics.jsonl", [made.line(1, 2)])
    line = b""
    while not line.startswith(b"data: "):
        line = stream.readline()
    assert b'"step":[1]' in line
    connection.close()


@needs_browser
def test_live_page_draws_runs_and_a_step_that_is_written_while_it_is_open(served):
    address, folder = served
    with browser() as page:
        page.go(f"{address}#on")
        page.until("document.getElementById('outcome').textContent === 'crashed'")
        append(folder / "on/metrics.jsonl", [made.line(step, step / 10) for step in range(1, 50)])
        page.until("document.querySelectorAll('#charts canvas').length >= 6")
        assert page.js("location.search") == ""
        page.js("location.hash = 'one,on'")
        page.until("document.querySelectorAll('#curves-legend li').length === 2")
        page.until("document.getElementById('same').textContent.includes('the same')")
        page.js("location.hash = 'one'")
        page.until("document.getElementById('tables').textContent.includes('Where the time went')")
        assert page.js("document.getElementById('events').rows.length") > 10
        page.js("document.getElementById('grid').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
        page.until("document.getElementById('cell').textContent.startsWith('rank 0')")
        assert page.wrong == []


@needs_browser
def test_text_of_a_run_stays_text_in_the_live_page(served):
    address, _ = served
    with browser() as page:
        page.go(f"{address}#evil")
        page.until("document.getElementById('log').textContent.includes('<script>')")
        page.until("document.getElementById('tables').textContent.includes('onerror')")
        assert page.js("document.getElementById('name').textContent") == EVIL
        assert page.js("document.querySelectorAll('main img, main script').length") == 0
        assert page.js("document.title") != "owned"
        assert "red" in page.js("document.getElementById('log').textContent")
        assert page.wrong == []


@needs_browser
def test_frozen_page_draws_itself_from_a_file_and_runs_nothing_of_the_run(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render_page(hostile()), encoding="utf-8")
    with browser() as page:
        page.go(path.as_uri())
        page.until("document.querySelectorAll('#charts canvas').length >= 6")
        assert page.js("document.getElementById('name').textContent") == EVIL
        assert page.js("document.getElementById('ranks-text').textContent").startswith("1 of 2")
        page.js("document.getElementById('by-time').click()")
        page.until("document.getElementById('curves-legend').textContent.includes('restore')")
        assert page.js("document.querySelectorAll('main img').length") == 0
        assert page.js("document.title") != "owned"
        assert page.wrong == []
