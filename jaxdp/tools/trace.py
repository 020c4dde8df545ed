"""`jaxdp trace export RUN`: the trace in the form that Chrome's and Perfetto's viewers open."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxdp.errors import RunFolderError
from jaxdp.runs import strict_json
from jaxdp.runs.trace import export as export_trace
from jaxdp.tools.options import ExportOptions

DONE = 0


def export(options: ExportOptions) -> int:
    """Writes the file. Raises `DataError` where there is no trace, `RunFolderError` where it cannot be written."""
    trace = export_trace(Path(options.run))
    path = Path(options.output)
    try:
        path.write_bytes(strict_json.encode(strict_json.dumps(trace) + "\n"))
    except OSError as error:
        raise RunFolderError(f"--output {path} cannot be written: {error.strerror}.") from error
    sys.stdout.write(f"{len(trace['traceEvents'])} events in {path}\n")
    return DONE
