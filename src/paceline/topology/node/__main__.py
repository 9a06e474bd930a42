"""What a node does when it is asked: look, call the others, or measure with them.

    python -m paceline.topology.node look    say what there is, and then answer the others' calls
    python -m paceline.topology.node call    call the others
    python -m paceline.topology.node start   start the ranks of a measurement
    python -m paceline.topology.node take    take files into the job's folder, and list it

The question is the first line of standard input, as JSON. The answer is one line that starts with
`paceline-node `, as shells greet people on standard output. `look` stays until its time is over, or
until its input ends where it is told to mind that (`minds_end`).
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from paceline.topology.node.facts import Reached
from paceline.topology.node.messages import ANSWER, Call, Look, Seen, Start, Started, Take, Taken
from paceline.topology.node.probe import probe_node
from paceline.topology.node.reach import Listener, call_all
from paceline.topology.node.receive import take


def main() -> int:
    what = sys.argv[1] if len(sys.argv) == 2 else ""
    line = sys.stdin.buffer.readline()
    if what == "look":
        return _look(msgspec.json.decode(line, type=Look))
    if what == "call":
        asked = msgspec.json.decode(line, type=Call)
        _answer(call_all(asked.peers, source=asked.source))
        return 0
    if what == "start":
        asked_start = msgspec.json.decode(line, type=Start)
        over = _end_of_input() if asked_start.minds_end else threading.Event()
        _answer(start(asked_start, over))
        return 0
    if what == "take":
        _answer(take(msgspec.json.decode(line, type=Take)))
        return 0
    print("usage: python -m paceline.topology.node look|call|start|take", file=sys.stderr)
    return 2


def start(asked: Start, over: threading.Event) -> Started:
    """The processes of one node, each with a log of its own; the last words of one that fails.

    Args:
        over: Set when nobody waits for it any more.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-preflight-") as name:
        folder = Path(name)
        for file, text in asked.programs.items():
            (folder / file).write_text(text, encoding="utf-8")
        running: list[subprocess.Popen[bytes]] = []
        try:
            for number, environment in enumerate(asked.environments):
                with (folder / f"{number}.log").open("wb") as log:
                    running.append(
                        subprocess.Popen(
                            [sys.executable, *asked.command],
                            cwd=folder,
                            env=os.environ | dict(environment),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            why = _wait(running, folder, asked.limit_s, over)
        except OSError as error:
            why = f"it cannot be started: {error.strerror}"
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        path = folder / asked.answer
        text = path.read_text(encoding="utf-8") if asked.answer and path.is_file() else ""
    return Started(text=text, why_not=why)


def _wait(
    running: list["subprocess.Popen[bytes]"], folder: Path, limit_s: float, over: threading.Event
) -> str | None:
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in running]
        for number, code in enumerate(codes):
            if code not in (None, 0):
                return f"process {number} ended with {code}: {_last_words(folder, number)}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            late = [str(number) for number, code in enumerate(codes) if code is None]
            words = _last_words(folder, int(late[0]))
            return f"process {', '.join(late)} took longer than {limit_s:.0f} s: {words}"
        if over.wait(0.05):
            return "nobody waits for it any more"


def _last_words(folder: Path, number: int) -> str:
    """The last line of a log that says what is wrong."""
    with contextlib.suppress(OSError):
        text = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line]
        if lines:
            return (errors or lines)[-1][:300]
    return "it said nothing"


def _look(asked: Look) -> int:
    listener = Listener(asked.word)
    listener.start()
    _answer(Seen(facts=probe_node(asked.question), port=listener.port))
    over = _end_of_input() if asked.minds_end else threading.Event()
    over.wait(asked.stays_s)
    listener.close()
    # The thread that answers may wait for a caller.
    sys.stdout.flush()
    os._exit(0)


def _end_of_input() -> threading.Event:
    """Set when standard input ends."""
    over = threading.Event()

    def watch() -> None:
        # Not through the buffer, whose lock the end of the process would wait for.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        over.set()

    threading.Thread(target=watch, daemon=True).start()
    return over


def _answer(value: Seen | list[Reached] | Started | Taken) -> None:
    print(ANSWER + msgspec.json.encode(value).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
