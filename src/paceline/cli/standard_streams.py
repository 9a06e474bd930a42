"""Standard output and error that can break: a full disk, a reader that has left."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO, cast

from paceline.errors import JobError


class StreamError(OSError):
    """A standard stream cannot be written. Without an `errno`: click ends a broken pipe with 1,
    which means something else here."""

    def __init__(self, name: str, cause: OSError) -> None:
        self.reason = (cause.strerror or str(cause)).lower()
        self.name = name
        self.reader_left = isinstance(cause, BrokenPipeError)
        super().__init__(f"{name} cannot be written: {self.reason}")

    def as_job_error(self) -> JobError:
        """The error as a `JobError` of code `R002`, to be shown."""
        fix = "send it where there is room, and ask again"
        return JobError.of(code="R002", what=str(self), where=self.name, fix=fix)


def watch_streams() -> None:
    """From now on a standard stream that cannot be written raises `StreamError`, once.

    After that what is written to it goes nowhere: Python writes what is left when it ends, and
    would end with an exit code of its own.
    """
    if sys.stdout is not None:  # `>&-`
        sys.stdout = cast(TextIO, _Watched(sys.stdout, "standard output"))
    if sys.stderr is not None:
        sys.stderr = cast(TextIO, _Watched(sys.stderr, "standard error"))


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Print an answer that is finished: where its reader leaves (`| head`), the exit code is still
    the answer's."""
    try:
        yield
    except StreamError as error:
        if not error.reader_left:
            raise


def has_answered() -> bool:
    """Whether anything was written to standard output since it is watched."""
    return isinstance(sys.stdout, _Watched) and sys.stdout.has_text


class _Watched:
    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.has_text = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text == "":  # click asks so what kind of stream this is, and hides what goes wrong
            return 0
        self.has_text = True
        try:
            return self._stream.write(text)
        except OSError as error:
            self._break(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> NoReturn:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        raise StreamError(self._name, error) from None
