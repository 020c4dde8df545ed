"""`manifest.json`: what was run, where, from which code, and how it ended."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdp.runs import environment, strict_json
from jaxdp.runs.files import Files, write_durably
from jaxdp.runs.layout import (
    CHECKPOINTS_FOLDER,
    MANIFEST_FILE,
    MARKER_FILE,
    STATE_FILE,
    finished_steps,
)

SCHEMA_VERSION = 1


def utc_now() -> str:
    """The time as ISO 8601 with its UTC offset."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def begin(configuration: Mapping[str, Any], command: Sequence[str], devices: Sequence[Mapping[str, Any]],
          data_sha256: str | None) -> dict[str, Any]:
    """The manifest of a run that starts now, with status "running"."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created_utc": utc_now(),
        "status": "running",
        "repository": environment.repository(),
        "host": environment.host(),
        "packages": environment.packages(),
        "devices": list(devices),
        "configuration": dict(configuration),
        "environment": environment.variables(),
        "command": list(command),
        "data_sha256": data_sha256,
        "returncode": None,
        "artifacts": {},
    }


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replaces the manifest in `folder`: readers see the old one or the new one, whole."""
    write_json(folder / MANIFEST_FILE, manifest)


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest in `folder`, or None where there is none that can be read."""
    return read_file(folder / MANIFEST_FILE)


def read_file(path: Path) -> dict[str, Any] | None:
    """The manifest of a run's latest or an earlier start, or None where it cannot be read."""
    try:
        manifest = strict_json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def set_aside(folder: Path) -> None:
    """Keeps the manifest of an earlier start as `manifest-1.json`, `manifest-2.json`, ..."""
    current = folder / MANIFEST_FILE
    if current.exists():
        number = 1
        while (older := folder / f"manifest-{number}.json").exists():
            number += 1
        current.rename(older)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` as indented strict JSON, durably and at once."""
    write_durably(Files(), path, [strict_json.encode(strict_json.dumps(value, indent=2) + "\n")])


def artifacts(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Size and SHA-256 of each file of `names` that exists, and of each finished checkpoint by its marker."""
    found: dict[str, Any] = {}
    for name in names:
        if (folder / name).is_file():
            found[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
    for entry in checkpoints(folder):
        found[f"{entry['path']}/{STATE_FILE}"] = {"bytes": entry["bytes"], "sha256": entry["sha256"]}
    return found


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The finished checkpoints of a run as its markers describe them, oldest first."""
    entries = []
    for step, step_folder in finished_steps(folder / CHECKPOINTS_FOLDER):
        try:
            marker = strict_json.loads((step_folder / MARKER_FILE).read_bytes())
            entries.append({"step": step, "path": f"{CHECKPOINTS_FOLDER}/{step_folder.name}", "bytes": marker["size"],
                            "sha256": marker["sha256"], "parameter_digest": marker["digest"]})
        except (OSError, ValueError, KeyError, TypeError):  # loading it would say what is wrong
            continue
    return entries


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
