"""`kv_policy` in each choice of the OpenAI APIs: the report that the native API has in `meta_info`.

SGLang builds these responses from models of fixed fields, and streams as text, so the report is added where a
response, or the chunk that ends a choice, is complete. Where there is no report, nothing is touched.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import GenericAlias
from typing import Any, get_args

from kvpolicy.sglang_plugin.report import META_KEY

Report = dict[str, Any]

_EVENT = "data: "
# How SGLang's encoders, which write no spaces, tell why a choice ended; other chunks have null here. Within a text
# these quotation marks would be escaped.
_ENDED = '"finish_reason":"'


def after_build_response(response: Any, _serving: Any, _request: Any, ret: list[dict[str, Any]], _created: int) -> Any:
    """A response that was not streamed, with the report of each choice; an error response as it is.

    ret : SGLang's outputs, one for each choice.
    """
    reports = [output["meta_info"].get(META_KEY) for output in ret]
    choices = getattr(response, "choices", None)
    if choices is None or not any(reports):
        return response
    with_reports, with_report = _models(response.__class__)
    shown = [
        choice if report is None else with_report.model_construct(**dict(choice), **{META_KEY: report})
        for choice, report in zip(choices, reports, strict=True)
    ]
    return with_reports.model_construct(**{**dict(response), "choices": shown})


@functools.cache
def _models(response: Any) -> tuple[Any, Any]:
    """SGLang's model of a response, and of its choices, with the field that they lack."""
    from pydantic import create_model

    (choice,) = get_args(response.model_fields["choices"].annotation)
    report: Any = {META_KEY: (Report, ...)}
    with_report: Any = create_model(choice.__name__, __base__=choice, **report)
    choices: Any = {"choices": (GenericAlias(list, with_report | choice), ...)}
    return create_model(response.__name__, __base__=response, **choices), with_report


class StreamReports:
    """Carries reports past SGLang's streams, from its outputs into the chunks that it writes of them."""

    def __init__(self) -> None:
        # By identity of the request while its stream is alive: the report of each choice that has ended.
        self._ended: dict[int, dict[int, Report]] = {}

    async def around_stream(
        self, stream: Callable[..., Any], serving: Any, adapted_request: Any, request: Any, raw_request: Any
    ) -> AsyncGenerator[str, None]:
        """Chunks of a chat or a completion, each choice's last one with its report."""
        ended = self._ended[id(adapted_request)] = {}
        try:
            async with aclosing(stream(serving, adapted_request, request, raw_request)) as chunks:
                async for chunk in chunks:
                    yield with_report(chunk, ended) if ended else chunk
        finally:
            del self._ended[id(adapted_request)]

    def around_generate_request(self, generate: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
        """The outputs of a request; those of the streams above are looked at as they pass."""
        outputs, ended = generate(manager, obj, request), self._ended.get(id(obj))
        return outputs if ended is None else _noted(outputs, ended)


async def _noted(
    outputs: AsyncGenerator[dict[str, Any], None], ended: dict[int, Report]
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(outputs):
        async for output in outputs:
            if (report := output["meta_info"].get(META_KEY)) is not None:
                ended[output.get("index", 0)] = report
            yield output


def with_report(chunk: str, ended: dict[int, Report]) -> str:
    """A server-sent event; if it tells that a choice ended, with the report of that choice."""
    if not chunk.startswith(_EVENT) or _ENDED not in chunk:
        return chunk
    event = json.loads(chunk.removeprefix(_EVENT))
    for choice in event["choices"]:
        if choice["finish_reason"] is not None and choice["index"] in ended:
            choice[META_KEY] = ended[choice["index"]]
    return f"{_EVENT}{json.dumps(event, separators=(',', ':'))}\n\n"
