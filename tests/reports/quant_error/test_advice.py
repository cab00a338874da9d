"""The rules, one case each, and the sides of each threshold."""

from __future__ import annotations

import pytest

from kvpolicy.reports.quant_error.advice import Errors, advise_layer, advise_model, tail_note
from kvpolicy.reports.quant_error.output import Interval

BELOW, ACROSS, ABOVE = Interval(-0.02, -0.001), Interval(-0.02, 0.001), Interval(0.001, 0.02)


@pytest.mark.parametrize(
    ("plain", "protected", "smaller", "verdict"),
    [
        (0.010, 0.001, 0.001, "leave"),  # harmless as it is
        (0.100, 0.050, 0.060, "protect"),
        (0.100, 0.0569, 0.060, "protect"),  # 5% below the control
        (0.100, 0.0571, 0.060, "control"),  # not quite
        (0.100, 0.070, 0.060, "control"),
        (0.100, 0.094, None, "protect"),  # nothing else costs as little
        (0.100, 0.096, None, "leave"),
        (0.100, 0.096, 0.096, "leave"),
        (0.100, 0.099, 0.094, "control"),
        (0.100, 0.096, 0.120, "leave"),  # better than a worse control, and not worth it
    ],
)
def test_a_layer(plain: float, protected: float, smaller: float | None, verdict: str) -> None:
    assert advise_layer(Errors(plain, protected, smaller)).verdict == verdict


@pytest.mark.parametrize(
    ("errors", "difference", "verdict"),
    [
        (Errors(0.001, 0.0001, 0.0005), BELOW, "leave"),
        (Errors(0.02, 0.010, 0.015), BELOW, "protect"),
        (Errors(0.02, 0.010, 0.015), ACROSS, "control"),  # lower, and not shown to be
        (Errors(0.02, 0.015, 0.010), ABOVE, "control"),
        (Errors(0.02, 0.015, None), None, "protect"),
        (Errors(0.02, 0.0195, None), None, "leave"),
        (Errors(0.02, 0.0195, 0.021), BELOW, "leave"),
    ],
)
def test_the_model(errors: Errors, difference: Interval | None, verdict: str) -> None:
    advice = advise_model(errors, difference)
    assert advice.verdict == verdict
    assert "too coarse" not in advice.because


def test_advice_is_said_with_its_numbers() -> None:
    advice = advise_model(Errors(0.02, 0.015, 0.01), ABOVE)
    assert advice.because == (
        "0.0200 nats without protection, 0.0150 nats with it, 0.0100 nats of the control; "
        "difference of protection and control +0.0010 to +0.0200"
    )
    assert advise_layer(Errors(0.1, 0.094, None)).because == (
        "10.00% without protection, 9.40% with it, no control costs as little"
    )
    assert advise_layer(Errors(0.1, 0.096, 0.097)).because.endswith("9.70% of the control: nothing cuts it by 5%")


@pytest.mark.parametrize(
    ("errors", "verdict", "coarse"),
    [
        (Errors(0.5, 0.2, 0.09), "control", None),  # what counts is the arm that is advised
        (Errors(0.5, 0.2, 0.3), "protect", "0.20 nats"),
        (Errors(0.5, 0.4, 0.3), "control", "0.30 nats"),
        (Errors(0.5, 0.49, 0.49), "leave", "0.50 nats"),
    ],
)
def test_a_format_that_is_too_coarse_is_called_so(errors: Errors, verdict: str, coarse: str | None) -> None:
    advice = advise_model(errors, BELOW if verdict == "protect" else ABOVE)
    assert advice.verdict == verdict
    assert ("too coarse" in advice.because) == (coarse is not None)
    assert coarse is None or f"but {coarse} is too coarse" in advice.because


def test_the_tail_is_held_against_that_of_its_width() -> None:
    assert tail_note(4, 3.2) == "tail 3.20, below 3.3"
    assert tail_note(4, 3.3) == "tail 3.30, at or above 3.3"
    assert tail_note(2, 3.3) == "tail 3.30, below 10"
    assert tail_note(8, 50) == tail_note(None, 50) == "tail 50.00"
