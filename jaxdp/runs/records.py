"""A growing file of records, one JSON object a line (`metrics.jsonl`, `trace.jsonl`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdp.runs import strict_json
from jaxdp.runs.files import Files, write_durably

Record = dict[str, Any]


class RecordFile:
    """Appends records to `path`, each visible to readers when `append` returns.

    Everything already in the file stays until `keep_only` says otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab")

    def append(self, record: Any) -> None:
        """Adds one line in one write, so that a crash can tear the last line only."""
        self._file.write(strict_json.encode(strict_json.dumps(record)) + b"\n")
        self._file.flush()

    def keep_only(self, wanted: Callable[[Record], bool]) -> int:
        """Drops every torn line and every record that is not `wanted`; returns how many are kept.

        Kept lines keep their bytes. A crash leaves the old file or the new, never a mixture.
        """
        lines = [line for line, record in strict_json.record_lines(self.path) if wanted(record)]
        self._file.close()
        write_durably(Files(), self.path, lines)
        self._file = self.path.open("ab")
        return len(lines)

    def sync(self) -> None:
        """Makes every record so far survive a power loss."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
