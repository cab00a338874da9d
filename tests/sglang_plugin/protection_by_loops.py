"""The rules of protection, one token, layer and head at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

LAYERS, HEADS = 2, 3
SINKS = 4
HEADS_OF_ALL = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]

Place = tuple[int, int, int]  # layer, head, slot


@dataclass
class ByLoops:
    """What every slot holds in each layer and head, and which of them are protected.

    share : of a request's tokens, how many may be protected for their range
    content : which vector was last written, or moved, there
    spread : of each vector, largest minus smallest number
    """

    share: Fraction
    content: dict[Place, int] = field(default_factory=dict)
    spread: list[float] = field(default_factory=list)
    protected: set[Place] = field(default_factory=set)

    def allowed(self, tokens: int) -> int:
        return tokens * self.share.numerator // self.share.denominator

    def widest(self, places: Sequence[Place], count: int) -> set[Place]:
        """Of `places`, oldest token first, the `count` of largest range; of equal ones the older."""
        spread = [self.spread[self.content[place]] for place in places]
        order = sorted(range(len(places)), key=lambda age: (-spread[age], age))
        return {places[age] for age in order[:count]}

    def decode(self, slots: Sequence[int]) -> None:
        for layer, head in HEADS_OF_ALL:
            self.protected |= {(layer, head, slot) for slot in slots}

    def prefill(self, slots: Sequence[int], start: int, length: int, recent: int) -> None:
        """Tokens ``start …`` of a prompt of `length`, in `slots`; their content is there already."""
        end = start + len(slots)
        for layer, head in HEADS_OF_ALL:
            rest, positions = [], []
            for position, slot in zip(range(start, end), slots, strict=True):
                if position < SINKS or position >= length - recent:
                    self.protected.add((layer, head, slot))
                else:
                    rest.append((layer, head, slot))
                    positions.append(position)
            if rest:
                count = self.allowed(positions[-1] + 1) - self.allowed(positions[0])
                self.protected |= self.widest(rest, count)

    def settle(self, slots: Sequence[int], first: int) -> None:
        count = self.allowed(first + len(slots)) - self.allowed(first)
        for layer, head in HEADS_OF_ALL:
            held = [place for slot in slots if (place := (layer, head, slot)) in self.protected]
            self.protected -= set(held) - self.widest(held, count)

    def evict(
        self,
        row: Sequence[int],
        own: Sequence[int],
        keep: list[list[list[int]]],
        destination: Sequence[int],
        recent: int,
        given_back: Sequence[int],
    ) -> None:
        """Kept tokens move to `destination` with their protection; the oldest of those kept are the sinks from now.

        given_back : slots that were given back to make room, perhaps those of the row's beginning
        """
        for layer, head in HEADS_OF_ALL:
            kept = keep[layer][head]
            stay, compete = set(), []
            for place, token in enumerate(kept):
                source = (layer, head, row[token])
                if source in self.protected:
                    if place < SINKS or token >= len(row) - recent:
                        stay.add(source)
                    else:
                        compete.append(source)
            stay |= self.widest(compete, self.allowed(len(kept)))
            content = [self.content[layer, head, row[token]] for token in kept]
            self.protected -= {(layer, head, slot) for slot in (*own, *given_back)}
            for token, slot, vector in zip(kept, destination, content, strict=True):
                self.content[layer, head, slot] = vector
                if (layer, head, row[token]) in stay:
                    self.protected.add((layer, head, slot))

    def release(self, slots: Sequence[int]) -> None:
        for layer, head in HEADS_OF_ALL:
            self.protected -= {(layer, head, slot) for slot in slots}
