"""Where the files of a run lie in its folder, by name alone."""

from __future__ import annotations

import re
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace.jsonl"
MANIFEST_FILE = "manifest.json"
SUMMARY_FILE = "summary.json"
STDERR_FILE = "stderr.txt"
PLOT_FILE = "loss.png"
SAMPLE_FILE = "sample.txt"
CHECKPOINTS_FOLDER = "checkpoints"
STATE_FILE = "state.safetensors"
MARKER_FILE = "ready.json"

_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the state after `step` lies."""
    return checkpoints / f"step-{step:08d}"


def list_steps(checkpoints: Path) -> list[tuple[int, Path]]:
    """Every step folder, finished or not, as (step, folder), oldest first."""
    if not checkpoints.is_dir():
        return []
    matches = ((_STEP_FOLDER.fullmatch(entry.name), entry) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted((int(match[1]), entry) for match, entry in matches if match)


def has_marker(folder: Path) -> bool:
    """Whether a step's save was ever finished. Says nothing about its contents: loading it does."""
    return (folder / MARKER_FILE).is_file()


def finished_steps(checkpoints: Path) -> list[tuple[int, Path]]:
    """The step folders that have a marker, oldest first."""
    return [(step, folder) for step, folder in list_steps(checkpoints) if has_marker(folder)]
