"""A conversation that outlives its connections: each side numbers what it says and keeps it until
the other has it for good. Pure; sockets are others' business.

What comes twice is taken once, what comes out of order or not at all is noticed, and everything
unheard is said again on the next connection.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Lost(Exception):
    """Something before this never came: the connection is no good."""


class Outbox(Generic[_T]):
    """What one side has said, and the other may not have."""

    def __init__(
        self, *, limit: int | None = None, can_drop: Callable[[_T], bool] | None = None
    ) -> None:
        """Args:
        limit: Messages that are kept at most, as far as `can_drop` allows.
        can_drop: Whether a message may be forgotten when there are too many; the oldest go
            first. Any may be when left out.
        """
        self._limit = limit
        self._can_drop = can_drop
        self._last = 0
        self._kept: dict[int, tuple[int, _T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def last(self) -> int:
        """Number of the last that was said."""
        return self._last

    def add(self, message: _T) -> tuple[int, int]:
        """Number it; returns its number and that of the one before it that was kept."""
        before, self._last = self._last, self._last + 1
        self._kept[self._last] = before, message
        if self._limit is not None and len(self._kept) > self._limit:
            self._drop(self._limit // 2)
        return self._last, before

    def heard(self, number: int) -> None:
        """The other side has everything up to this one."""
        while self._kept and (oldest := next(iter(self._kept))) <= number:
            del self._kept[oldest]

    def after(self, number: int) -> Iterator[tuple[int, int, _T]]:
        """Number, that of the one before, and message of all that the other side lacks."""
        before = number
        for known, (_, message) in self._kept.items():
            if known > number:
                yield known, before, message
                before = known

    def _drop(self, wanted: int) -> None:
        """Forget the oldest that may be; what follows them says so, or it would look lost."""
        for number in list(self._kept):
            if len(self._kept) <= wanted:
                break
            if self._can_drop is None or self._can_drop(self._kept[number][1]):
                del self._kept[number]


class Inbox:
    """What one side has of the other's words."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the last that was taken."""

    def can_take(self, number: int, before: int) -> bool:
        """Whether this message is new.

        Raises:
            Lost: The one before it has not come.
        """
        if number > self.last:
            self.check(before)
        return number > self.last

    def check(self, said: int) -> None:
        """
        Raises:
            Lost: Not all up to this number has come.
        """
        if said > self.last:
            raise Lost

    def take(self, number: int, before: int) -> bool:
        """Whether this message is new; if it is, it is had from now on."""
        is_new = self.can_take(number, before)
        if is_new:
            self.last = number
        return is_new
