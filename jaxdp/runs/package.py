"""A run's package: every file of the output folder except the checkpoints.

The order of a run: `open` (refuses, changes nothing), `begin`, then one `record` a step, `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdp.errors import RunFolderError
from jaxdp.runs import folder as run_folder
from jaxdp.runs import manifest, strict_json, summary
from jaxdp.runs.layout import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    PLOT_FILE,
    SAMPLE_FILE,
    STDERR_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
)
from jaxdp.runs.records import Record, RecordFile
from jaxdp.runs.stderr_tee import StderrTee
from jaxdp.runs.trace import FRAMEWORK


class RunPackage:
    """The output folder of one run, owned from `open` to `close`.

    Use it as a context manager; leaving it closes it.
    """

    def __init__(self, path: Path, *, resume: bool, trace: Path | None = None) -> None:
        """Takes `path` for a run, or raises `RunFolderError` with nothing changed in it.

        `trace` puts the trace elsewhere; a file there is refused unless it is a trace and `resume`.
        """
        self.path = path
        self.trace_path = trace or path / TRACE_FILE
        if trace is not None:
            _check_trace(trace, resume)
        self._lock = run_folder.open_folder(path, resume=resume)
        self.run_id = self._lock.owner.nonce
        self.previous_owner = self._lock.previous
        self._manifest: dict[str, Any] = {}
        self._metrics: RecordFile | None = None
        self._trace: RecordFile | None = None
        self._tee: StderrTee | None = None
        self._trace_sequence = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS_FOLDER

    def begin(self, *, step: int, configuration: Mapping[str, Any], command: Sequence[str],
              devices: Sequence[Mapping[str, Any]], data_sha256: str | None) -> None:
        """Starts to write, for a run whose next step is `step + 1`.

        Records of later steps are dropped, stderr is copied from here on, an earlier manifest is
        kept aside, and the new one says "running".
        """
        self._tee = StderrTee(self.path / STDERR_FILE)
        self._metrics, self._trace = _open_records(self.path / METRICS_FILE), _open_records(self.trace_path)
        self._metrics.keep_only(lambda record: record.get("step", step + 1) <= step)
        self._trace_sequence = self._trace.keep_only(lambda record: record.get("iteration", step + 1) <= step)
        manifest.set_aside(self.path)
        self._manifest = manifest.begin(configuration, command, devices, data_sha256)
        manifest.write(self.path, self._manifest)

    def describe(self, configuration: Mapping[str, Any]) -> None:
        """Adds what is known only once the run is under way to the manifest's configuration."""
        self._manifest["configuration"] |= configuration
        manifest.write(self.path, self._manifest)

    def record(self, metrics: Record, trace: Sequence[Record]) -> None:
        """Appends one step: its metrics and its trace records, numbered in sequence.

        Visible to readers on return.
        """
        assert self._metrics is not None, "begin comes first"
        assert self._trace is not None, "begin comes first"
        for entry in trace:
            self._trace.append(entry | {"sequence": self._trace_sequence})
            self._trace_sequence += 1
        self._metrics.append(metrics)

    def sync(self) -> None:
        """Makes the records so far survive a power loss: call it before a checkpoint that follows them."""
        for file in (self._trace, self._metrics):
            if file is not None:
                file.sync()

    def records(self) -> list[Record]:
        """The metrics of every step so far, as written."""
        return strict_json.read_records(self.path / METRICS_FILE)

    def finish(self, status: str, returncode: int) -> None:
        """Writes the summary and the final manifest, then closes.

        `status` is "completed", "failed" or "interrupted".
        """
        found = manifest.checkpoints(self.path)
        manifest.write_json(self.path / SUMMARY_FILE,
                            summary.summarize(self.records(), status=status, checkpoints=found))
        self._close_files()
        names = (METRICS_FILE, TRACE_FILE, STDERR_FILE, SUMMARY_FILE, PLOT_FILE, SAMPLE_FILE)
        self._manifest |= {"status": status, "returncode": returncode,
                           "artifacts": manifest.artifacts(self.path, names)}
        manifest.write(self.path, self._manifest)
        self.close()

    def close(self) -> None:
        """Gives the folder back. Calling it again does nothing."""
        self._close_files()
        self._lock.release()

    def _close_files(self) -> None:
        for file in (self._metrics, self._trace, self._tee):
            if file is not None:
                file.close()

    def __enter__(self) -> RunPackage:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open_records(path: Path) -> RecordFile:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RecordFile(path)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}. Choose another --trace.") from error


def _check_trace(path: Path, resume: bool) -> None:
    """Refuses a `--trace` that is not a file, or that holds anything but the trace of a run to go on with."""
    if path.exists() and not path.is_file():
        raise RunFolderError(f"--trace {path} is not a file. Name one that can be written.")
    if not path.exists() or path.stat().st_size == 0:
        return
    if not resume:
        raise RunFolderError(f"--trace {path} exists. Choose another file, or go on with its run by --resume auto.")
    first = next(strict_json.record_lines(path), (b"", {}))[1]
    if first.get("framework") != FRAMEWORK:
        raise RunFolderError(f"--trace {path} holds something other than a trace of jaxdp. Choose another file.")
