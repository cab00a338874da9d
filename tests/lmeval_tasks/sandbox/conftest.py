"""The ways to isolate a program that this machine allows; the others are skipped, with the reason."""

from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.sandbox import choice
from kvpolicy.lmeval_tasks.sandbox.method import Method
from tests.lmeval_tasks.sandbox.runs import BEST, METHODS


def _usable(method: Method) -> Method:
    if (reason := choice.refusal(method)) is not None:
        pytest.skip(reason)
    return method


@pytest.fixture(params=METHODS, ids=str)
def method(request: pytest.FixtureRequest) -> Method:
    return _usable(request.param)


@pytest.fixture(params=BEST, ids=str)
def one_of_each_tool(request: pytest.FixtureRequest) -> Method:
    return _usable(request.param)
