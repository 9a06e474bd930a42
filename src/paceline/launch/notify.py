"""Sends messages about alerts by webhook, Slack's form and e-mail, in threads of their own.

Giving a message away never waits and never raises: a target that is slow, refuses or hangs delays
neither the run nor the other targets. Addresses and passwords come from environment variables and
are in no message, reason or record.

Leaves out: the console, which shows events as they are recorded.
"""

import contextlib
import json
import os
import smtplib
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from email.message import EmailMessage
from typing import Any

from paceline.errors import Problem
from paceline.job.alerts import AlertsSpec, TargetSpec
from paceline.record.events import AlertFired, AlertNotSent, AlertOver

LIMIT_S = 5.0
"""For each wait of an attempt: to connect, and for the answer. A guess: an answer takes 0.3 s."""

PAUSES_S = (1.0, 4.0)
"""Between the three tries. A guess."""

MOST_WAITING = 100
"""Messages that wait for one target before more are left out. A guess."""

CLOSE_S = 5.0
"""How long the end of a run waits for its last messages. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a target is sent."""

    run: str
    rule: str
    fired: bool
    """False when the alert is over."""

    severity: str
    metric: str
    value: float | None
    of: str
    step: int | None
    action: str
    text: str
    """All of it for people; the first line is enough."""


def message_of(event: AlertFired | AlertOver, run: str) -> Message:
    """What is said of an alert."""
    fired = isinstance(event, AlertFired)
    about = f"{event.rule} in {run}" + (f", {event.of}" if event.of else "")
    lines = [f"{event.severity}: {about}" if fired else f"over: {about}"]
    value = "not finite" if event.value is None else f"{event.value:.6g}"
    step = "" if event.step is None else f" at step {event.step}"
    if isinstance(event, AlertFired):
        now = "" if event.value is None else f": it is {value}"
        lines.append(f"{event.condition}{step}{now}")
        if event.on_alert != "note":
            lines.append(f"the run was asked to {_DOES[event.on_alert]}")
        if event.action:
            lines.append(event.action)
    else:
        lines.append(f"{event.metric} is {value}{step}")
    return Message(
        run=run,
        rule=event.rule,
        fired=fired,
        severity=event.severity,
        metric=event.metric,
        value=event.value,
        of=event.of,
        step=event.step,
        action=event.action if isinstance(event, AlertFired) else "",
        text="\n".join(lines),
    )


_DOES = {"stop": "save and stop", "checkpoint": "save a checkpoint"}

Send = Callable[[TargetSpec, Message], None]
"""Sends one message, or raises."""


class Teller:
    """Hands messages to targets."""

    def __init__(
        self,
        targets: Mapping[str, TargetSpec],
        note: Callable[[AlertNotSent], None],
        *,
        send: Send | None = None,
        pauses_s: tuple[float, float] = PAUSES_S,
    ) -> None:
        self._note = note
        self._lines = {
            name: _Line(name, target, note, send or send_to, pauses_s)
            for name, target in targets.items()
        }

    def tell(self, target: str, message: Message) -> None:
        """Send a message when its turn comes; names of no target (`console`) are sent nothing."""
        line = self._lines.get(target)
        if line is not None and not line.put(message):
            reason = f"{MOST_WAITING} messages wait before it"
            self._note(AlertNotSent(rule=message.rule, target=target, reason=reason))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait for what is being sent, but not for long; what is left is noted."""
        for line in self._lines.values():
            line.close()
        until = time.monotonic() + limit_s
        for line in self._lines.values():
            line.end(until)


class _Line:
    """One target: its messages, and the thread that sends them, begun with the first."""

    def __init__(
        self,
        name: str,
        target: TargetSpec,
        note: Callable[[AlertNotSent], None],
        send: Send,
        pauses_s: tuple[float, float],
    ) -> None:
        self._name = name
        self._target = target
        self._note = note
        self._send = send
        self._pauses_s = pauses_s
        self._waiting: deque[Message] = deque()
        """The first of them is being sent."""

        self._news = threading.Condition()
        self._closing = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name=f"tell-{name}", daemon=True)

    def put(self, message: Message) -> bool:
        """Whether there was room for it."""
        with self._news:
            if len(self._waiting) >= MOST_WAITING:
                return False
            self._waiting.append(message)
            self._news.notify()
            if self._thread.ident is None:
                self._thread.start()
        return True

    def close(self) -> None:
        """Send what is left, each once, and take no more."""
        self._closing.set()
        with self._news:
            self._news.notify()

    def end(self, until_s: float) -> None:
        """Note what is left at a moment (monotonic clock)."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, until_s - time.monotonic()))
        with self._news:
            self._is_over = True
            left = list(self._waiting)
        for message in left:
            self._not_sent(message, "the run ended before it was sent")

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing.is_set())
                if not self._waiting:
                    return
                message = self._waiting[0]
            reason = self._reason_against(message)
            with self._news:
                if self._is_over:
                    return
                self._waiting.popleft()
            if reason is not None:
                self._not_sent(message, reason)

    def _reason_against(self, message: Message) -> str | None:
        """None once it was sent; after the last try, why it was not."""
        for pause_s in (*self._pauses_s, None):
            try:
                self._send(self._target, message)
                return None
            except Exception as error:  # noqa: BLE001 - the edge of a thread
                reason = reason_of(error, self._target)
            if pause_s is None or self._closing.wait(pause_s):
                break  # at the end of the run one try is all there is time for
        return reason

    def _not_sent(self, message: Message, reason: str) -> None:
        self._note(AlertNotSent(rule=message.rule, target=self._name, reason=reason))


class NotSet(Exception):
    """An environment variable that should hold an address or a password is not there."""


def send_to(target: TargetSpec, message: Message) -> None:
    """Send one message now; raises when it did not arrive."""
    if target.smtp is not None:
        _mail(target, message)
        return
    body = asdict(message) | {"source": "paceline"}
    if target.slack is not None:
        body = {"text": message.text}
    url = secret(target.slack or target.webhook or "")
    if not url.startswith(("https://", "http://")):
        raise ValueError("the address does not begin with https://")
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(Stays)
    try:
        opener.open(request, timeout=LIMIT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise


class Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it may lead to another host, and a POST becomes a GET on the way."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _mail(target: TargetSpec, message: Message) -> None:
    assert target.smtp is not None
    host, _, port = target.smtp.rpartition(":")
    mail = EmailMessage()
    mail["Subject"] = f"paceline: {message.text.splitlines()[0]}"[:200]
    mail["From"], mail["To"] = target.sender, ", ".join(target.recipients)
    mail.set_content(message.text)
    context = ssl.create_default_context()
    if target.tls == "implicit":
        server: smtplib.SMTP = smtplib.SMTP_SSL(host, int(port), timeout=LIMIT_S, context=context)
    else:
        server = smtplib.SMTP(host, int(port), timeout=LIMIT_S)
    try:
        if target.tls == "starttls":
            server.starttls(context=context)
        if target.user is not None and target.password is not None:
            server.login(target.user, secret(target.password))
        server.send_message(mail)
        with contextlib.suppress(OSError):  # it is sent, however the server says goodbye
            server.quit()
    finally:
        server.close()


def secret(variable: str) -> str:
    """The value of `env:NAME`.

    Raises:
        NotSet: There is none.
    """
    name = variable.removeprefix("env:")
    value = os.environ.get(name)
    if not value:
        raise NotSet(f"the environment variable {name} is not set")
    return value


def check_variables(alerts: AlertsSpec) -> Iterator[Problem]:
    """`J018` for each address or password whose environment variable is not set here."""
    for name, target in alerts.targets.items():
        for key in ("webhook", "slack", "password"):
            variable = (getattr(target, key) or "").removeprefix("env:")
            if variable and not os.environ.get(variable):
                yield Problem(
                    code="J018",
                    what=f"the environment variable {variable} of target {name} is not set",
                    where=f"the environment, for {key} of alerts.targets.{name}",
                    fix=f"export {variable}=..., or remove the target",
                )


def reason_of(error: Exception, target: TargetSpec) -> str:
    """Why a message was not sent, for the record: of errors that may quote an address or an
    answer, the kind alone."""
    match error:
        case urllib.error.HTTPError(code=code):
            to = ", which leads to another place and is not followed" if 300 <= code < 400 else ""
            return f"it answered {code}{to}"
        case smtplib.SMTPResponseException(smtp_code=code):
            return f"{type(error).__name__}: it answered {code}"
        case NotSet():
            return str(error)
        case urllib.error.URLError(reason=OSError() as inner):
            return _of_system(inner)
        case OSError():
            return _of_system(error)
        case _:
            return type(error).__name__


def _of_system(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {LIMIT_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate was refused"
    return f"{type(error).__name__}: {error.strerror or 'it failed'}"
