"""TensorBoard: event files in RUN/tensorboard."""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata as texts_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

if TYPE_CHECKING:
    from barellm.training.trackers import Subject

FLUSH_S = 10


class Tracker:
    """A resumed session begins a new file in the same folder. Its first event tells TensorBoard to drop later steps."""

    def __init__(self, subject: "Subject") -> None:
        self._writer = EventFileWriter(str(subject.folder / "tensorboard"), flush_secs=FLUSH_S)
        if subject.step:
            self._add(subject.step + 1, session_log=SessionLog(status=SessionLog.START))
        self.log(subject.step, {}, {"config": f"```\n{json.dumps(subject.config, indent=1)}\n```"})

    def log(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Append one event to the file: a scalar for each of `numbers`, a text panel for each of `texts`, by tag."""
        import numpy as np

        # Of values in this form all of TensorBoard's readers drop the later ones at a START; one of them keeps tensors.
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        values += [
            Summary.Value(
                tag=tag, tensor=make_tensor_proto(np.array([text], object)), metadata=texts_plugin.create_summary_metadata(tag, "")
            )
            for tag, text in texts.items()
        ]
        self._add(step, summary=Summary(value=values))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()
