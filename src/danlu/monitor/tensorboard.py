"""TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from danlu.monitor.sinks import Back, Evaluated, Message, Norms, Point


class TensorBoard:
    """Writes points and evaluations. At a resume, TensorBoard is told to forget the steps that are done again."""

    def __init__(self, folder: Path, *, start_step: int = 0):
        # Its own writer, without torch's wrapper: less to load. It comes up in the sink's thread.
        from tensorboard.compat.proto import event_pb2  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=30)
        if start_step:
            self._forget_after(start_step)

    def take(self, message: Message) -> None:
        if isinstance(message, Evaluated):
            self._scalars({"eval/loss": message.loss}, message.step)
        elif isinstance(message, Norms):
            self._scalars({f"layers/{name}": value for name, value in message.norms.items()}, message.step)
        elif isinstance(message, Back):
            self._forget_after(message.step)
        elif isinstance(message, Point) and message.logged:
            values = {
                "train/loss": message.loss,
                "train/grad_norm": message.norm,
                "train/learning_rate": message.learning_rate,
                "train/unsound_steps": float(message.unsound),
                "speed/tokens_per_second": message.tokens_per_second,
                "speed/mfu": message.mfu,
                "speed/data_wait": message.data_wait,
                "device/memory_bytes": message.memory,
                "device/resident_bytes": message.resident,
                "device/use": message.use,
                "device/watts": message.watts,
            }
            if len(message.losses) > 1:
                values |= {f"train/loss/{name}": value for name, value in message.losses.items()}
            self._scalars(values, message.step)

    def close(self) -> None:
        self._writer.close()

    def _forget_after(self, step: int) -> None:
        self._add(self._event(session_log=self._session(status=self._session.START)), step + 1)

    def _scalars(self, values: Mapping[str, float | int | None], step: int) -> None:
        scalars = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None
        ]
        self._add(self._event(summary=self._summary(value=scalars)), step)

    def _add(self, event: object, step: int) -> None:
        event.step, event.wall_time = step, time.time()  # type: ignore[attr-defined]
        self._writer.add_event(event)
