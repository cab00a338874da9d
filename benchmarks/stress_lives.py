"""The lives that requests lead in stress.py: each a pure function of (seed, number).

A *question* is a request as such: prompt, policy, number of tokens. A *life* asks one in some way: streamed or not, cut
off or not. Many lives share a question, so that one answer to it, given alone, judges them all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

ARMS = ("vase-dkv", "vase-attnv", "random", "h2o", "full")
BUDGET, PERIOD = 64, 16  # of the launch; a question may ask for less
QUESTIONS = 300
CUT_TOKENS = 500  # asked for by a life that is cut off, so that it is not over by then
VOCABULARY = (100, 40000)  # ordinary tokens of the model's vocabulary
WORDS = ("one", "two", "three", "five", "eight", "thirteen", "red", "green", "blue", "apple", "pear", "plum", "fig")
STOPS = ("e", "s", "in", "th", "on ", "er", "qu", "zz")

Api = Literal["generate", "completions", "chat"]
Way = Literal["whole", "stream", "abort", "disconnect", "flush"]


@dataclass(frozen=True)
class Question:
    """A request, but for how its answer is fetched.

    prompt : token ids; for the chat API the text of one message.
    stop : strings that end the answer.
    ignore_eos : if not, the model may end the answer before `tokens`.
    samples : how many answers are asked for (`n`).
    """

    number: int
    api: Api
    prompt: tuple[int, ...] | str
    tokens: int
    policy: str
    budget: int
    period: int
    seed: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = True
    samples: int = 1
    temperature: float = 0.0

    @property
    def may_stop(self) -> bool:
        """Whether the answer may end before its last token for another reason than being cut off."""
        return bool(self.stop) or not self.ignore_eos


@dataclass(frozen=True)
class Life:
    """How one request is sent and fetched.

    way : the answer comes whole or as a stream, or the life is cut off: by SGLang's abort call, or by a client that
        leaves. A `flush` asks SGLang to flush its cache, in the middle of everything, and nothing else.
    streams : whether a life that is cut off streams until then.
    cut_tokens : how many tokens it has received by then, if it streams.
    cut_seconds : how long it has waited by then, if it does not; it may still be queued.
    pause : seconds before it is sent.
    """

    number: int
    question: Question
    way: Way
    streams: bool
    cut_tokens: int
    cut_seconds: float
    pause: float

    @property
    def is_cut(self) -> bool:
        """Whether the request is given up before its end."""
        return self.way in ("abort", "disconnect")

    @property
    def tokens(self) -> int:
        """How many tokens it asks for."""
        return max(self.question.tokens, CUT_TOKENS) if self.is_cut else self.question.tokens

    @property
    def rid(self) -> str:
        """SGLang aborts all requests whose id begins with a given one, so all have the same length."""
        return f"life-{self.number:07}"

    @property
    def kind(self) -> str:
        """What it is counted under."""
        if self.way == "flush":
            return "flush"
        fetched = f"{self.question.api}, {'streamed' if self.streams else 'whole'}"
        return f"{fetched}, {self.way}" if self.is_cut else fetched

    @property
    def traits(self) -> tuple[str, ...]:
        """What else it is counted under."""
        if self.way == "flush":
            return ()
        question = self.question
        found = {
            question.policy: True,
            "1 token": self.tokens == 1,
            "n > 1": question.samples > 1,
            "stop strings": bool(question.stop),
            "sampled": question.temperature > 0,
            "prompt over 150": len(question.prompt) > 150,
        }
        return tuple(name for name, holds in found.items() if holds)


def prefixes(seed: int) -> list[tuple[int, ...]]:
    """The few-shot prompts that questions share."""
    rng = random.Random(f"{seed} prefixes")
    return [_ids(rng, length) for length in (24, 48, 80, 120)]


def question_of(seed: int, number: int) -> Question:
    """The question of this number."""
    rng = random.Random(f"{seed} question {number}")
    api: Api = rng.choices(("generate", "completions", "chat"), (70, 17, 13))[0]
    tokens = 1 if rng.random() < 0.06 else rng.choice((rng.randint(2, 15), rng.randint(16, 45), rng.randint(45, 90)))
    policy = rng.choices(ARMS, (3, 3, 3, 3, 2))[0]
    return Question(
        number=number,
        api=api,
        prompt=_message(rng) if api == "chat" else _prompt(rng, seed),
        tokens=tokens,
        policy=policy,
        budget=rng.choice((BUDGET, BUDGET, 48)),
        period=rng.choice((PERIOD, PERIOD, 8)),
        seed=rng.randrange(2**31),
        stop=tuple(rng.sample(STOPS, rng.randint(1, 2))) if rng.random() < 0.12 else (),
        ignore_eos=rng.random() < 0.9,
        samples=rng.randint(2, 3) if rng.random() < 0.08 else 1,
        temperature=0.8 if rng.random() < 0.025 else 0.0,  # few: SGLang then sorts the vocabulary for all that run
    )


def life_of(seed: int, number: int) -> Life:
    """The life of this number."""
    rng = random.Random(f"{seed} life {number}")
    question = question_of(seed, rng.randrange(QUESTIONS))
    way: Way = rng.choices(("whole", "stream", "abort", "disconnect", "flush"), (38, 31, 14, 14, 3))[0]
    if question.samples > 1 and way == "abort":
        way = "whole"  # SGLang gives the samples ids of its own, by which nobody can abort them
    return Life(
        number=number,
        question=question,
        way=way,
        streams=way == "stream" or (way in ("abort", "disconnect") and rng.random() < 0.75),
        cut_tokens=rng.choice((1, rng.randint(2, 20), rng.randint(20, 60))),
        cut_seconds=rng.choice((0.0, rng.random() * 0.2, rng.random() * 3)),
        pause=rng.choice((0.0, 0.0, rng.random() * 0.5)),
    )


def _ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*VOCABULARY) for _ in range(length))


def _prompt(rng: random.Random, seed: int) -> tuple[int, ...]:
    """A few-shot prompt, or a part of one, or nothing; then tokens of its own, few or many."""
    shared = rng.choice(prefixes(seed))
    shared = shared[: rng.choice((0, 0, len(shared) // 2, len(shared)))]
    own = rng.choices((rng.randint(1, 20), rng.randint(20, 90), rng.randint(150, 400)), (40, 45, 15))[0]
    return shared + _ids(rng, own)


def _message(rng: random.Random) -> str:
    return "Count on from " + " ".join(rng.choice(WORDS) for _ in range(rng.choice((2, 12, 60)))) + "."
