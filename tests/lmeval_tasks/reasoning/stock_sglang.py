"""lm-eval's own SGLang model on an engine and a tokenizer that are made up.

The class is lm-eval's, from a copy of its module that was loaded without SGLang, whose import takes ten seconds. So
what the engine is sent, and what becomes of its texts, is what a run with SGLang would do.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import lm_eval.api.registry
import pytest

from kvpolicy.sglang_plugin.lmeval_text import TextWithMeta

EOS = "<|im_end|>"
CONTEXT = 40960

Reply = Callable[[str, dict[str, Any]], str]


@functools.cache
def _module() -> ModuleType:
    spec = importlib.util.find_spec("lm_eval.models.sglang_causallms")
    assert spec is not None
    assert spec.origin is not None
    copied = importlib.util.spec_from_file_location("copy_of_sglang_causallms", spec.origin)
    assert copied is not None
    assert copied.loader is not None
    module = importlib.util.module_from_spec(copied)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sglang", ModuleType("sglang"))
        patch.setattr(lm_eval.api.registry, "register_model", lambda *_: lambda model: model)
        copied.loader.exec_module(module)
    return module


class Tokenizer:
    """One token per character, and a chat template that may be told to think or not, as Qwen3's."""

    eos_token_id, bos_token_id = 0, None

    def __init__(self, reads_thinking: bool = True, opening: str = "") -> None:
        self.reads_thinking, self.opening = reads_thinking, opening

    def __call__(self, texts: str | list[str], **_: Any) -> Any:
        one = isinstance(texts, str)
        return SimpleNamespace(input_ids=list(map(ord, texts)) if one else [list(map(ord, text)) for text in texts])

    def decode(self, token: int) -> str:
        assert token == self.eos_token_id
        return EOS

    def apply_chat_template(self, history: list[dict[str, str]], **settings: Any) -> str:
        assert settings.pop("tokenize") is False
        assert settings.pop("add_generation_prompt") is True
        assert settings.pop("continue_final_message") is False
        (message,) = history
        empty = "<think>\n\n</think>\n\n" if self.reads_thinking and not settings.get("enable_thinking", True) else ""
        return f"<|im_start|>user\n{message['content']}{EOS}\n<|im_start|>assistant\n{self.opening}{empty}"


class Engine:
    """Answers with `reply` and remembers what it was sent; texts carry `meta_info`, as the plugin makes them."""

    def __init__(self, tokenizer: Tokenizer, reply: Reply) -> None:
        self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, context_len=CONTEXT)
        self.reply, self.calls = reply, []

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], **_: Any) -> list[Any]:
        assert len(input_ids) == len(sampling_params)
        prompts = ["".join(map(chr, ids)) for ids in input_ids]
        self.calls.append(list(zip(prompts, sampling_params, strict=True)))
        return [self._response(prompt, settings) for prompt, settings in self.calls[-1]]

    def _response(self, prompt: str, settings: dict[str, Any]) -> dict[str, Any]:
        text = self.reply(prompt, settings)
        tokens = min(len(text), settings["max_new_tokens"])
        finish = "length" if len(text) > tokens else "stop"
        record = {
            "policy": "full",
            "kv_bytes_mean": 1.0,
            "kv_bytes_full_mean": 2.0,
            **settings.get("custom_params", {}),
        }
        meta = {"finish_reason": {"type": finish}, "completion_tokens": tokens, "kv_policy": record}
        return {"text": TextWithMeta(text[:tokens], meta), "meta_info": meta}


def model(reply: Reply, tokenizer: Tokenizer | None = None, **arguments: Any) -> Any:
    """lm-eval's model; its engine is ``model.model``."""
    module = _module()
    engine = Engine(tokenizer or Tokenizer(), reply)
    module.sgl = SimpleNamespace(Engine=lambda **_: engine)
    return module.SGLangLM("made-up", **{"batch_size": "auto", **arguments})
