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
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

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
        "--enable-metrics",
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
        until = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (OSError, urllib.error.HTTPError):
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
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


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    """The public client, which knows nothing of the plugin."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def without_time(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "eviction_seconds"}


def assert_streamed(chunks: list[Any], expected: list[dict[str, Any]]) -> None:
    """Each choice's report is that of the same request without streaming, in the chunk that ends the choice."""
    found = {}
    for chunk in chunks:
        for choice in chunk.choices:
            report = (choice.model_extra or {}).get("kv_policy")
            assert (report is None) == (choice.finish_reason is None)
            if report is not None:
                assert choice.index not in found
                found[choice.index] = without_time(report)
    assert [found[index] for index in range(len(expected))] == expected


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Count."}], "temperature": 0}
TWO = {"n": 2, "max_tokens": 100, "extra_body": {"ignore_eos": True, "custom_params": {"kv_seed": 5}}}


def test_each_choice_of_a_chat_carries_its_own_report_streamed_or_not(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, **TWO)
    reports = [without_time(choice.kv_policy) for choice in answer.choices]
    assert [report["policy"] for report in reports] == ["vase-dkv", "vase-dkv"]
    assert reports[0]["seed"] == 5 != reports[1]["seed"]  # the number of the sample is a part of the key
    for report in reports:
        assert report["full_end"] == answer.usage.prompt_tokens + 99
        assert report["tokens_evicted"] == report["full_end"] - report["resident_end"] > 0
    assert_streamed(list(client.chat.completions.create(**CHAT, **TWO, stream=True)), reports)


def test_each_completion_carries_the_report_of_its_prompt_streamed_or_not(
    client: openai.OpenAI, prompts: list[list[int]]
) -> None:
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**body)
    reports = [without_time(choice.kv_policy) for choice in answer.choices]
    assert [report["full_end"] for report in reports] == [len(prompt) + 99 for prompt in prompts]
    assert_streamed(list(client.completions.create(**body, stream=True)), reports)


@pytest.mark.parametrize("stream", [False, True])
def test_an_api_that_is_made_of_the_chat_api_serves_as_before(url: str, stream: bool) -> None:
    body = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 20, "stream": stream}
    answer = post(url, "/v1/messages", body)
    assert b'"stop_reason":"' in answer.replace(b" ", b"")
    assert b"error" not in answer


def test_the_server_tells_its_policies(url: str) -> None:
    for path in ("/server_info", "/get_server_info"):
        with urllib.request.urlopen(url + path, timeout=60) as response:
            info = json.load(response)["kv_policy"]
        assert [policy["name"] for policy in info["policies"]] == ["vase-dkv[rank:8]", "vase-attnv"]
        assert (info["budget"], info["period"], info["seed"], info["quant"]) == (64, 16, 0, None)


def metrics(url: str) -> dict[str, float]:
    """Our metrics of the default policy, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    assert any(family.name == "sglang:num_running_reqs" for family in families)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("kvpolicy:")]
    ours = [sample for sample in samples if sample.labels["policy"] == "vase-dkv[rank:8]"]
    assert len(ours) == len({sample.name for sample in ours})
    assert {sample.labels["tp_rank"] for sample in ours} == {"0"}
    return {sample.name.removeprefix("kvpolicy:"): sample.value for sample in ours}


def idle(url: str) -> dict[str, float]:
    """The metrics once no request runs."""
    for _ in range(100):
        found = metrics(url)
        if found["running_requests"] == 0:
            return found
        time.sleep(0.2)
    raise AssertionError(f"requests never ended: {found}")


def test_metrics_add_up_what_responses_report(url: str, prompts: list[list[int]]) -> None:
    before = idle(url)
    response = json.loads(post(url, "/generate", {"input_ids": prompts[0], "sampling_params": GREEDY}))
    report, after = response["meta_info"]["kv_policy"], idle(url)
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["finished_requests_total"] == 1
    assert grown["evictions_total"] == report["evictions"] >= 5
    assert grown["evicted_tokens_total"] == report["tokens_evicted"]
    assert grown["decode_steps_total"] == report["decode_steps"]
    assert grown["resident_token_steps_total"] == pytest.approx(report["resident_mean"] * report["decode_steps"])
    assert grown["full_token_steps_total"] == pytest.approx(report["full_mean"] * report["decode_steps"])
    assert after["resident_tokens"] == after["full_tokens"] == after["kv_bytes"] == after["full_kv_bytes"] == 0


def test_a_running_request_is_counted_before_it_ends_and_let_go_when_its_client_leaves(
    url: str, prompts: list[list[int]]
) -> None:
    before = idle(url)
    body = {"input_ids": prompts[0], "sampling_params": {**GREEDY, "max_new_tokens": 6000}, "stream": True}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as stream:
        for _ in range(200):
            stream.readline()
            during = metrics(url)
            if during["evictions_total"] > before["evictions_total"] and during["running_requests"] == 1:
                break
        assert during["evictions_total"] > before["evictions_total"]
        assert during["finished_requests_total"] == before["finished_requests_total"]
        assert 64 <= during["resident_tokens"] <= 64 + 16 < during["full_tokens"]
        bytes_per_token = 4 * 2 * 2 * 32 * 2  # layers, keys and values, KV heads, channels, bytes of bf16
        assert during["kv_bytes"] == bytes_per_token * during["resident_tokens"]
        assert during["full_kv_bytes"] == bytes_per_token * during["full_tokens"]
    after = idle(url)
    assert after["finished_requests_total"] == before["finished_requests_total"] + 1
    assert after["resident_tokens"] == 0


# lm-eval's models one after the other. Its command line does the same, but reads the files of all tasks that it knows.
LM_EVAL = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
folder, models = sys.argv[1], json.loads(sys.argv[2])
tasks = TaskManager(include_path=folder, include_defaults=False)
chosen = {"max_gen_toks": 60, "ignore_eos": True, "custom_params": {"kv_budget": 48}}
run = {"tasks": ["kvp_gsm8k_sample"], "task_manager": tasks, "limit": 2, "gen_kwargs": chosen, "bootstrap_iters": 0}
results = [lm_eval.simple_evaluate(model, text, apply_chat_template=True, **run) for model, text in models.items()]
print(json.dumps([[sample["resps"][0][0] for sample in each["samples"]["kvp_gsm8k_sample"]] for each in results]))
"""


def test_lm_eval_runs_against_the_server_through_each_of_its_models(url: str, tiny: Path) -> None:
    """The models and arguments of docs/server.md."""
    before = idle(url)
    models = {
        "sglang-generate": f"base_url={url}/generate,tokenizer={tiny}",
        "local-completions": f"model=m,base_url={url}/v1/completions,tokenizer_backend=huggingface,tokenizer={tiny}",
        "local-chat-completions": f"model=m,base_url={url}/v1/chat/completions,num_concurrent=2",
    }
    run = subprocess.run(
        [sys.executable, "-c", LM_EVAL, str(harness.ROOT / "lmeval_tasks"), json.dumps(models)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    texts = json.loads(run.stdout.splitlines()[-1])
    assert len(texts) == 3
    assert all(len(of_model) == 2 and all(of_model) for of_model in texts)
    after = idle(url)
    assert after["finished_requests_total"] == before["finished_requests_total"] + 6
    assert after["evictions_total"] >= before["evictions_total"] + 6


def test_the_help_of_launch_server_and_kvpolicy_flags_show_the_same_group() -> None:
    flags = ("--kv-policy", "--kv-budget", "--kv-period", "--kv-seed", "--kv-options", "--kv-trace")
    for command in ([sys.executable, "-m", "sglang.launch_server", "--help"], [str(BIN / "kvpolicy"), "flags"]):
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        assert all(flag in shown for flag in flags)
        assert "KV policy (kvpolicy)" in shown
