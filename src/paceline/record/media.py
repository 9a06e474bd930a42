"""Pictures and texts that a program logs: a file each in `media/`, and a line in `media.jsonl`.

There are bounds, as nobody looks at ten thousand pictures and a full disk ends a run. Leaves out:
where they are shown.
"""

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.record.lines import JsonLines, write_whole

Pixels = NDArray[np.uint8]
"""Height x width, or height x width x 3 (RGB) or 4 (RGBA)."""

MOST_PIXELS = 4 << 20
"""Pixels of one picture: 2048 x 2048."""

MOST_TEXT_BYTES = 64 << 10
"""Bytes of one text."""

MOST_FILES = 1000
"""Files of a run."""

MOST_BYTES = 256 << 20
"""Bytes of a run's media. All four are guesses."""


class Medium(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `media.jsonl`."""

    step: int
    generation: int
    at: float
    """Seconds since 1970 (UTC)."""

    name: str
    """As the program gave it."""

    file: str
    """Path in the run's folder: `media/step-00000050/samples.png`, or `.txt`."""


class MediaLog:
    """The writer of a run's pictures and texts."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lines = JsonLines[Medium](run / "media.jsonl")
        self.close = self._lines.close
        self._num_files = self._num_bytes = -1
        self._has_refused = False

    def write(
        self, step: int, generation: int, at: float, media: Mapping[str, str | Pixels]
    ) -> str | None:
        """Keep what a step logged.

        Returns:
            Why something was not kept, for the first time that this happens.
        """
        reason = None
        for name, content in media.items():
            try:
                reason = self._write(step, generation, at, name, content) or reason
            except OSError as error:
                reason = f"{error.strerror}"
        if reason is None or self._has_refused:
            return None
        self._has_refused = True
        return f"a picture or text of session.log was not kept: {reason}"

    def _write(
        self, step: int, generation: int, at: float, name: str, content: str | Pixels
    ) -> str | None:
        self._count()
        if isinstance(content, str):
            encoded = content.encode(errors="replace")[:MOST_TEXT_BYTES]
        else:
            encoded = png_of(content)
        if self._num_files >= MOST_FILES or self._num_bytes + len(encoded) > MOST_BYTES:
            return f"a run keeps {MOST_FILES} of them, {MOST_BYTES >> 20} MiB in all"
        ending = "txt" if isinstance(content, str) else "png"
        file = f"media/step-{step:08d}/{name.replace('/', '__')}.{ending}"
        (self._run / file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._run / file, encoded)
        self._num_files += 1
        self._num_bytes += len(encoded)
        self._lines.write(Medium(step=step, generation=generation, at=at, name=name, file=file))
        return None

    def _count(self) -> None:
        """What earlier parts of the run have left, once."""
        if self._num_files < 0:
            sizes = [path.stat().st_size for path in (self._run / "media").glob("*/*")]
            self._num_files, self._num_bytes = len(sizes), sum(sizes)


def png_of(pixels: Pixels) -> bytes:
    """A picture as a PNG file.

    >>> png_of(np.zeros((2, 3, 3), np.uint8))[1:4]
    b'PNG'
    """
    height, width = pixels.shape[:2]
    colours = {2: 0, 3: 2, 4: 6}[2 if pixels.ndim == 2 else pixels.shape[2]]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(unfiltered.tobytes(), 3)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )
