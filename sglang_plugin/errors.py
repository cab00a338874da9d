"""What the plugin raises at its boundary."""

from __future__ import annotations

import sys
from types import TracebackType


class KVPolicyError(ValueError):
    """A configuration or engine that the plugin refuses; the message is one sentence for the user.

    Creating one makes an uncaught KVPolicyError end the process with that sentence alone: the users
    of a command line (lm-eval, the server) need the sentence, not SGLang's call stack.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if sys.excepthook is not _print_sentence:
            _previous.append(sys.excepthook)
            sys.excepthook = _print_sentence


_previous = [sys.__excepthook__]


def _print_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KVPolicyError):
        print(f"kvpolicy: {error}", file=sys.stderr)
    else:
        _previous[-1](kind, error, trace)
