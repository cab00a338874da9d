"""Run model-written Python, safely: one program once, or over the tests of a problem."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvpolicy.lmeval_tasks.sandbox import choice
from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, Outcome
from kvpolicy.lmeval_tasks.sandbox.process import execute

_DEFAULT = Limits()


def run(program: str, *, stdin: str = "", limits: Limits = _DEFAULT, method: Method | None = None) -> Outcome:
    """Run `program`, the text of a Python script, with `stdin` as its standard input.

    method : how to isolate it; by default the best way that works here.

    Raises
    ------
    SandboxError
        If it cannot be isolated, which says nothing about the program.
    """
    return execute(method or choice.choose(), program, stdin, limits)


def run_all(
    program: str,
    stdins: Sequence[str],
    accept: Callable[[int, Outcome], bool],
    *,
    limits: Limits = _DEFAULT,
    parallel: int = 2,
    method: Method | None = None,
) -> tuple[list[Outcome], int | None]:
    """Outcomes of `program` on `stdins`, in their order, up to the first that `accept` refuses, and its number.

    Each has a sandbox of its own. Up to `parallel` of them run at a time; those behind the first refused one are
    stopped and left out, so the result does not depend on `parallel`.

    accept : gets the number of the input and its outcome; called in order.
    """
    chosen = method or choice.choose()
    cancelled = threading.Event()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(execute, chosen, program, stdin, limits, cancelled) for stdin in stdins]
        try:
            for number, future in enumerate(futures):
                outcomes.append(outcome := future.result())
                if not accept(number, outcome):
                    return outcomes, number
        finally:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
    return outcomes, None
