"""Our own programs for problems of LiveCodeBench v6, by id: a right one, and a wrong one that looks like it."""

from __future__ import annotations

PROGRAMS = {
    "abc387_b": (
        "x = int(input())\nprint(sum(a * b for a in range(1, 10) for b in range(1, 10) if a * b != x))",
        "x = int(input())\nprint(sum(a * b for a in range(1, 10) for b in range(a, 10) if a * b != x))",
    ),
    "abc394_b": (
        "print(*sorted((input() for _ in range(int(input()))), key=len), sep='')",
        "print(*sorted(input() for _ in range(int(input()))), sep='')",
    ),
    "abc395_b": (
        "n = int(input())\nfor i in range(n):\n"
        "    print(*('#.'[min(i, j, n - 1 - i, n - 1 - j) % 2] for j in range(n)), sep='')",
        "n = int(input())\nfor i in range(n):\n    print(*('#.'[min(i, j) % 2] for j in range(n)), sep='')",
    ),
    "abc399_b": (
        "input()\np = list(map(int, input().split()))\nfor a in p:\n    print(1 + sum(b > a for b in p))",
        "input()\np = list(map(int, input().split()))\nfor a in p:\n    print(sum(b >= a for b in p))",
    ),
    "abc400_b": (
        "n, m = map(int, input().split())\nx = sum(n**i for i in range(m + 1))\nprint(x if x <= 10**9 else 'inf')",
        "n, m = map(int, input().split())\nx = sum(n**i for i in range(m + 1))\nprint(x if x < 10**9 else 'inf')",
    ),
    # Its answers are fractions with an allowed error; printed in full they have a digit more than the expected ones.
    "abc392_d": (
        "dice = [Counter(input().split()[1:]) for _ in range(int(input()))]\n"
        "def chance(a, b):\n    return sum(a[x] * b[x] for x in a) / (a.total() * b.total())\n"
        "print(max(chance(a, b) for a, b in combinations(dice, 2)))",
        "dice = [Counter(input().split()[1:]) for _ in range(int(input()))]\n"
        "def chance(a, b):\n    return sum(a[x] * b[x] for x in a) / max(a.total(), b.total()) ** 2\n"
        "print(max(chance(a, b) for a, b in combinations(dice, 2)))",
    ),
    "3708": (
        "class Solution:\n    def zigzagTraversal(self, grid: List[List[int]]) -> List[int]:\n"
        "        return [x for i, row in enumerate(grid) for x in (row[::-1] if i % 2 else row)][::2]",
        "class Solution:\n    def zigzagTraversal(self, grid: List[List[int]]) -> List[int]:\n"
        "        return [x for row in grid for x in row][::2]",
    ),
    "3709": (
        "class Solution:\n    def hasSpecialSubstring(self, s: str, k: int) -> bool:\n"
        "        return any(len(list(run)) == k for _, run in groupby(s))",
        "class Solution:\n    def hasSpecialSubstring(self, s: str, k: int) -> bool:\n"
        "        return any(len(list(run)) > k for _, run in groupby(s))",
    ),
    "3736": (
        "class Solution:\n    def findValidPair(self, s: str) -> str:\n        fits = lambda d: s.count(d) == int(d)\n"
        "        return next((a + b for a, b in pairwise(s) if a != b and fits(a) and fits(b)), '')",
        "class Solution:\n    def findValidPair(self, s: str) -> str:\n        fits = lambda d: s.count(d) == int(d)\n"
        "        return next((a + b for a, b in pairwise(s) if fits(a) and fits(b)), None)",
    ),
    "3763": (
        "class Solution:\n    def separateSquares(self, squares: List[List[int]]) -> float:\n"
        "        total = sum(l * l for _, _, l in squares)\n"
        "        low, high = 0.0, float(max(y + l for _, y, l in squares))\n"
        "        for _ in range(100):\n            line = (low + high) / 2\n"
        "            below = sum(l * min(max(line - y, 0), l) for _, y, l in squares)\n"
        "            low, high = (low, line) if 2 * below >= total else (line, high)\n        return high",
        "class Solution:\n    def separateSquares(self, squares: List[List[int]]) -> float:\n"
        "        return sum((y + l / 2) * l * l for _, y, l in squares) / sum(l * l for _, _, l in squares)",
    ),
}
