"""Copies of committed checkpoints to another storage, by a thread of the writer process."""

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.record.checkpoints import list_checkpoints
from paceline.record.events import CheckpointCopied, CheckpointCopyFailed
from paceline.record.remote import Remote
from paceline.runtime.checkpoint._files import CopyPolicy
from paceline.runtime.checkpoint._reason import plain_reason

Tell = Callable[[CheckpointCopied | CheckpointCopyFailed], None]


class Copier:
    """Copies what a folder has and the storage has not, one folder after the other."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._asked: queue.SimpleQueue[tuple[Path, CopyPolicy, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._remote: Remote | None = None

    def copy(self, folder: Path, policy: CopyPolicy, step: int) -> None:
        """Have the newest checkpoints of a folder copied; `tell` hears of every one, and of what
        became of this step at the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-copy", daemon=True)
            self._thread.start()
        self._asked.put((folder, policy, step))

    def _run(self) -> None:
        while True:
            folder, policy, step = self._asked.get()
            try:
                self._bring_up_to_date(folder, policy, step)
            except Exception as error:  # noqa: BLE001 - every storage has its own
                told = error.problems[0].what if isinstance(error, PacelineError) else None
                with contextlib.suppress(OSError):  # the worker is gone
                    self._tell(CheckpointCopyFailed(step=step, reason=told or plain_reason(error)))

    def _bring_up_to_date(self, folder: Path, policy: CopyPolicy, step: int) -> None:
        """An earlier step that failed is tried again here, before this one."""
        if self._remote is None or self._remote.url != policy.url.rstrip("/"):
            self._remote = Remote(policy.url)
        there = {copy.name for copy in self._remote.copies() if copy.manifest is not None}
        here = [e for e in list_checkpoints(folder) if e.is_complete][: policy.keep]
        for entry in sorted(here, key=lambda entry: entry.step):
            if entry.step > step or (entry.path.name in there and entry.step != step):
                continue
            self._tell(self._remote.upload(entry.path, policy.compress))
        self._remote.prune(policy.keep)
