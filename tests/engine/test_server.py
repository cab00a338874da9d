"""The other door: `sglang serve --kv-policy …` and its HTTP APIs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest

BIN = Path(sys.executable).parent
GREEDY = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    flags = [
        "--incremental-streaming-output",
        "--kv-policy",
        "vase-dkv[rank:8]|vase-attnv",
        "--kv-budget",
        "64",
        "--kv-period",
        "16",
    ]
    command = [BIN / "sglang", "serve", "--model-path", tiny, "--port", port, "--max-total-tokens", 8192, *flags]
    with log.open("w") as output:
        environment = {**os.environ, **harness.ENVIRONMENT}
        server = subprocess.Popen([str(c) for c in command], env=environment, stdout=output, stderr=output)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (OSError, urllib.error.HTTPError):
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
        yield address
        assert server.poll() is None, log.read_text()[-3000:]
    finally:
        server.terminate()
        server.wait(timeout=60)


def post(url: str, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        content: bytes = response.read()
    return content


def test_the_native_api_reports_the_cache(url: str, prompts: list[list[int]]) -> None:
    response = json.loads(post(url, "/generate", {"input_ids": prompts[0], "sampling_params": GREEDY}))
    report = response["meta_info"]["kv_policy"]
    assert (report["policy"], report["budget"], report["period"], report["options"]) == ("vase-dkv", 64, 16, "rank:8")
    assert report["evictions"] >= 5
    assert report["resident_peak"] == 80


def test_a_stream_reports_the_cache_with_its_last_chunk_alone(url: str, prompts: list[list[int]]) -> None:
    body = {"input_ids": prompts[0], "sampling_params": GREEDY, "stream": True}
    lines = [line for line in post(url, "/generate", body).split(b"\n\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert len(chunks) > 10
    assert chunks[-1]["meta_info"]["kv_policy"]["evictions"] >= 5
    assert not any("kv_policy" in chunk["meta_info"] for chunk in chunks[:-1])


def test_the_chat_api_answers(url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 120, "temperature": 0}
    response = json.loads(post(url, "/v1/chat/completions", {**body, "ignore_eos": True}))
    assert response["usage"]["completion_tokens"] == 120
    assert response["choices"][0]["message"]["content"]


def test_a_request_of_the_chat_api_chooses_policy_and_seed(url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 60, "ignore_eos": True}
    seeds = ({"seed": 3}, {"seed": 3}, {"seed": 4}, {"custom_params": {"kv_policy": "vase-attnv", "kv_seed": 3}})
    texts = []
    for seed in seeds:
        response = json.loads(post(url, "/v1/chat/completions", {**body, "temperature": 1.0, **seed}))
        texts.append(response["choices"][0]["message"]["content"])
    assert texts[0] == texts[1] != texts[2]
    assert texts[3][:20] == texts[0][:20]  # the same draws, until the two policies evict differently


def test_a_choice_that_was_not_named_at_launch_is_answered_with_the_sentence(url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 9}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, "/v1/chat/completions", {**body, "custom_params": {"kv_policy": "snapkv"}})
    assert caught.value.code == 400
    assert b"'snapkv' of a request was not named at launch" in caught.value.read()


def test_requests_of_an_unsupported_kind_are_answered_with_the_sentence(url: str, prompts: list[list[int]]) -> None:
    body = {"input_ids": prompts[0], "sampling_params": {**GREEDY, "beam_width": 4}}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, "/generate", body)
    assert caught.value.code == 400
    assert b"kv_policy does not work with beam search: beams share the rows" in caught.value.read()


def test_the_help_of_launch_server_and_kvpolicy_flags_show_the_same_group() -> None:
    flags = ("--kv-policy", "--kv-budget", "--kv-period", "--kv-seed", "--kv-options", "--kv-trace")
    for command in ([sys.executable, "-m", "sglang.launch_server", "--help"], [str(BIN / "kvpolicy"), "flags"]):
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert all(flag in shown for flag in flags)
        assert "KV policy (kvpolicy)" in shown
