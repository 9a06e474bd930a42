"""The other side of `launch/helper.py`: a request on standard input, and the answer as the last
line that is printed, both JSON."""

import contextlib
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def answer(kind: type[_T], function: Callable[[_T], object]) -> None:
    """Answer the request of this process; what is printed meanwhile goes to standard error."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    with contextlib.redirect_stdout(sys.stderr):
        found = function(asked)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found) + b"\n")
