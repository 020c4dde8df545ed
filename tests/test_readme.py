"""README and the documents: their Python runs, their commands exist."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex

import pytest
from helpers import ROOT, run_jaxdp, run_python

import jaxdp

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[list[str]]:
    """The words of each command in a shell block: comments dropped, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def all_commands() -> list[tuple[str, list[str]]]:
    return [(page.name, words) for page in PAGES for block in blocks(page, "sh") for words in command_lines(block)]


def jaxdp_calls() -> list[tuple[str, list[str]]]:
    """Page and arguments of each call of the command line; what follows `--` is a call of its own."""
    calls = []
    for page, words in all_commands():
        while words[0].removeprefix(".venv/bin/") == "jaxdp":
            end = words.index("--") if "--" in words else len(words)
            calls.append((page, words[1:end]))
            words = ["jaxdp", *words[end + 1:]] if words[end + 1:] else [""]
    return calls


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


PYTHON_BLOCKS = [pytest.param(block, id=f"{page.name}-{number}")
                 for page in PAGES[1:] for number, block in enumerate(blocks(page, "python"), 1)]


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_a_documents_python_runs_as_it_is_written(block: str, tmp_path: pathlib.Path) -> None:
    run_python(block, cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_the_readme_example_trains() -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    records = [line.split() for line in run_python(block).stdout.splitlines()]
    losses = [float(record[1]) for record in records]
    assert len(losses) > 2
    assert losses == sorted(losses, reverse=True)
    assert {record[2] for record in records} == {"ok"}
    assert len({record[3] for record in records}) == len(records)


def test_the_readme_starts_with_its_two_commands() -> None:
    assert command_lines(blocks(ROOT / "README.md", "sh")[0]) == [["make", "train"], ["make", "test"]]


def test_every_make_target_in_the_documents_exists() -> None:
    named = {word for _, words in all_commands() if words[0] == "make" for word in words[1:] if "=" not in word}
    assert named - make_targets() == set()


def test_every_jaxdp_command_and_flag_in_the_documents_exists() -> None:
    unknown, pages_of_help = [], {}
    for page, (command, *arguments) in jaxdp_calls():
        if command not in pages_of_help:
            pages_of_help[command] = run_jaxdp(command, "--help", check=False)
        answer = pages_of_help[command]
        flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
        missing = [flag for flag in flags if not re.search(rf"{flag}\b", answer.stdout)]
        unknown += [f"{page}: jaxdp {command} {flag}" for flag in ([""] if answer.returncode else missing)]
    assert unknown == []


def test_every_relative_link_of_the_readme_leads_to_a_file() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_api_page_names_every_public_name_field_and_error() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    classes = (jaxdp.DataParallelConfig, jaxdp.AdamWConfig, jaxdp.StepMetrics)
    fields = {field.name for kind in classes for field in dataclasses.fields(kind)}
    words = set(re.findall(r"\w+", text))
    assert {*jaxdp.__all__, *fields} - words == set()
