"""Writes the metrics as TensorBoard's files, beside metrics.jsonl, which has all of them."""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from clusterddp import log
from clusterddp.errors import TrainingError
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import MetricsLine

_SHOWN = {"train": ("loss", "accuracy", "images_per_second", "lr"), "eval": ("loss", "accuracy")}
_FLUSH_SECONDS = 10  # for those who look at the curves while it trains


class Board:
    """Rank 0's writer of `train/loss`, `eval/accuracy` and so on; no failure of it is training's.

    SummaryWriter writes from a thread of its own, so the error of a full disk is raised at a later
    call (and its traceback is in the log). It cannot write after that: the next attempt writes the
    whole curve again.
    """

    def __init__(self, folder: Path, config: TrainConfig, history: Iterable[MetricsLine]) -> None:
        """folder: of this attempt alone; what an earlier start of it has left there goes.

        history: the lines of metrics.jsonl so far, so that each attempt's folder has the whole
        curve, without the steps that were lost.

        Raises TrainingError where the package cannot be imported.
        """
        try:
            # Only here: it would cost every other training its time.
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # a protobuf that does not fit raises what it likes
            raise TrainingError(
                f"--tensorboard: {error}. Install it there: pip install "
                "'clusterddp[tensorboard]'. [CD0803]"
            ) from None
        self._folder = folder
        self._writer: SummaryWriter | None = None
        with self._giving_up_on_failure():
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)
            # As a block of code in Markdown, which needs no quoting.
            fields = [f"    {name}: {value}" for name, value in asdict(config).items()]
            self._writer.add_text("configuration", "\n".join(fields), 0)
        for line in history:
            self.add(line)
        if self._writer:
            log.info(f"TensorBoard's files: tensorboard --logdir {shlex.quote(str(folder))}")

    def add(self, line: MetricsLine) -> None:
        """Add a line of metrics.jsonl."""
        with self._giving_up_on_failure():
            for name in _SHOWN.get(line.kind, ()):
                value = getattr(line, name)
                if self._writer and value is not None:
                    self._writer.add_scalar(f"{line.kind}/{name}", value, line.step, line.time)

    def close(self) -> None:
        """Flush everything to the disk."""
        with self._giving_up_on_failure():
            if self._writer:
                self._writer.flush()  # which raises what close would keep to itself
                self._writer.close()
        self._writer = None

    @contextmanager
    def _giving_up_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            writer, self._writer = self._writer, None
            if writer and writer.file_writer:
                with suppress(OSError):  # the same once more
                    # Not SummaryWriter's own close, which would leave before the thread has ended.
                    writer.file_writer.close()
            log.warning(
                f"cannot write TensorBoard's files to {self._folder}: {error.strerror}; training "
                "continues without them [CD0820]"
            )
