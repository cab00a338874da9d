"""Carry `meta_info` through lm-eval, which keeps nothing of a response but its text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, SupportsIndex


class TextWithMeta(str):
    """A generated text that remembers the `meta_info` of its response.

    lm-eval hands each text on after `split` (stop strings, the end of thinking) and `lstrip`; those
    results remember too. So a task's `process_results` can read ``text.meta_info``.
    """

    meta_info: dict[str, Any]

    def __new__(cls, text: str, meta_info: dict[str, Any]) -> TextWithMeta:
        self = super().__new__(cls, text)
        self.meta_info = meta_info
        return self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [TextWithMeta(part, self.meta_info) for part in super().split(sep, maxsplit)]

    def lstrip(self, chars: str | None = None) -> TextWithMeta:
        return TextWithMeta(super().lstrip(chars), self.meta_info)

    def __reduce__(self) -> tuple[Callable[..., TextWithMeta], tuple[str, dict[str, Any]]]:
        return TextWithMeta, (str(self), self.meta_info)


def after_generate(result: Any, _engine: Any, *_args: Any, **_keywords: Any) -> Any:
    """In a process that runs lm-eval, let the texts of `Engine.generate` carry their `meta_info`."""
    if "lm_eval" in sys.modules and isinstance(result, dict | list):
        for response in result if isinstance(result, list) else [result]:
            if isinstance(response.get("text"), str):
                response["text"] = TextWithMeta(response["text"], response["meta_info"])
    return result
