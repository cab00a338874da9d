"""A frozen split of every task: settings are chosen on `dev`, and `confirm` is reported once.

A problem's part is a function of its id alone: no list of ids, no seed, no order, and a data set that grows keeps the
parts of the problems it had. The rule is ``int(md5(id), 16) % 5 < 2`` for `dev`.

The paper whose protocol this follows (alpha, arXiv 2605.14292) publishes that it divides MATH-500 by MD5 buckets into
201 and 299 problems. Its key and its threshold are not published. This rule, on the field ``unique_id`` of
HuggingFaceH4/MATH-500, gives these counts; so do other rules, and the parts need not be the paper's.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Part = Literal["dev", "confirm"]

_BUCKETS, _DEV_BUCKETS = 5, 2


def part_of(identifier: str) -> Part:
    """The part that the problem of this id belongs to; for MATH-500 its ``unique_id``."""
    digest = hashlib.md5(identifier.encode(), usedforsecurity=False).hexdigest()
    return "dev" if int(digest, 16) % _BUCKETS < _DEV_BUCKETS else "confirm"
