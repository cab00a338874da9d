"""Every wrong configuration gets one sentence, through the real doors, and no weights are loaded for it."""

from __future__ import annotations

import json
import multiprocessing.process
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

from kvpolicy.sglang_plugin.errors import KVPolicyError

BIN = Path(sys.executable).parent

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt policy": ({"kv_policy": "vase-dvk"}, "did you mean 'vase-dkv'? known: full, random"),
    "no such policy": ({"kv_policy": "lru"}, "'lru' is not known"),
    "budget not above sinks + recent": ({"kv_policy": "vase-dkv", "kv_budget": 68}, "must be at least 69"),
    "budget of zero": ({"kv_policy": "vase-dkv", "kv_budget": 0}, "kv_budget must be at least 1"),
    "negative budget": ({"kv_policy": "random", "kv_budget": "-5"}, "kv_budget must be at least 1"),
    "budget in words": ({"kv_policy": "vase-dkv", "kv_budget": "4k"}, "kv_budget must be a whole number, got '4k'"),
    "fractional budget": ({"kv_policy": "vase-dkv", "kv_budget": 0.5}, "kv_budget must be a whole number, got 0.5"),
    "boolean budget": ({"kv_policy": "vase-dkv", "kv_budget": True}, "kv_budget must be a whole number, got True"),
    "fractional period": ({"kv_policy": "vase-dkv", "kv_period": 1.5}, "kv_period must be a whole number"),
    "period of zero": ({"kv_policy": "vase-dkv", "kv_period": 0}, "kv_period must be at least 1"),
    "seed in words": ({"kv_policy": "random", "kv_seed": "abc"}, "kv_seed must be a whole number"),
    "negative seed": ({"kv_policy": "random", "kv_seed": -1}, "kv_seed must be at least 0"),
    "unknown option": ({"kv_policy": "vase-dkv", "kv_options": "rnak:8"}, "no option 'rnak'; its options and defaults"),
    "option without value": ({"kv_policy": "vase-dkv", "kv_options": "rank"}, "name:value;name:value, got 'rank'"),
    "option given twice": ({"kv_policy": "vase-dkv", "kv_options": "rank:8;rank:9"}, "gives 'rank' twice"),
    "option of the wrong type": ({"kv_policy": "vase-dkv", "kv_options": "rank:x"}, "'rank' must be a whole number"),
    "option outside its choices": ({"kv_policy": "curdkv", "kv_options": "variant:x"}, "one of fixed, windowed"),
    "budget without a policy": ({"kv_budget": 512}, "kv_budget would have no effect without kv_policy"),
    "misspelt argument": ({"kv_policy": "full", "kv_bugdet": 512}, "kv_bugdet is not an argument"),
    "policy class that is none": ({"kv_policy": "json:JSONDecoder"}, "not a subclass"),
    "policy module that is none": ({"kv_policy": "no_such_module:Policy"}, "could not be imported"),
    "pages": ({"kv_policy": "full", "page_size": 16}, "page_size=16: tokens are evicted one by one"),
    "speculative decoding": ({"kv_policy": "full", "speculative_algorithm": "NGRAM"}, "speculative decoding"),
    "mixed chunks": ({"kv_policy": "full", "enable_mixed_chunk": True}, "enable_mixed_chunk=True"),
    "hierarchical cache": ({"kv_policy": "full", "enable_hierarchical_cache": True}, "no copy on the host"),
    "disaggregation": ({"kv_policy": "full", "disaggregation_mode": "prefill"}, "must share one KV pool"),
    "pipeline parallel": ({"kv_policy": "full", "pp_size": 2}, "pp_size=2"),
    "data parallel": ({"kv_policy": "full", "dp_size": 2}, "dp_size=2"),
    "fp8 cache": ({"kv_policy": "full", "kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2'"),
    "lora": ({"kv_policy": "full", "enable_lora": True}, "enable_lora=True"),
    "sessions": ({"kv_policy": "full", "enable_streaming_session": True}, "enable_streaming_session=True"),
}

WRONG |= {
    "no query statistics": ({"kv_policy": "triattention"}, "kvpolicy calibrate"),
    "query statistics that are not there": ({"kv_policy": "triattention", "kv_options": "stats:no/such"}, "no/such"),
    "a base that gives no scores": ({"kv_policy": "alpha", "kv_options": "base:full"}, "full"),
    "no gates": ({"kv_policy": "seerattention-r"}, "gates"),
    "a format that is none": (
        {"kv_quant": "int3"},
        "'int3' is not a format; use int8, int4, int2, range-int8",
    ),
    "a format of keys that is none": ({"kv_quant": "int4", "kv_quant_keys": "int2"}, "use none, int8, int4"),
    "a group without a format": ({"kv_policy": "full", "kv_quant_group": 32}, "no effect without kv_quant"),
    "protection without range": ({"kv_quant": "int4", "kv_protect": 0.1}, "use kv_quant=range-int4"),
    "too much protection": ({"kv_quant": "range-int4", "kv_protect": 0.9}, "above 0 and at most 0.5"),
    "protection in words": ({"kv_quant": "range-int4", "kv_protect": "5%"}, "kv_protect must be a number, got '5%'"),
    "a budget for a format": ({"kv_quant": "int4", "kv_budget": 512}, "kv_budget would have no effect"),
    "partitions that fill the budget": ({"kv_policy": "lagkv", "kv_budget": 128}, "lag"),
}


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a process (a scheduler, which would load weights) is about to be started."""

    def started(process: multiprocessing.process.BaseProcess) -> None:
        raise AssertionError(f"{process} was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", started)


def assert_one_sentence(error: KVPolicyError, fragment: str) -> None:
    assert fragment in str(error)
    assert "\n" not in str(error)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(("arguments", "fragment"), WRONG.values(), ids=WRONG.keys())
def test_engine_refuses(arguments: dict[str, Any], fragment: str) -> None:
    import sglang

    with pytest.raises(KVPolicyError) as caught:
        sglang.Engine(model_path="no/such/model", device="cuda", **arguments)
    assert_one_sentence(caught.value, fragment)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2},
        "the architecture GPT2LMHeadModel: supported are Qwen3ForCausalLM",
    ),
    "sliding window": (
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "sliding_window": 1024,
        },
        "sliding-window attention",
    ),
}


@pytest.mark.parametrize(("config", "fragment"), MODELS.values(), ids=MODELS.keys())
def test_engine_refuses_a_model_by_its_configuration_alone(
    config: dict[str, Any], fragment: str, tmp_path: Path, no_launch: None
) -> None:
    """The folder holds no weights, so they cannot have been loaded."""
    import sglang

    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", **config}))
    with pytest.raises(KVPolicyError) as caught:
        sglang.Engine(model_path=str(tmp_path), device="cuda", kv_policy="full", skip_tokenizer_init=True)
    assert_one_sentence(caught.value, fragment)


TINY_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "one set for the heads of two ranks": ({"kv_policy": "full|tova", "tp_size": 2}, "kv_policy=tova chooses for all"),
    "no such layer": ({"kv_policy": "epikv", "kv_options": "band_a:9"}, "no band of a model with layers 0 to 3"),
    "a group that does not divide a head": ({"kv_quant": "int4", "kv_quant_group": 48}, "use 16 or 32 or 64 or 128"),
    "a backend that reads the pool itself": (
        {"kv_quant": "int4", "attention_backend": "flashinfer"},
        "does not work with attention_backend='flashinfer'",
    ),
    "the last layer": ({"kv_policy": "epikv", "kv_options": "band_b:3"}, "must lie in layers 0 to 2"),
}


@pytest.mark.parametrize(("arguments", "fragment"), UNFIT.values(), ids=UNFIT.keys())
def test_engine_refuses_a_policy_that_does_not_fit_the_model(
    arguments: dict[str, Any], fragment: str, tmp_path: Path, no_launch: None
) -> None:
    import sglang

    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", **TINY_QWEN3}))
    with pytest.raises(KVPolicyError) as caught:
        sglang.Engine(model_path=str(tmp_path), device="cuda", skip_tokenizer_init=True, **arguments)
    assert_one_sentence(caught.value, fragment)


COMMANDS = {
    "sglang serve": [BIN / "sglang", "serve", "--model-path", "no/such/model", "--kv-policy", "vase-dvk"],
    "launch_server": [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        "no/such/model",
        "--kv-policy",
        "vase-dvk",
    ],
    "lm_eval": [
        *(BIN / "lm_eval", "run", "--model", "sglang", "--tasks", "kvp_gsm8k_sample"),
        *("--model_args", "pretrained=no/such/model,kv_policy=vase-dvk"),
        *("--include_path", harness.ROOT / "lmeval_tasks"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_command_lines_end_with_the_sentence_and_not_with_a_call_stack(command: list[object]) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("kvpolicy: kv_policy 'vase-dvk' is not known; did you mean 'vase-dkv'?"), result.stderr
    assert "Traceback" not in result.stderr
