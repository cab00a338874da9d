"""The programs that run in the sandbox: a solution, in the surroundings that LiveCodeBench gives it.

Those are names that solutions use without importing them, deep recursion and long integers. A functional solution
gets its arguments from standard input, one JSON value a line, and its return value is printed as JSON.
"""

from __future__ import annotations

# Later lines win over earlier ones: modules over what the star imports put in their place.
_SURROUNDINGS = """\
from collections import *
from copy import *
from datetime import *
from functools import *
from heapq import *
from bisect import *
from io import *
from itertools import *
from json import *
from math import *
from operator import *
from random import *
from re import *
from statistics import *
from string import *
from sys import *
from builtins import *
from typing import *
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re
import statistics, string, sys
sys.setrecursionlimit(50_000)
sys.set_int_max_str_digits(50_000)
"""

_CALL = """\
import json, os, sys
from types import ModuleType
arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
# What the solution prints is no answer.
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
solution = sys.modules["solution"] = ModuleType("solution")
exec({surroundings}, vars(solution))
exec(compile({source}, "solution.py", "exec"), vars(solution))
owner = solution.Solution() if hasattr(solution, "Solution") else solution
def plain(value):
    return value.tolist() if hasattr(value, "tolist") else repr(value)
with open(answers, "w") as file:
    json.dump(getattr(owner, {function})(*arguments), file, default=plain)
"""


def compiling(source: str) -> str:
    """A program that compiles `source` and does not run it."""
    return f"compile({source!a}, 'solution.py', 'exec')"


def reading_stdin(source: str) -> str:
    """A program that runs `source` as a script."""
    return f"{_SURROUNDINGS}\nexec(compile({source!a}, 'solution.py', 'exec'))"


def calling(source: str, function: str) -> str:
    """A program that calls a method of the class ``Solution`` of `source`, or a function if it has no such class."""
    return _CALL.format(surroundings=ascii(_SURROUNDINGS), source=ascii(source), function=ascii(function))
