"""What follows from the errors: protect, take the control instead, or leave the codec as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvpolicy.reports.quant_error.output import Interval

# Where the attention output, or the next-token distribution, is this close, there is nothing to gain.
HARMLESS_ATTENTION = 0.01
HARMLESS_KL = 0.001
# Of the error without protection. Less is not worth another format.
LEAST_GAIN = 0.05
# By so much a layer's protected error must be below that of the control: the control is simpler.
MARGIN = 0.05
# Nats. With more, the distribution is another one, whichever arm is best.
TOO_COARSE_KL = 0.1
# p99/p50 of the value range from where protection began to win against more bits, on synthetic tails; by code bits.
TAILS = {4: 3.3, 2: 10.0}

RULES = (
    f"leave: the error without protection is at most {HARMLESS_ATTENTION:.0%} of the attention output (a layer) or "
    f"{HARMLESS_KL:g} nats of mean KL (the model)",
    f"protect: protection by range cuts the error by at least {LEAST_GAIN:.0%}, and is at least {MARGIN:.0%} below the "
    "control of no more bits (a layer), or below it with all of the 95% interval of the difference in mean KL (the "
    "model); where there is no such control, the first half decides",
    f"take the control, which is a smaller group or more bits without protection: it costs no more, needs no second "
    f"pool, and cuts the error by at least {LEAST_GAIN:.0%}",
    "leave: nothing does",
    f"whatever the rule says: above {TOO_COARSE_KL:g} nats of mean KL the format is too coarse for the model",
    "the tail p99/p50 of the value range is said beside it and decides nothing: on synthetic tails protection began to "
    f"win against more bits at {TAILS[4]:g} with 4 bits, and between {TAILS[2]:g} and 18 with 2 bits",
)


class Errors(NamedTuple):
    """Of the arms of one codec; `smaller` is None where no control costs no more than protection."""

    plain: float
    protected: float
    smaller: float | None


class Advice(NamedTuple):
    """verdict : "protect", "control" or "leave". because : a clause."""

    verdict: str
    because: str


def advise_layer(errors: Errors) -> Advice:
    """From relative errors of one layer's attention output."""
    if errors.plain <= HARMLESS_ATTENTION:
        return Advice("leave", f"{errors.plain:.2%} without protection is at most {HARMLESS_ATTENTION:.0%}")
    wins = errors.smaller is None or errors.protected <= errors.smaller * (1 - MARGIN)
    return _choose(errors, wins, lambda error: f"{error:.2%}")


def advise_model(errors: Errors, difference: Interval | None) -> Advice:
    """From mean KLs in nats; `difference`: interval of protected less control, None where there is no control."""
    if errors.plain <= HARMLESS_KL:
        return Advice("leave", f"{errors.plain:.5f} nats without protection are at most {HARMLESS_KL:g}")
    advice = _choose(errors, difference is None or difference.high < 0, lambda error: f"{error:.4f} nats")
    if difference is not None:
        interval = f"difference of protection and control {difference.low:+.4f} to {difference.high:+.4f}"
        advice = advice._replace(because=f"{advice.because}; {interval}")
    kl = {"protect": errors.protected, "control": errors.smaller, "leave": errors.plain}[advice.verdict]
    if kl is not None and kl > TOO_COARSE_KL:
        advice = advice._replace(because=f"{advice.because}; but {kl:.2f} nats is too coarse, take more bits")
    return advice


def tail_note(code_bits: int | None, tail: float) -> str:
    """How a tail ratio p99/p50 compares with the synthetic ones; `code_bits` is None for a codec without integers."""
    threshold = TAILS.get(code_bits) if code_bits is not None else None
    if threshold is None:
        return f"tail {tail:.2f}"
    side = "below" if tail < threshold else "at or above"
    return f"tail {tail:.2f}, {side} {threshold:g}"


def _choose(errors: Errors, wins: bool, show: Callable[[float], str]) -> Advice:
    needed = errors.plain * (1 - LEAST_GAIN)
    control = "no control costs as little" if errors.smaller is None else f"{show(errors.smaller)} of the control"
    because = f"{show(errors.plain)} without protection, {show(errors.protected)} with it, {control}"
    if wins and errors.protected <= needed:
        return Advice("protect", because)
    if errors.smaller is not None and errors.smaller <= needed:
        return Advice("control", because)
    return Advice("leave", f"{because}: nothing cuts it by {LEAST_GAIN:.0%}")
