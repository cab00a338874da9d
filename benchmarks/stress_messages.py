"""What a life of stress.py says to SGLang's APIs, and what their answers say, in one form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stress_lives import Life, Question

PROBE = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
PATHS = {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}
Json = dict[str, Any]


@dataclass
class Answer:
    """One answer, or as much of it as came.

    ids : token ids; None where the API does not tell them: in streams of the chat API.
    finish : "length", "stop" or "abort"; None if the client left before it knew.
    tokens : how many the server says there are; of several samples over an OpenAI API, of all together.
    report : the record of its cache (`kv_policy`), which comes with the end.
    rid : SGLang's own id of it, under which its trace is found, where the API tells it.
    """

    ids: list[int] | None = None
    text: str = ""
    finish: str | None = None
    tokens: int | None = None
    report: Json | None = None
    rid: str | None = None


@dataclass
class Outcome:
    """How a life ended.

    answers : one for each sample.
    status : of HTTP; None if no response came.
    error : what went wrong, if something did: an error in a stream, a connection that broke, no end in time.
    """

    answers: list[Answer] = field(default_factory=list)
    status: int | None = None
    error: str | None = None
    seconds: float = 0.0


def request_of(question: Question, *, tokens: int, stream: bool, rid: str) -> tuple[str, Json]:
    """Path and body of a request for `tokens` tokens."""
    choice = {
        "kv_policy": question.policy,
        "kv_budget": question.budget,
        "kv_period": question.period,
        "kv_seed": question.seed,
    }
    sampling: Json = {"temperature": question.temperature, "ignore_eos": question.ignore_eos, "custom_params": choice}
    sampling |= {"stop": list(question.stop)} if question.stop else {}
    sampling |= {"n": question.samples} if question.samples > 1 else {}
    if question.api == "generate":
        asked = {"input_ids": list(question.prompt), "sampling_params": sampling | {"max_new_tokens": tokens}}
        return PATHS[question.api], {"rid": rid, "stream": stream, **asked}
    body: Json = {"model": "default", "rid": rid, "stream": stream, "max_tokens": tokens, **sampling}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if question.api == "completions":
        return PATHS[question.api], body | {"prompt": list(question.prompt), "return_token_ids": True}
    body["messages"] = [{"role": "user", "content": question.prompt}]
    return PATHS[question.api], body | ({} if stream else {"return_token_ids": True})


def request_alone(question: Question, prompt_ids: list[int], rid: str, *, probe: bool = False) -> tuple[str, Json]:
    """The same request over the native API, not streamed; a `probe` also asks for the two best tokens of each step."""
    native = replace(question, api="generate", prompt=tuple(prompt_ids))
    path, body = request_of(native, tokens=question.tokens, stream=False, rid=rid)
    return path, body | (PROBE if probe else {})


def request_of_life(life: Life) -> tuple[str, Json]:
    """Path and body of a life's request."""
    return request_of(life.question, tokens=life.tokens, stream=life.streams, rid=life.rid)


def read_whole(question: Question, response: Any) -> Outcome:
    """A response that was not streamed."""
    if question.api == "generate":
        outputs = response if isinstance(response, list) else [response]
        answers = [
            Answer(
                ids=output["output_ids"],
                text=output["text"],
                finish=output["meta_info"]["finish_reason"]["type"],
                tokens=output["meta_info"]["completion_tokens"],
                report=output["meta_info"].get("kv_policy"),
                rid=output["meta_info"]["id"],
            )
            for output in outputs
        ]
        return Outcome(answers)
    chat, used = question.api == "chat", response["usage"]["completion_tokens"]
    answers = [
        Answer(
            ids=choice["response_token_ids" if chat else "token_ids"],
            text=(choice["message"]["content"] or "") if chat else choice["text"],
            finish=choice["finish_reason"],
            tokens=used,
            report=choice.get("kv_policy"),
            rid=response["id"] if question.samples == 1 else None,
        )
        for choice in sorted(response["choices"], key=lambda choice: int(choice["index"]))
    ]
    return Outcome(answers)


class Stream:
    """Puts a streamed answer together, event by event; the server sends each token once (incremental streaming).

    Tokens that come with an abort are left out: if the request waited in the queue, to be resumed after a retraction,
    SGLang sends some again there.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        ids: list[list[int] | None] = [None if question.api == "chat" else [] for _ in range(question.samples)]
        self.outcome = Outcome([Answer(ids=each) for each in ids])

    @property
    def received(self) -> int:
        """How many tokens there are of the longest answer; in a chat, events."""
        return max(len(a.ids) if a.ids is not None else a.tokens or 0 for a in self.outcome.answers)

    def event(self, event: Json) -> None:
        """Add one event; an error that the server reports in the stream is the outcome's."""
        if "error" in event:
            self.outcome.error = f"error in the stream: {event['error']}"
        elif self._question.api == "generate":
            self._add_output(event)
        else:
            self._add_choices(event)

    def _add_output(self, event: Json) -> None:
        answer, meta = self.outcome.answers[event.get("index", 0)], event["meta_info"]
        answer.tokens, answer.rid = meta["completion_tokens"], meta["id"]
        if meta["finish_reason"] is not None:
            answer.finish, answer.report = meta["finish_reason"]["type"], meta.get("kv_policy")
        if answer.finish != "abort":
            assert answer.ids is not None
            answer.ids += event["output_ids"]
            answer.text += event["text"] or ""

    def _add_choices(self, event: Json) -> None:
        chat = self._question.api == "chat"
        for choice in event["choices"]:
            answer = self.outcome.answers[choice["index"]]
            answer.rid = event["id"]
            if choice["finish_reason"] is not None:
                answer.finish, answer.report = choice["finish_reason"], choice.get("kv_policy")
            if answer.finish == "abort":
                continue
            text = choice["delta"].get("content") if chat else choice["text"]
            answer.text += text or ""
            if answer.ids is None:
                answer.tokens = (answer.tokens or 0) + bool(text)
            else:
                answer.ids += choice.get("token_ids") or []
        if event.get("usage"):
            for answer in self.outcome.answers:
                answer.tokens = event["usage"]["completion_tokens"]
