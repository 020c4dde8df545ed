"""The native groups under ThreadSanitizer and AddressSanitizer, with ranks as threads, and ranks killed at each phase.

Programs are compiled straight from the library's sources, at one instruction level, into
build/native-tests; an object is made again only when a source or a header is newer.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ROOT

HERE = Path(__file__).resolve().parent
SOURCES = [ROOT / "ffi" / f"{name}.cc" for name in (
    "kernels_cpu", "kernels_dispatch", "work", "local_group", "registry", "segment", "staging", "peers", "ipc_group")]
HEADERS = [*(ROOT / "ffi" / "include" / "jaxdp").glob("*.h"), HERE / "ranks.h"]
BUILD = ROOT / "build" / "native-tests"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-DJAXDP_LEVEL=baseline",
         "-DJAXDP_TEST_HOOKS", f"-I{ROOT / 'ffi' / 'include'}", f"-I{HERE}"]
RACE = 66  # ThreadSanitizer's exit code

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}"),
    pytest.mark.timeout(170),  # the first test of a build compiles it: 25 s of one core, more on a busy machine
]


@dataclasses.dataclass(frozen=True)
class Build:
    """One way to compile. `broken` defines a switch for the sources that it names, to see a test fail."""

    name: str
    flags: tuple[str, ...] = ()
    switch: str = ""
    broken: tuple[str, ...] = ()

    def object_of(self, source: Path) -> tuple[Path, list[str]]:
        """The object's place and its flags; sources that the switch does not touch share the whole build's."""
        if source.stem in self.broken:
            return BUILD / f"{self.name}-{self.switch}" / f"{source.stem}.o", [*self.flags, f"-D{self.switch}"]
        return BUILD / self.name / f"{source.stem}.o", list(self.flags)

    def program(self, main: str) -> Path:
        """Compiles and links tests/native/`main`.cc with the library's sources."""
        sources = [HERE / f"{main}.cc", *SOURCES]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self._compile, sources))
        linked = BUILD / (f"{self.name}-{self.switch}" if self.switch else self.name) / main
        if _older(linked, objects):
            _run_compiler([*self.flags, "-pthread", *map(str, objects), "-o", str(linked)])
        return linked

    def _compile(self, source: Path) -> Path:
        target, flags = self.object_of(source)
        if _older(target, [source, *HEADERS]):
            target.parent.mkdir(parents=True, exist_ok=True)
            _run_compiler([*FLAGS, *flags, "-c", str(source), "-o", str(target)])
        return target


def _older(target: Path, inputs: list[Path]) -> bool:
    return not target.exists() or any(path.stat().st_mtime >= target.stat().st_mtime for path in inputs)


def _run_compiler(arguments: list[str]) -> None:
    done = subprocess.run([COMPILER, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


THREADS = Build("threads", ("-fsanitize=thread",))
ADDRESSES = Build("addresses", ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"))


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": f"exitcode={RACE} halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run([str(program), *map(str, arguments)], check=False, capture_output=True, text=True, timeout=60,
                          env=environment)


def assert_right(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-6000:]}"


@pytest.mark.parametrize(("build", "world"), [(THREADS, 4), (ADDRESSES, 2), (ADDRESSES, 8)],
                         ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("kind", ["local", "ipc", "opposite"])
def test_random_calls_are_right_and_no_sanitizer_finds_fault(build: Build, world: int, kind: str) -> None:
    assert_right(run(build.program("stress"), kind, world, 300))


def test_a_death_at_any_phase_ends_the_others_calls_exactly_and_in_time() -> None:
    assert_right(run(ADDRESSES.program("deaths")))


# Each line is a control: with this part of the protocol taken out the stress test must fail, or it
# would not be seen to guard it. Seen on x86-64 with g++ 12: always a race that ThreadSanitizer
# reports, or the wrong sums or signatures that follow from it, whichever comes first.
@pytest.mark.parametrize(("switch", "broken", "race_between"), [
    ("JAXDP_BREAK_ACQUIRE", "peers", "a rank's writes before it publishes, and a peer's reads after its wait"),
    ("JAXDP_BREAK_SECOND_BARRIER", "ipc_group", "a rank's sum into its share, and a peer's copy of that share"),
    ("JAXDP_BREAK_PARITY", "peers", "a rank's next copy into its one buffer, and a peer's reads of the last"),
])
def test_taking_out_a_part_of_the_protocol_is_seen(switch: str, broken: str, race_between: str) -> None:
    done = run(dataclasses.replace(THREADS, switch=switch, broken=(broken,)).program("stress"), "ipc", 4, 300)
    race = done.returncode == RACE and "WARNING: ThreadSanitizer: data race" in done.stderr
    wrong = done.returncode == 1 and re.search(r"wrong: (rank|jaxdp\.RankMismatch)", done.stderr)
    assert race or wrong, f"exit {done.returncode}: no sign of a race between {race_between}\n{done.stderr[-3000:]}"
