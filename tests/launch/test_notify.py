"""Messages about alerts: their forms, tries and limits; servers are played on this machine."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from paceline.job.alerts import AlertsSpec, TargetSpec
from paceline.launch.notify import (
    MOST_WAITING,
    Message,
    Teller,
    check_variables,
    message_of,
    send_to,
)
from paceline.record.events import AlertFired, AlertNotSent, AlertOver

SECRET = "T0PSECRET"
NAN = AlertFired(
    rule="loss-nan",
    condition="train/loss is not finite",
    metric="train/loss",
    value=None,
    step=31,
    severity="critical",
    action="look at the gradients",
    on_alert="stop",
)


class Hook:
    """A web server that keeps what it is posted, and answers as it is told."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answer = 200
        self.location = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.got.append({"path": self.path, "body": json.loads(body)})
                self.send_response(outer.answer)
                if outer.location:
                    self.send_header("Location", outer.location)
                self.end_headers()

            def do_GET(self) -> None:
                outer.got.append({"path": self.path, "body": None})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    hook = Hook()
    monkeypatch.setenv("HOOK", hook.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


def told(targets: dict[str, TargetSpec], *names: str, send: Any = None) -> list[AlertNotSent]:
    """What was not sent, once one message was given to each of these targets."""
    notes: list[AlertNotSent] = []
    teller = Teller(targets, notes.append, send=send, pauses_s=(0.0, 0.0))
    for name in names:
        teller.tell(name, message_of(NAN, "tiny"))
    teller.close(60.0)
    return notes


def test_a_webhook_is_posted_all_that_is_known(hook: Hook):
    assert told({"ops": TargetSpec(webhook="env:HOOK")}, "ops") == []
    (got,) = hook.got
    assert got["path"] == f"/{SECRET}"
    assert got["body"] == {
        "source": "paceline",
        "run": "tiny",
        "rule": "loss-nan",
        "fired": True,
        "severity": "critical",
        "metric": "train/loss",
        "value": None,
        "of": "",
        "step": 31,
        "action": "look at the gradients",
        "text": "critical: loss-nan in tiny\ntrain/loss is not finite at step 31\n"
        "the run was asked to save and stop\nlook at the gradients",
    }


def test_slacks_form_is_one_text(hook: Hook):
    assert told({"ops": TargetSpec(slack="env:HOOK")}, "ops") == []
    (got,) = hook.got
    assert list(got["body"]) == ["text"]
    assert got["body"]["text"].startswith("critical: loss-nan in tiny\n")


def test_an_alert_that_is_over_says_so():
    over = AlertOver(rule="hot", metric="gpu/temperature_c", value=70.0, of="node 0 GPU 1", step=9)
    message = message_of(over, "tiny")
    assert message.text == "over: hot in tiny, node 0 GPU 1\ngpu/temperature_c is 70 at step 9"
    assert message.fired is False


def test_a_mail_goes_to_all_its_recipients():
    listener = socket.create_server(("127.0.0.1", 0))
    lines: list[str] = []
    playing = threading.Thread(target=play_mail_server, args=(listener, lines), daemon=True)
    playing.start()
    target = TargetSpec(
        smtp=f"127.0.0.1:{listener.getsockname()[1]}",
        sender="paceline@example.org",
        recipients=["a@example.org", "b@example.org"],
        tls="none",
    )
    send_to(target, message_of(NAN, "tiny"))
    playing.join(60)
    listener.close()
    assert "Subject: paceline: critical: loss-nan in tiny" in lines
    assert [line for line in lines if line.lower().startswith("rcpt")] == [
        "rcpt TO:<a@example.org>",
        "rcpt TO:<b@example.org>",
    ]


def play_mail_server(listener: socket.socket, lines: list[str]) -> None:
    talk, _ = listener.accept()
    with talk, talk.makefile("rwb") as file:
        file.write(b"220 hello\r\n")
        file.flush()
        in_data = False
        for raw in file:
            line = raw.decode().rstrip("\r\n")
            lines.append(line)
            if in_data and line != ".":
                continue
            in_data = not in_data and line.upper() == "DATA"
            if line.upper() == "QUIT":
                return  # without a goodbye: the mail is sent all the same
            file.write(b"354 go\r\n" if in_data else b"250 ok\r\n")
            file.flush()


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(hook: Hook, code: int):
    hook.answer, hook.location = code, hook.url.replace(SECRET, "elsewhere")
    (note,) = told({"ops": TargetSpec(webhook="env:HOOK")}, "ops")
    assert {got["path"] for got in hook.got} == {f"/{SECRET}"}
    assert note.reason == (f"it answered {code}, which leads to another place and is not followed")


@pytest.mark.parametrize("answer", [403, 500])
def test_a_refusal_is_tried_three_times_and_recorded_without_the_address(hook: Hook, answer: int):
    hook.answer = answer
    (note,) = told({"ops": TargetSpec(webhook="env:HOOK")}, "ops")
    assert len(hook.got) in (1, 3)  # at the end of a run there is time for one
    assert note == AlertNotSent(rule="loss-nan", target="ops", reason=f"it answered {answer}")


@pytest.mark.parametrize(
    "value",
    [
        f"ftp://example.org/{SECRET}",
        f"https://exa mple.org/{SECRET}",
        f"http://127.0.0.1:99999/{SECRET}",
        f"https://[::1/{SECRET}",
        f"{SECRET}\nX-Header: 1",
        f"http://127.0.0.1:1/{SECRET}",
    ],
)
def test_no_reason_quotes_the_address(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("HOOK", value)
    monkeypatch.setenv("no_proxy", "*")
    (note,) = told({"ops": TargetSpec(webhook="env:HOOK")}, "ops")
    assert SECRET not in note.reason
    assert note.reason


def test_no_reason_quotes_a_password(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)

    def refuse(target: TargetSpec, message: Message) -> None:
        raise OSError(f"{SECRET} was refused")

    target = TargetSpec(
        smtp="h:25", sender="a", recipients=["b"], user="u", password="env:MAIL_PASSWORD"
    )
    (note,) = told({"m": target}, "m", send=refuse)
    assert SECRET not in note.reason


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOOK", raising=False)
    target = TargetSpec(webhook="env:HOOK")
    (note,) = told({"ops": target}, "ops")
    assert note.reason == "the environment variable HOOK is not set"
    alerts = AlertsSpec(targets={"ops": target})
    (problem,) = check_variables(alerts)
    assert problem.code == "J018"
    assert "HOOK of target ops" in problem.what
    monkeypatch.setenv("HOOK", "https://example.org")
    assert list(check_variables(alerts)) == []


def test_a_target_that_hangs_delays_neither_the_others_nor_the_run():
    hangs, arrived = threading.Event(), threading.Event()
    notes: list[AlertNotSent] = []

    def send(target: TargetSpec, message: Message) -> None:
        if target.webhook == "env:DEAF":
            hangs.wait(120)
        else:
            arrived.set()

    targets = {"deaf": TargetSpec(webhook="env:DEAF"), "ops": TargetSpec(webhook="env:OPS")}
    teller = Teller(targets, notes.append, send=send)
    for _ in range(MOST_WAITING + 1):
        teller.tell("deaf", message_of(NAN, "tiny"))
    assert [note.reason for note in notes] == [f"{MOST_WAITING} messages wait before it"]
    teller.tell("ops", message_of(NAN, "tiny"))
    assert arrived.wait(120)
    teller.close(0.0)
    assert [note.reason for note in notes[1:]] == ["the run ended before it was sent"] * 100
    hangs.set()


def test_the_console_and_names_of_no_target_are_sent_nothing():
    assert told({}, "console", "nobody") == []
