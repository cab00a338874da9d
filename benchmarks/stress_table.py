"""What all lives of a run of stress.py come to: counts by kind, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from number_tables import numbers_table
from rich.table import Table
from stress_alone import Judgement
from stress_lives import Life
from stress_messages import Outcome

ENDS = ("finished", "aborted", "disconnected", "flushed", "refused", "failed")
COMPARISONS = (
    *("equal", "near-tie", "deferred", "late eviction", "retracted", "unexplained", "nothing came", "not judged"),
)
EXPLAINED = ("near-tie", "deferred", "late eviction", "retracted")


@dataclass
class Led:
    """A life that was led, and what became of it.

    server : kind of the server that it was led on.
    end : how it ended; "failed" if not as its kind should, and `fault` says how.
    """

    life: Life
    server: str
    outcome: Outcome
    end: str
    fault: str = ""
    judgement: Judgement | None = None

    @property
    def judged(self) -> bool:
        """Whether its answer can be compared: all but flushes and failures."""
        return self.end in ("finished", "aborted", "disconnected")

    def shown(self) -> dict[str, Any]:
        """For the JSON file, where it is a failure or a difference."""
        return {
            "life": self.life.number,
            "question": self.life.question.number,
            "kind": self.life.kind,
            "policy": self.life.question.policy,
            "server": self.server,
            "end": self.end,
            "fault": self.fault,
            "comparison": self.judgement.comparison if self.judgement else None,
            "details": self.judgement.details if self.judgement else [],
        }


@dataclass
class Tally:
    """How many lives of a kind ended how, and how their answers compare."""

    ends: Counter[str] = field(default_factory=Counter)
    comparisons: Counter[str] = field(default_factory=Counter)

    def add(self, led: Led) -> None:
        self.ends[led.end] += 1
        if led.judgement is not None:
            self.comparisons[led.judgement.comparison] += 1

    def shown(self) -> dict[str, Any]:
        return {"lives": self.ends.total(), "ends": dict(self.ends), "answers": dict(self.comparisons)}


def tallies(all_led: list[Led]) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """By kind, and by trait; a life has one kind and any number of traits."""
    kinds: dict[str, Tally] = {}
    traits: dict[str, Tally] = {}
    for led in all_led:
        kinds.setdefault(led.life.kind, Tally()).add(led)
        for trait in (*led.life.traits, f"{led.server} server"):
            traits.setdefault(trait, Tally()).add(led)
    return dict(sorted(kinds.items())), dict(sorted(traits.items()))


def cache_counts(all_led: list[Led]) -> dict[str, int]:
    """What the records of all answers say of the cache, added up."""
    reports = [answer.report for led in all_led for answer in led.outcome.answers if answer.report is not None]
    names = ("evictions", "tokens_evicted", "evictions_deferred", "retractions", "decode_steps")
    return {"answers with a record": len(reports)} | {name: sum(report[name] for report in reports) for name in names}


def table(all_led: list[Led]) -> Table:
    """Ends and comparisons by kind, then by trait, then of all."""
    shown = numbers_table("Lives", ("", "lives", *ENDS, *COMPARISONS))
    kinds, traits = tallies(all_led)
    everything = Tally()
    for led in all_led:
        everything.add(led)
    for rows in (kinds, traits, {"all": everything}):
        for name, tally in rows.items():
            counts = [tally.ends.total(), *(tally.ends[end] for end in ENDS)]
            counts += [tally.comparisons[comparison] for comparison in COMPARISONS]
            shown.add_row(name, *(str(count or "") for count in counts))
        shown.add_section()
    return shown
