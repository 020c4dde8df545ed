"""Imports and includes go down the house's floors only, and never in a circle."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterable, Mapping

import pytest
from helpers import ROOT

# From the top. A room is a module or package directly inside jaxdp/; rooms of one floor may import
# each other as long as no circle arises.
PYTHON_FLOORS = (
    ("cli",),
    ("tools",),
    ("runs",),
    ("training",),
    ("collectives",),
    ("ranked", "models", "data", "config"),
    ("tree", "buckets", "digest", "leaves", "errors", "_native"),
)

# From the top, by file name without suffixes.
NATIVE_FLOORS = (
    r"module\w*",
    r"handlers\w*|lanes",
    r"\w*group|registry|peers",
    r"staging|segment|work",
    r"collective|\w*kernels\w*",
    r"status|tree|protocol|ring",
    r"vendor\w*",
)

Arrows = Mapping[str, set[str]]  # importer -> imported


def python_floor(module: str) -> int:
    """The floor of `jaxdp.room...`, 0 being the lowest; the package itself lies above all."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(PYTHON_FLOORS)
    for level, rooms in enumerate(reversed(PYTHON_FLOORS)):
        if parts[1] in rooms:
            return level
    raise LookupError(f"{module} has no floor: name its room in PYTHON_FLOORS")


def native_floor(file: str) -> int:
    """The floor of an ffi/ source or header, 0 being the lowest."""
    for level, pattern in enumerate(reversed(NATIVE_FLOORS)):
        if re.fullmatch(pattern, file.split(".")[0]):
            return level
    raise LookupError(f"{file} has no floor: name it in NATIVE_FLOORS")


def python_floors(arrows: Arrows) -> Mapping[str, int]:
    """The floor of every module that imports or is imported."""
    return {module: python_floor(module) for module in set(arrows).union(*arrows.values())}


def room(module: str) -> str:
    """`jaxdp.training` of `jaxdp.training.step`."""
    return ".".join(module.split(".")[:2])


def imported_modules(source: str, module: str, package: str, known: Iterable[str]) -> set[str]:
    """The modules among `known` that `source` imports, inside functions and for types alone too.

    Facts about the package, such as `__version__`, are no import of its public names.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {_longest_known(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            found |= {_longest_known(f"{base}.{alias.name}", known) for alias in node.names
                      if not alias.name.startswith("__")}
    return found - {"", module}


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")[:len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _longest_known(name: str, known: Iterable[str]) -> str:
    """`name` cut after its longest known module; "" where it is none of ours."""
    parts = name.split(".")
    candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((candidate for candidate in candidates if candidate in known), "")


def python_arrows(root: pathlib.Path) -> Arrows:
    """Who imports whom among the modules of the package at `root`."""
    files = {_module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    known = {*files, f"{root.name}._native"}
    return {module: imported_modules(path.read_text(), module, module if path.name == "__init__.py"
                                     else module.rpartition(".")[0], known)
            for module, path in files.items()}


def _module_name(path: pathlib.Path, root: pathlib.Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def included_files(source: str) -> set[str]:
    """The names of our own headers that C++ text includes."""
    own = re.findall(r'^\s*#\s*include\s+(?:"(?:jaxdp/)?([^"/]+)"|<jaxdp/([^>]+)>)', source, re.MULTILINE)
    return {quoted or angled for quoted, angled in own}


def native_arrows(root: pathlib.Path) -> Arrows:
    """Who includes whom below ffi/."""
    files = [path for path in sorted(root.rglob("*")) if path.suffix in (".cc", ".h")]
    return {path.name: included_files(path.read_text()) - {path.name} for path in files}


def upward_arrows(arrows: Arrows, floor_of: Mapping[str, int]) -> list[str]:
    """Every arrow from a lower to a higher floor, as text."""
    return [f"{source} -> {target}" for source, targets in sorted(arrows.items())
            for target in sorted(targets) if floor_of[target] > floor_of[source]]


def circle(arrows: Arrows) -> list[str]:
    """The nodes of one circle in order, the first repeated at the end; [] where there is none."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node):], node]
        if node in finished:
            return []
        for target in sorted(arrows.get(node, ())):
            if found := visit(target, [*path, node]):
                return found
        finished.add(node)
        return []

    return next((found for node in sorted(arrows) if (found := visit(node, []))), [])


def between_rooms(arrows: Arrows) -> Arrows:
    """The same arrows with modules merged into their rooms."""
    merged: dict[str, set[str]] = {}
    for source, targets in arrows.items():
        merged.setdefault(room(source), set()).update(room(target) for target in targets)
        merged[room(source)].discard(room(source))
    return merged


def test_no_module_imports_upward() -> None:
    arrows = python_arrows(ROOT / "jaxdp")
    assert {"jaxdp", "jaxdp.config", "jaxdp.errors"} <= set(arrows)
    assert upward_arrows(arrows, python_floors(arrows)) == []


def test_no_circle_of_rooms_or_modules() -> None:
    arrows = python_arrows(ROOT / "jaxdp")
    assert circle(between_rooms(arrows)) == []
    assert circle(arrows) == []


def test_native_includes_go_down_only_and_in_no_circle() -> None:
    arrows = native_arrows(ROOT / "ffi")
    assert "tree.h" in arrows
    names = set(arrows).union(*arrows.values())
    assert upward_arrows(arrows, {name: native_floor(name) for name in names}) == []
    assert circle(arrows) == []


def vendor_words(source: str) -> list[str]:
    """Names of one vendor's compiler or runtime in C++ text, comments left out."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    return re.findall(r"\b(?:__HIP\w*|__CUDA\w*|JAXDP_(?:CUDA|HIP)|(?:hip|cuda|nccl)[A-Z]\w*)\b", code)


def test_a_vendors_names_stand_in_the_vendor_headers_alone() -> None:
    files = [path for path in (ROOT / "ffi").rglob("*") if path.suffix in (".cc", ".h")]
    found = {path.name: words for path in files if (words := vendor_words(path.read_text()))}
    assert [name for name in found if not name.startswith("vendor")] == []
    assert vendor_words("// hipMalloc\n#if defined(JAXDP_HIP)\n  cudaFree(p);") == ["JAXDP_HIP", "cudaFree"]


@pytest.mark.parametrize("line", [
    "from jaxdp.training.step import build", "import jaxdp.training.step", "from jaxdp.training import step",
    "from ..training import step", "def late():\n    from jaxdp.training import step",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxdp.training import step",
])
def test_the_checker_sees_an_upward_import_however_it_is_written(tmp_path: pathlib.Path, line: str) -> None:
    _package(tmp_path, {"data/batches.py": line, "training/step.py": "import jaxdp.errors", "errors.py": "import os"})
    arrows = python_arrows(tmp_path / "jaxdp")
    assert arrows["jaxdp.training.step"] == {"jaxdp.errors"}
    found = upward_arrows(arrows, python_floors(arrows))
    assert found == ["jaxdp.data.batches -> jaxdp.training.step"]


def test_the_checker_sees_a_module_that_imports_the_public_names(tmp_path: pathlib.Path) -> None:
    _package(tmp_path, {"runs/train.py": "import jaxdp\nfrom jaxdp import DataParallelTrainer"})
    arrows = python_arrows(tmp_path / "jaxdp")
    assert upward_arrows(arrows, python_floors(arrows)) == ["jaxdp.runs.train -> jaxdp"]


def test_the_checker_sees_a_circle_of_rooms_that_no_two_modules_close(tmp_path: pathlib.Path) -> None:
    _package(tmp_path, {"models/a.py": "import jaxdp.data.a", "models/b.py": "", "data/a.py": "",
                        "data/b.py": "from jaxdp.models.b import x"})
    arrows = python_arrows(tmp_path / "jaxdp")
    assert circle(arrows) == []
    assert circle(between_rooms(arrows)) == ["jaxdp.data", "jaxdp.models", "jaxdp.data"]


def test_the_checker_refuses_a_room_and_a_native_file_without_a_floor() -> None:
    with pytest.raises(LookupError, match=r"jaxdp\.utils"):
        python_floor("jaxdp.utils.misc")
    with pytest.raises(LookupError, match=r"misc\.h"):
        native_floor("misc.h")


def test_the_checker_sees_an_upward_include(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tree.h").write_text('#include <cstdint>\n#include "jaxdp/vendor.h"\n# include <jaxdp/group.h>\n')
    arrows = native_arrows(tmp_path)
    assert arrows == {"tree.h": {"vendor.h", "group.h"}}
    floors = {name: native_floor(name) for name in ("tree.h", "vendor.h", "group.h")}
    assert upward_arrows(arrows, floors) == ["tree.h -> group.h"]


def _package(root: pathlib.Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / "jaxdp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(root).parents[:-1]:
            (root / parent / "__init__.py").touch()
