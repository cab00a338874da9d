"""What the plugin raises at its boundary."""

from __future__ import annotations

import functools
import sys
from types import TracebackType


class KVPolicyError(ValueError):
    """A configuration or engine that the plugin refuses; the message is one sentence for the user.

    Creating one makes an uncaught KVPolicyError end the process with that sentence alone: the users
    of a command line (lm-eval, the server) need the sentence, not SGLang's call stack.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        _install_excepthook()


@functools.cache  # once: installed again over a wrapper of itself, the two would call each other for ever
def _install_excepthook() -> None:
    previous = sys.excepthook

    def print_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KVPolicyError):
            print(f"kvpolicy: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = print_sentence
