"""What agents and the controller send, as it is on the wire: one line a frame.

How frames survive a broken connection is in `reliable_link.py`.
"""

import zlib

import msgspec

from paceline.control.messages import FromAgent, ToAgent, Welcome


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent sends."""

    number: int
    """0 is outside of the conversation that outlives connections."""

    before: int
    heard: int
    """Number of the last order it has."""

    message: FromAgent


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller sends."""

    epoch: int
    number: int
    before: int
    heard: int
    """Number of the last report that is in the journal."""

    message: ToAgent | Welcome | None
    """None shows only that the controller is there."""


def seal(frame: Report | Order) -> bytes:
    """One line that tells whether it was damaged on its way: TCP's checksum has 16 bits."""
    content = msgspec.json.encode(frame)
    return b"%08x %b\n" % (zlib.crc32(content), content)


def open_report(line: bytes) -> Report:
    """
    Raises:
        DecodeError: The line is damaged, or is none.
    """
    return _report(_unsealed(line))


def open_order(line: bytes) -> Order:
    """
    Raises:
        DecodeError: The line is damaged, or is none.
    """
    return _order(_unsealed(line))


def _unsealed(line: bytes) -> bytes:
    crc, _, content = line.rstrip(b"\n").partition(b" ")
    if crc != b"%08x" % zlib.crc32(content):
        raise msgspec.DecodeError("a line of the control connection is damaged")
    return content


_report = msgspec.json.Decoder(Report).decode
_order = msgspec.json.Decoder(Order).decode
