"""`LightningCallback`: records some steps of a Lightning `Trainer`."""

from typing import TYPE_CHECKING, Any

from stepscope.api.display import StrPath
from stepscope.api.loop import Recorder, make_recorder

if TYPE_CHECKING:
    Callback: Any
try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the same library under its older name
    from pytorch_lightning import Callback


class LightningCallback(Callback):  # type: ignore[misc]
    """For `Trainer(callbacks=[LightningCallback("runs/today")])`. Takes what `stepscope.record` takes; the page is
    written when training ends, or fails."""

    def __init__(self, out: StrPath | None = None, *, steps: int = 3, skip: int = 10, force: bool = False) -> None:
        super().__init__()
        self.recorder: Recorder = make_recorder(out, steps=steps, skip=skip, force=force)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self.recorder.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self.recorder.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        self.recorder.finish()
