"""Numbers that can be compared without computer algebra."""

from __future__ import annotations

import re
from fractions import Fraction

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<decimal>{_DECIMAL})"
    r"|(?:(?P<whole>[0-9]+)\s*)?\\frac\{\s*(?P<inner>-?)(?P<above>[0-9]+)\s*\}\{\s*(?P<below>[0-9]+)\s*\}"
    r"|(?:(?P<whole2>[0-9]+)\s+)?(?P<above2>[0-9]+)\s*/\s*(?P<below2>[0-9]+))"
)
_REPEATING = re.compile(r"(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\overline ?\{(?P<period>[0-9]+)\}")


def number(text: str) -> Fraction | None:
    """The value of a plain number, fraction or mixed number in canonical spelling; None for anything else."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    above, below = match["above"] or match["above2"], match["below"] or match["below2"]
    if match["decimal"]:
        value = Fraction("0" + match["decimal"].rstrip("."))
    elif int(below) == 0:
        return None
    else:
        value, whole = Fraction(int(above), int(below)), match["whole"] or match["whole2"]
        if match["inner"]:
            value = -value
        if whole is not None:
            if not 0 <= value < 1:  # "2 \frac{3}{2}" is a product
                return None
            value += int(whole)
    return -value if match["sign"] == "-" else value


def repeating(text: str) -> str:
    r"""`text` with repeating decimals, as in ``0.1\overline{6}``, written as fractions."""
    return _REPEATING.sub(_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, period = match["whole"] or "0", match["fixed"], match["period"]
    nines = 10 ** len(period) - 1
    above = int(whole + fixed) * nines + int(period)
    return rf"\frac{{{above}}}{{{nines * 10 ** len(fixed)}}}"
