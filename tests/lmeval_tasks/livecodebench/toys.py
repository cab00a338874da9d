"""Problems of our own in LiveCodeBench's two formats, with programs for them."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

FILE = "livecodebench_v6.jsonl"


def encoded(value: Any) -> str:
    """As the hub stores private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


DOUBLES = {
    "question_id": "toy_a",
    "question_title": "Doubles",
    "question_content": "Print twice the integer N.\n\nInput\n\nN",
    "platform": "atcoder",
    "contest_id": "toy",
    "contest_date": "2025-02-01T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([case("4", "8"), case("0\n", "0\n")]),
    "private_test_cases": encoded(json.dumps([case("-3", "-6"), case("1" + "0" * 30, "2" + "0" * 30)])),
    "metadata": "{}",
}
PAIRS = DOUBLES | {
    "question_id": "9001",
    "question_title": "pairs",
    "question_content": "Given nums and k, return all pairs [i, j], i < j, with nums[i] + nums[j] == k, sorted.",
    "platform": "leetcode",
    "starter_code": "class Solution:\n    def pairs(self, nums: List[int], k: int) -> List[List[int]]:\n        ",
    "public_test_cases": json.dumps([case("[1, 2, 3]\n4", "[[0, 2]]", "functional")]),
    "private_test_cases": encoded(json.dumps([case("[0, 0, 0]\n0", "[[0, 1], [0, 2], [1, 2]]", "functional")])),
    "metadata": '{"func_name": "pairs"}',
}
MEAN = DOUBLES | {
    "question_id": "toy_c",
    "question_title": "Mean",
    "question_content": "Print how many there are, and the mean. An absolute or relative error of 10^{-6} is allowed.",
    "public_test_cases": json.dumps([case("1 2", "2\n1.5")]),
    "private_test_cases": encoded(json.dumps([case("1 0 0", "3\n0.333333333333")])),
}
ROWS = (DOUBLES, PAIRS, MEAN)

SOLUTIONS = {
    "toy_a": "print(2 * int(input()))",
    "9001": (
        "class Solution:\n    def pairs(self, nums: List[int], k: int) -> List[List[int]]:\n"
        "        return [(i, j) for i, j in combinations(range(len(nums)), 2) if nums[i] + nums[j] == k]"
    ),
    "toy_c": "a = list(map(int, input().split()))\nprint(len(a))\nprint(sum(a) / len(a))",
}


def write(folder: Path) -> Path:
    """The file of these problems, as the hub has it."""
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return folder


def document(row: dict[str, Any]) -> dict[str, Any]:
    """What the grading gets."""
    return {
        "id": row["question_id"],
        "problem": row["question_content"],
        "function": json.loads(row["metadata"]).get("func_name", ""),
        "public_test_cases": json.loads(row["public_test_cases"]),
        "private_test_cases": row["private_test_cases"],
    }


def block(program: str) -> str:
    return f"Here it is.\n\n```python\n{program}\n```\n"
