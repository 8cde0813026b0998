"""`TransformersCallback`: records some steps of a Hugging Face `Trainer`."""

from typing import Any

from transformers import TrainerCallback

from stepscope.api.display import StrPath
from stepscope.api.loop import Recorder, make_recorder


class TransformersCallback(TrainerCallback):
    """For `Trainer(callbacks=[TransformersCallback("runs/today")])`. Takes what `stepscope.record` takes; the page is
    written when training ends."""

    def __init__(self, out: StrPath | None = None, *, steps: int = 3, skip: int = 10, force: bool = False) -> None:
        self.recorder: Recorder = make_recorder(out, steps=steps, skip=skip, force=force)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.recorder.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.recorder.finish()
