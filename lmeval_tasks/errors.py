"""What a task raises when it refuses a run."""

from __future__ import annotations

import functools
import sys
from types import TracebackType


class TaskError(ValueError):
    """A task that cannot run as asked; the message is one sentence for the user.

    Creating one makes an uncaught TaskError end the process with that sentence alone: whoever types
    ``lm_eval …`` needs the sentence, not lm-eval's call stack.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        _install_excepthook()


@functools.cache  # once: installed again over a wrapper of itself, the two would call each other for ever
def _install_excepthook() -> None:
    previous = sys.excepthook

    def print_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, TaskError):
            print(f"kvpolicy: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = print_sentence
