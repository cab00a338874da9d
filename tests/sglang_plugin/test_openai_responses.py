"""Reports in responses of the OpenAI APIs: in the choice they belong to, and nothing else of a response changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.sglang_plugin.openai_responses import StreamReports, after_build_response, with_report

# What SGLang imports warns about its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

REPORTS = [{"evictions": 2, "resident_mean": 70.5, "options": "a:b"}, {"evictions": 5, "sampling_seed": None}]


def chat_response(choices: int) -> Any:
    from sglang.srt.entrypoints.openai import protocol

    shown = [
        protocol.ChatCompletionResponseChoice(
            index=index,
            message=protocol.ChatMessage(role="assistant", content=f"näive 😀 {index}"),
            finish_reason="length",
        )
        for index in range(choices)
    ]
    usage = protocol.UsageInfo(prompt_tokens=3, completion_tokens=4, total_tokens=7)
    return protocol.ChatCompletionResponse(id="a", model="m", choices=shown, usage=usage, metadata={"weight": "1"})


def completion_response(choices: int) -> Any:
    from sglang.srt.entrypoints.openai import protocol

    shown = [
        protocol.CompletionResponseChoice(index=index, text="x", finish_reason="stop", token_ids=[1, 2])
        for index in range(choices)
    ]
    return protocol.CompletionResponse(id="a", model="m", choices=shown, usage=protocol.UsageInfo())


def outputs(*reports: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{"meta_info": {"id": "r"} if report is None else {"id": "r", "kv_policy": report}} for report in reports]


@pytest.mark.parametrize("make", [chat_response, completion_response], ids=["chat", "completion"])
def test_each_choice_gets_its_own_report_and_nothing_else_changes(make: Any) -> None:
    stock = make(2)
    shown = after_build_response(stock, None, None, outputs(*REPORTS), 0)
    assert isinstance(shown, type(stock))
    written, expected = (json.loads(each.model_dump_json(by_alias=True)) for each in (shown, stock))
    assert [choice.pop("kv_policy") for choice in written["choices"]] == REPORTS
    assert written == expected


@pytest.mark.parametrize("make", [chat_response, completion_response], ids=["chat", "completion"])
def test_a_choice_without_a_report_is_stock(make: Any) -> None:
    stock = make(2)
    shown = after_build_response(stock, None, None, outputs(None, REPORTS[0]), 0)
    first, second = json.loads(shown.model_dump_json())["choices"]
    assert first == json.loads(stock.model_dump_json())["choices"][0]
    assert second["kv_policy"] == REPORTS[0]


@pytest.mark.parametrize("make", [chat_response, completion_response], ids=["chat", "completion"])
def test_a_response_without_any_report_is_the_same_object(make: Any) -> None:
    stock = make(1)
    assert after_build_response(stock, None, None, outputs(None), 0) is stock


def test_an_error_response_is_passed_on() -> None:
    error = SimpleNamespace(status_code=500)
    assert after_build_response(error, None, None, outputs(REPORTS[0]), 0) is error


def stock_chunk(kind: str, index: int, text: str, reason: str | None) -> str:
    """A chunk as SGLang 0.5.23 writes it, by its own code."""
    from sglang.srt.entrypoints.openai import protocol, sse_utils

    if kind == "chat":
        return sse_utils.build_sse_content("id", 1, "m", index, content=text, finish_reason=reason)
    choice = protocol.CompletionResponseStreamChoice(index=index, text=text, finish_reason=reason)
    chunk = protocol.CompletionStreamResponse(id="id", created=1, model="m", choices=[choice])
    return f"data: {chunk.model_dump_json()}\n\n"


def parsed(chunk: str) -> Any:
    assert chunk.startswith("data: ")
    assert chunk.endswith("\n\n")
    return json.loads(chunk.removeprefix("data: "))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_chunk_that_ends_a_choice_gets_its_report(kind: str) -> None:
    text = 'näive 😀 "finish_reason":"length"'
    stock = stock_chunk(kind, 1, text, "length")
    written = parsed(with_report(stock, dict(enumerate(REPORTS))))
    assert written["choices"][0].pop("kv_policy") == REPORTS[1]
    assert written == parsed(stock)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_all_other_chunks_are_passed_on_byte_for_byte(kind: str) -> None:
    """Also one whose text looks like the end, and the end of a choice of which there is no report."""
    quoting = stock_chunk(kind, 0, '😀 "finish_reason":"length"', None)
    assert with_report(quoting, {0: REPORTS[0]}) == quoting
    for chunk in ("data: [DONE]\n\n", 'data: {"error": {"message": "x"}}\n\n', "event: sglext_ids\ndata: {}\n\n"):
        assert with_report(chunk, {0: REPORTS[0]}) == chunk
    last = stock_chunk(kind, 1, "x", "stop")
    assert parsed(with_report(last, {0: REPORTS[0]})) == parsed(last)


class Server:
    """SGLang's stream of one request with two choices, of which the second ends first."""

    def __init__(self, hooks: StreamReports, *, fails: bool = False) -> None:
        self.hooks, self.fails = hooks, fails
        self.closed: list[str] = []

    async def generate(self, _manager: Any, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {"meta_info": {"id": "0"}, "index": 0}
            if self.fails:
                raise ValueError("too long")
            yield {"meta_info": {"id": "1", "kv_policy": REPORTS[1]}, "index": 1}
            yield {"meta_info": {"id": "0", "kv_policy": REPORTS[0]}, "index": 0}
        finally:
            self.closed.append("outputs")

    async def stream(self, _serving: Any, adapted: Any, request: Any, raw: Any) -> AsyncIterator[str]:
        ended = []
        try:
            async for output in self.hooks.around_generate_request(self.generate, None, adapted, raw):
                yield stock_chunk("chat", output["index"], "x", None)
                ended += [output["index"]] if "kv_policy" in output["meta_info"] else []
            for index in ended:
                yield stock_chunk("chat", index, "", "stop")
            yield "data: [DONE]\n\n"
        finally:
            self.closed.append("stream")

    def hooked(self, request: Any) -> Any:
        return self.hooks.around_stream(self.stream, None, request, "request", "raw")


async def everything(chunks: AsyncIterator[str]) -> list[str]:
    return [chunk async for chunk in chunks]


def test_a_stream_carries_each_report_in_one_chunk() -> None:
    hooks = StreamReports()
    chunks = asyncio.run(everything(Server(hooks).hooked(object())))
    assert chunks[-1] == "data: [DONE]\n\n"
    choices = [parsed(chunk)["choices"][0] for chunk in chunks[:-1]]
    found = [(choice["index"], choice["kv_policy"]) for choice in choices if "kv_policy" in choice]
    assert found == [(1, REPORTS[1]), (0, REPORTS[0])]
    assert all((choice["finish_reason"] is None) == ("kv_policy" not in choice) for choice in choices)


def test_streams_at_the_same_time_do_not_mix() -> None:
    async def both() -> list[list[str]]:
        hooks = StreamReports()
        return await asyncio.gather(*(everything(Server(hooks).hooked(object())) for _ in range(2)))

    first, second = asyncio.run(both())
    assert first == second
    assert sum("kv_policy" in chunk for chunk in first) == 2


def test_an_error_ends_the_stream_as_without_the_plugin() -> None:
    hooks = StreamReports()
    server = Server(hooks, fails=True)
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(everything(server.hooked(object())))
    assert server.closed == ["outputs", "stream"]
    assert hooks._ended == {}


def test_a_client_that_leaves_closes_all_of_the_stream() -> None:
    hooks = StreamReports()
    server = Server(hooks)

    async def leave() -> None:
        chunks = server.hooked(object())
        await anext(chunks)
        await chunks.aclose()
        assert server.closed == ["stream"]

    asyncio.run(leave())  # at its end the loop closes what SGLang's stream itself leaves open
    assert server.closed == ["stream", "outputs"]
    assert hooks._ended == {}


def test_outputs_of_any_other_request_are_the_very_generator_of_sglang() -> None:
    made = object()
    assert StreamReports().around_generate_request(lambda *_: made, None, object()) is made
