"""Profiles a few steps of one rank with torch.profiler and writes the trace."""

import gzip
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from clusterddp import log

# The first steps fill caches, load kernels and capture a graph; the profiler's warm-up takes time
# too. A few steps are representative.
_WAIT, _WARM_UP, _RECORDED = 8, 2, 5
_FIRST, _LAST = _WAIT + _WARM_UP + 1, _WAIT + _WARM_UP + _RECORDED
_ROWS = 10


class Profiler:
    """Records steps 11 to 15 of a rank."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        """folder: directory of the trace, created with it."""
        self._path = folder / f"rank-{rank}.trace.json.gz"
        self._on_gpu = device.type == "cuda"
        of_gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._profile: profile | None = profile(
            activities=[ProfilerActivity.CPU, *of_gpu],
            schedule=schedule(wait=_WAIT, warmup=_WARM_UP, active=_RECORDED, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profile.start()

    def step(self) -> None:
        """Count an optimizer step; write the trace after the last recorded one."""
        if self._profile:
            self._carefully(self._profile.step)
        if self._profile and self._profile.step_num == _LAST:
            self._end()

    def close(self) -> None:
        """Write the recorded steps at the end of the training, or log that there are none."""
        if self._profile:
            done = self._profile.step_num
            self._end()
            if done < _FIRST:
                log.info(
                    f"--profile records steps {_FIRST} to {_LAST}, but the training ended after "
                    f"{done}"
                )

    def _end(self) -> None:
        if self._profile:
            self._carefully(self._profile.stop)
        self._profile = None

    def _carefully(self, act: Callable[[], None]) -> None:
        """Call torch.profiler; a failure, e.g. with another profiler, costs only the trace."""
        try:
            act()
        except RuntimeError as error:
            self._profile = None
            log.warning(f"torch.profiler failed: {error}; training continues without it. [CD0820]")

    def _keep(self, recorded: profile) -> None:
        """Write the trace and log the slowest operations."""
        count = recorded.step_num - _FIRST + 1
        if count < 1:
            return
        try:
            self._write(recorded)
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            log.warning(
                f"cannot write {self._path}: {why}; training continues without it. [CD0820]"
            )
        else:
            log.info(
                f"profile of {count} {'step' if count == 1 else 'steps'}: {self._path} "
                "(open it at https://ui.perfetto.dev or chrome://tracing)"
            )
        operations = recorded.key_averages()
        log.info(
            operations.table(
                sort_by="self_device_time_total" if self._on_gpu else "self_cpu_time_total",
                row_limit=_ROWS,
                max_name_column_width=40,
            ).strip()
        )
        if self._on_gpu and not any(each.self_device_time_total for each in operations):
            log.warning(
                "no kernel was recorded: this host may allow GPU counters only to "
                "administrators (NVreg_RestrictProfilingToAdminUsers). [CD0820]"
            )

    def _write(self, recorded: profile) -> None:
        """Write the trace atomically. Raises OSError, or RuntimeError if torch wrote no trace.

        Compressed here, because torch uses the temporary directory and ignores that it is full.
        """
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=self._path.parent) as scratch:
            plain, packed = Path(scratch, "trace.json"), Path(scratch, self._path.name)
            recorded.export_chrome_trace(str(plain))
            if not plain.exists():
                raise RuntimeError("torch.profiler wrote no trace; the disk may be full")
            with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                shutil.copyfileobj(source, target)
            packed.replace(self._path)
