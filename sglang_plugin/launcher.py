"""The launching process (lm-eval, `Engine`, the server): refuse early, and serve only what was asked for."""

from __future__ import annotations

import logging
from typing import Any

from kvpolicy.sglang_plugin import arguments, incoming, lmeval_text, openai_responses, support, targets
from kvpolicy.sglang_plugin.config import KVPolicyConfig
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.platform import ATTENTION_BACKEND, activate, has_accelerator
from kvpolicy.sglang_plugin.report import META_KEY
from kvpolicy.sglang_plugin.runtime import handshake
from kvpolicy.sglang_plugin.server_info import launch_report

logger = logging.getLogger(__name__)

# Share of main memory for weights and KV cache, where SGLang serves on the CPU and nobody chose one.
CPU_MEMORY_FRACTION = 0.5
# Requests at once, where a policy reads more than the cache and nobody said how many: SGLang's default is in the
# thousands, and each of them would get its own window of queries, or its own table of hidden changes.
TAPPED_REQUESTS = 128


def server_args_from_keywords(**keywords: Any) -> Any:
    """`Engine(**keywords)` to a `ServerArgs` record; stands in for the class that SGLang calls here."""
    from sglang.srt.server_args import ServerArgs

    config = arguments.take_arguments(keywords)
    fit_to_machine(keywords)
    fit_to_policy(keywords, config)
    server_args = ServerArgs(**keywords)
    if config is not None:
        prepare(server_args, config)
    return server_args


def fit_to_machine(keywords: dict[str, Any]) -> None:
    """Where there is no accelerator, make the arguments of `ServerArgs` work without one, in place.

    lm-eval passes a cuda device, and SGLang cannot find the device of an out-of-tree CPU platform itself.
    """
    if has_accelerator():
        return
    if str(keywords.get("device")).startswith("cuda"):
        logger.warning("device=%s, but there is no GPU here: serving on the CPU.", keywords["device"])
        keywords["device"] = "cpu"
    if keywords.get("device") is None:
        keywords["device"] = "cpu"
    if keywords.get("mem_fraction_static") is None:
        # SGLang sets aside memory for a GPU's activations first, 24 GiB for lm-eval's prefill in one piece:
        # on a small machine less than nothing is left for the cache.
        keywords["mem_fraction_static"] = CPU_MEMORY_FRACTION
    # SGLang asks no out-of-tree platform for its attention backend if the device is "cpu"; and where pages have several
    # tokens it runs a Triton kernel, except for backends that it knows by name.
    if activate() is not None and keywords.get("attention_backend") is None and keywords.get("page_size") in (None, 1):
        keywords["attention_backend"] = ATTENTION_BACKEND


def fit_to_policy(keywords: dict[str, Any], config: KVPolicyConfig | None) -> None:
    """Choose, in place, what the plugin needs and nobody named: a backend, no captured prefill, a bound of requests."""
    if config is None:
        return
    if config.cache_format is not None and has_accelerator() and keywords.get("attention_backend") is None:
        keywords["attention_backend"] = "triton"  # of SGLang's backends it asks least of the pool that is not its own
    if has_accelerator() and (config.cache_format is not None or config.hidden_bands):
        keywords["disable_prefill_cuda_graph"] = True  # a captured prefill passes by what is hooked there
    what = [f"the newest {config.query_window} queries"] if config.query_window else []
    what += ["changes of hidden states"] if config.hidden_bands else []
    what += ["unpacked rows"] if config.cache_format is not None and config.cache_format.protects else []
    if what and keywords.get("max_running_requests") is None:
        keywords["max_running_requests"] = TAPPED_REQUESTS
        logger.warning(
            "kvpolicy: max_running_requests=%d, because %s keeps %s of each running request "
            "beside the cache; set max_running_requests to change that.",
            TAPPED_REQUESTS,
            f"kv_policy={config.policy}" if config.taps else f"kv_quant={config.quant}",
            " and ".join(what),
        )


def prepare(server_args: Any, config: KVPolicyConfig) -> None:
    """Check all that can be checked before a process is started, and hook the launching process.

    Raises
    ------
    KVPolicyError
        If an option is not supported, or SGLang is not the one that the hooks were written for.
    """
    from kvpolicy.sglang_plugin.plugin import LOAD_HOOKS

    support.check_options(server_args)
    targets.check(targets.ALL)
    targets.verify(LOAD_HOOKS)
    targets.install(HOOKS)
    arguments.attach(server_args, config)


def after_check_server_args(_result: None, server_args: Any) -> None:
    """With all arguments resolved and the model's configuration at hand, still before weights load."""
    if (config := arguments.config_of(server_args)) is not None:
        support.check_model(server_args)
        support.check_policies(server_args, config)
        support.check_format(server_args, config)


def after_launch(result: Any, _engine: type, server_args: Any, *_args: Any, **_keywords: Any) -> Any:
    """Let the launch wait for more than "ready": for every scheduler to report this policy and its hooks."""
    config = arguments.config_of(server_args)
    if config is None:
        return result
    init, processes = result
    wait = init.wait_for_ready

    def wait_for_policy() -> None:
        wait()
        for info in init.scheduler_infos:
            check_handshake(info.get(META_KEY), config)
            info[META_KEY] = launch_report(config)  # SGLang shows these infos at /server_info

    init.wait_for_ready = wait_for_policy
    return init, processes


def check_handshake(report: dict[str, Any] | None, config: KVPolicyConfig) -> None:
    """Raise KVPolicyError unless a scheduler reports exactly the policy that was asked for."""
    if report != handshake(config):
        found = "reports no policy" if report is None else f"reports {report}"
        raise KVPolicyError(
            f"the scheduler process {found} where kv_policy={config.policy} was asked for, and would serve "
            f"something else; kvpolicy was tested with SGLang {targets.TESTED_SGLANG}."
        )


def before_request_meta_info(
    manager: Any, meta_info: dict[str, Any], state: Any, customized_info: dict[str, Any], index: int, *rest: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the report of a finished request into its `meta_info`, and keep it from SGLang's own handling.

    SGLang takes customized info for one entry per output token: it would accumulate and slice it.
    """
    others = {key: values for key, values in customized_info.items() if key != META_KEY}
    if (report := customized_info.get(META_KEY, {index: None})[index]) is not None:
        meta_info[META_KEY] = report
    return (manager, meta_info, state, others, index, *rest), {}


_STREAMS = openai_responses.StreamReports()

HOOKS: targets.Hooks = {
    targets.CHECK_ARGS: after_check_server_args,
    targets.LAUNCH: after_launch,
    targets.REQUEST_META: before_request_meta_info,
    targets.VALIDATE_REQUEST: incoming.before_validate_request,
    targets.SEND_REQUEST: incoming.SampleNumbers().before_send_one_request,
    targets.GENERATE_REQUEST: _STREAMS.around_generate_request,
    targets.CHAT_RESPONSE: openai_responses.after_build_response,
    targets.CHAT_STREAM: _STREAMS.around_stream,
    targets.COMPLETION_RESPONSE: openai_responses.after_build_response,
    targets.COMPLETION_STREAM: _STREAMS.around_stream,
    targets.GENERATE: lmeval_text.after_generate,
}
