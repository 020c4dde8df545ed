"""Forks ranks from one process that has imported everything, so that a rank starts in milliseconds.

Speaks JSON lines. `{"function": "module:name", "arguments": {...}, "ranks": [{"environment": ..., "log": ...}]}`
on stdin forks these ranks and is answered by `{"pids": [...]}`; `{"reap": seconds}` by `{"codes": [...]}`
once all have ended, null for those that had to be killed at the deadline.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jaxdp.collectives.ipc  # noqa: F401  loaded here, once for all ranks


def become_rank(function: str, arguments: Mapping[str, Any], environment: Mapping[str, str], log: str) -> None:
    """Runs `function` as a process of its own and ends it, as the interpreter would."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        os.environ.update(environment)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(**arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_rank(**how: Any) -> int:
    """The pid of a new rank."""
    pid = os.fork()
    if pid == 0:
        become_rank(**how)
    return pid


def reap(pids: list[int], timeout_s: float) -> list[int | None]:
    """Exit codes (negative: a signal) in order; None for a process that had to be killed at the deadline."""
    deadline = time.monotonic() + timeout_s
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def serve() -> None:
    """Answers requests until stdin ends, then kills what is left."""
    pids: list[int] = []
    for line in sys.stdin:
        request = json.loads(line)
        importlib.import_module(request.get("function", "multiprocess").partition(":")[0])  # once for all forks
        if "reap" in request:
            answer: dict[str, Any] = {"codes": reap(pids, request["reap"])}
            pids = []
        else:
            pids = [fork_rank(function=request["function"], arguments=request["arguments"], **how)
                    for how in request["ranks"]]
            answer = {"pids": pids}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    reap(pids, 0.0)


if __name__ == "__main__":
    serve()
