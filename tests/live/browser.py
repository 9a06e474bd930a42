"""A headless Chromium, spoken to over its own pipe; no package is needed for it."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to, self._read_from = write_to, read_from
        self._numbers = itertools.count(1)
        self._pending = b""
        self._session: str | None = None
        self.wrong: list[str] = []
        """Errors that the page raised or printed."""

    def attach(self) -> None:
        """Open the tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            self._note(answer)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
        raise RuntimeError("the browser has ended")

    def go(self, url: str) -> None:
        """Navigate, and wait until the page has loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Value of an expression in the page; a promise is waited for."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Value of an expression once it is true; the browser looks again at every frame."""
        return self.js(
            "new Promise((done, late) => { const end = Date.now() + 120000, look = () => { "
            f"const v = (() => {{ try {{ return {expression}; }} catch {{ return false; }} }})(); "
            "v ? done(v) : Date.now() > end ? late(new Error('not within 120 s')) "
            ": setTimeout(look, 10); }; look(); })"
        )

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._pending:
                message, _, self._pending = self._pending.partition(b"\0")
                yield json.loads(message)
            content = os.read(self._read_from, 1 << 20)
            if not content:
                return
            self._pending += content

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.wrong.append(json.dumps(message["params"]["exceptionDetails"])[:900])
        entry = message.get("params", {}).get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry.get("level") == "error":
            self.wrong.append(f"{entry['text']} {entry.get('url', '')}")


@contextlib.contextmanager
def browser(width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """A page in a browser of its own, which ends with the block."""
    assert PROGRAM is not None
    to_read, we_write = _pipe()
    we_read, to_write = _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec 3<&{to_read} 4>&{to_write}; exec "$@"',
                "bash",
                PROGRAM,
                *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
                *("--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
                f"--window-size={width},{height}",
            ],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            page = Page(we_write, we_read)
            page.attach()
            yield page
        finally:
            os.close(we_write)  # its end of the pipe: it leaves
            os.close(we_read)
            process.kill()
            process.wait()


def _pipe() -> list[int]:
    """Both ends, with numbers that the browser's own 3 and 4 do not meet."""
    ends = []
    for low in os.pipe():
        ends.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(low)
    return ends
