"""TensorBoard's event files, in the run's folder `tensorboard`, written without torch."""

import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.launch.sinks import Told


@contextmanager
def open_sink(told: Told) -> Iterator["_TensorBoard"]:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(told.run / "tensorboard"))
    try:
        yield _TensorBoard(writer)
    finally:
        writer.close()


class _TensorBoard:
    def __init__(self, writer: object) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._writer, self._events, self._summaries = writer, event_pb2, summary_pb2

    def begin(self, done: int) -> None:
        """A START mark: readers drop what was there from that step on."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(done + 1, time.time(), session_log=start)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        make = self._summaries.Summary.Value
        self._show(step, at, [make(tag=name, simple_value=value) for name, value in values.items()])

    def media(self, step: int, at: float, name: str, file: Path) -> None:
        make, content = self._summaries.Summary.Value, file.read_bytes()
        if file.suffix == ".png":
            width, height = struct.unpack(">II", content[16:24])  # of IHDR, the first
            image = self._summaries.Summary.Image(
                width=width, height=height, encoded_image_string=content
            )
            self._show(step, at, [make(tag=name, image=image)])
            return
        from tensorboard.compat.proto import tensor_pb2, types_pb2
        from tensorboard.plugins.text import metadata

        text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content])
        about = metadata.create_summary_metadata(name, "")
        self._show(step, at, [make(tag=name, tensor=text, metadata=about)])

    def flush(self) -> None:
        """All that was written is with the kernel."""
        self._writer.flush()  # type: ignore[attr-defined]

    def _show(self, step: int, at: float, values: list[object]) -> None:
        self._add(step, at, summary=self._summaries.Summary(value=values))

    def _add(self, step: int, at: float, **content: object) -> None:
        event = self._events.Event(step=step, wall_time=at, **content)
        self._writer.add_event(event)  # type: ignore[attr-defined]
