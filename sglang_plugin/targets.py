"""Every function of SGLang that the plugin hooks, in one table, and the proof that each hook is in place.

SGLang logs a hook that fails to apply and goes on (`HookRegistry.apply_hooks`); under an accepted
policy that would serve stock output. So a target is checked before it is hooked, and after.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvpolicy.sglang_plugin.errors import KVPolicyError

TESTED_SGLANG = "0.5.23"


@dataclass(frozen=True)
class Target:
    """A function of SGLang and how it is hooked.

    parameters : names that the hook relies on, a subset of the function's own.
    """

    path: str
    kind: Literal["before", "after", "around"]
    parameters: tuple[str, ...]


def _scheduler(name: str) -> str:
    return f"sglang.srt.managers.scheduler.Scheduler.{name}"


def _adder(name: str) -> str:
    return f"sglang.srt.managers.schedule_policy.PrefillAdder.{name}"


def _serving(name: str) -> str:
    return f"sglang.srt.entrypoints.openai.serving_{name}"


# At load, in every process: flags, and the door through which the rest comes in.
ADD_CLI_ARGS = Target("sglang.srt.server_args.ServerArgs.add_cli_args", "after", ("parser",))
FROM_CLI_ARGS = Target("sglang.srt.server_args.ServerArgs.from_cli_args", "around", ("args",))
SCHEDULER_INIT = Target(_scheduler("__init__"), "around", ("self", "server_args"))

# In the launching process, once a policy is asked for.
CHECK_ARGS = Target("sglang.srt.server_args.ServerArgs.check_server_args", "after", ("self",))
LAUNCH = Target("sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes", "after", ("server_args",))
REQUEST_META = Target(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    "before",
    ("meta_info", "state", "customized_info", "index"),
)
VALIDATE_REQUEST = Target(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", "before", ("obj", "input_ids")
)
SEND_REQUEST = Target(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request", "before", ("tokenized_obj",)
)
GENERATE_REQUEST = Target(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "around", ("self", "obj", "request")
)
CHAT_RESPONSE = Target(_serving("chat.OpenAIServingChat._build_chat_response"), "after", ("request", "ret", "created"))
CHAT_STREAM = Target(
    _serving("chat.OpenAIServingChat._generate_chat_stream"), "around", ("adapted_request", "request", "raw_request")
)
COMPLETION_RESPONSE = Target(
    _serving("completions.OpenAIServingCompletion._build_completion_response"), "after", ("request", "ret", "created")
)
COMPLETION_STREAM = Target(
    _serving("completions.OpenAIServingCompletion._generate_completion_stream"),
    "around",
    ("adapted_request", "request", "raw_request"),
)
GENERATE = Target("sglang.srt.entrypoints.engine.Engine.generate", "after", ("self", "stream"))

# In the scheduler process, once a policy is asked for.
INIT_INFO = Target(_scheduler("get_init_info"), "after", ("self",))
UPDATE_BATCH = Target(_scheduler("update_running_batch"), "before", ("self", "batch"))
CHECKPOINT = Target("sglang.srt.mem_cache.common.checkpoint_kv_cache", "after", ("req", "tree_cache"))
RELEASE = Target("sglang.srt.mem_cache.common.release_kv_cache", "before", ("req", "tree_cache"))
RETRACT = Target("sglang.srt.managers.schedule_batch.Req.reset_for_retract", "after", ("self",))
ALLOC_ROWS = Target("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows", "after", ("self", "need_size"))
INIT_FORWARD = Target(
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", "after", ("batch", "model_runner")
)
OUTPUT_INFO = Target(
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.build_additional_customized_info",
    "after",
    ("self", "reqs"),
)

SAMPLING_INFO = Target(
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "after", ("batch",)
)
SAMPLE = Target(
    "sglang.srt.layers.sampler.Sampler._sample_from_probs",
    "around",
    ("probs", "sampling_info", "positions", "simple_sampling_case"),
)

# In the scheduler process, if some policy holds requests to a budget.
MAX_NEW_TOKENS = Target(_scheduler("init_req_max_new_tokens"), "around", ("self", "req"))
RUNNING_OFFSET = Target(_adder("_get_running_request_total_token_offset"), "around", ("self", "req"))
ADD_REQUEST = Target(_adder("add_one_req"), "around", ("self", "req", "has_chunked_req", "truncation_align_size"))
ADD_CHUNK = Target(_adder("add_chunked_req"), "around", ("self", "req"))
RETRACTION_ORDER = Target(
    "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order", "after", ("reqs",)
)
ADD_TO_QUEUE = Target(_scheduler("_add_request_to_queue"), "around", ("self", "req", "is_retracted"))

# In the scheduler process, if some policy reads more than the cache.
ALLOC_POOLS = Target("sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool", "after", ("self",))
ATTENTION = Target(
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
    "around",
    ("self", "q", "k", "v", "layer", "forward_batch"),
)
MAX_PREFIX = Target("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", "after", ("self", "input_len"))

# In the scheduler process, if the cache is stored in low bits.
POOL_CLASS = Target(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class",
    "after",
    ("self", "kind", "default"),
)
CELL_SIZE = Target(
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
    "after",
    ("self", "kvc", "num_layers"),
)
POOL_SIZES = Target(
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes",
    "before",
    ("self", "available_bytes", "page_size"),
)
FREE_SLOTS = Target(
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.free", "before", ("self", "free_index")
)
CLEAR_SLOTS = Target("sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.clear", "after", ("self",))

LOAD = (ADD_CLI_ARGS, FROM_CLI_ARGS, SCHEDULER_INIT)
LAUNCHER = (
    CHECK_ARGS,
    LAUNCH,
    REQUEST_META,
    VALIDATE_REQUEST,
    SEND_REQUEST,
    GENERATE_REQUEST,
    CHAT_RESPONSE,
    CHAT_STREAM,
    COMPLETION_RESPONSE,
    COMPLETION_STREAM,
    GENERATE,
)
SCHEDULER = (
    INIT_INFO,
    UPDATE_BATCH,
    CHECKPOINT,
    RELEASE,
    RETRACT,
    ALLOC_ROWS,
    INIT_FORWARD,
    OUTPUT_INFO,
    SAMPLING_INFO,
    SAMPLE,
)
ADMISSION = (MAX_NEW_TOKENS, RUNNING_OFFSET, ADD_REQUEST, ADD_CHUNK, RETRACTION_ORDER, ADD_TO_QUEUE)
TAPS = (ALLOC_POOLS, MAX_PREFIX, ATTENTION)
PACKED = (POOL_CLASS, CELL_SIZE, POOL_SIZES, FREE_SLOTS, CLEAR_SLOTS)
ALL = (*LOAD, *LAUNCHER, *SCHEDULER, *ADMISSION, *TAPS, *PACKED)

Hooks = dict[Target, Callable[..., Any]]
_installed: dict[Target, Callable[..., Any]] = {}


def _refuse(targets: Sequence[Target], what: str) -> KVPolicyError:
    from sglang.version import __version__ as found

    return KVPolicyError(
        f"{' and '.join(target.path for target in targets)} {what}, so kv_policy cannot work in this SGLang {found}; "
        f"kvpolicy was tested with SGLang {TESTED_SGLANG}: install that version, or drop kv_policy."
    )


def resolve(target: Target) -> Any:
    """The function behind a target, as its class or module holds it now."""
    try:
        return pkgutil.resolve_name(target.path)
    except (ImportError, AttributeError) as error:
        raise _refuse([target], "does not exist") from error


def check(targets: Iterable[Target]) -> None:
    """Raise KVPolicyError unless every target exists and takes the parameters that its hook reads."""
    for target in targets:
        function = resolve(target)
        own = inspect.signature(inspect.unwrap(function)).parameters
        if missing := [name for name in target.parameters if name not in own]:
            raise _refuse([target], f"has no parameter {', '.join(missing)}")


def verify(hooks: Hooks) -> None:
    """Raise KVPolicyError, with all that are missing, unless each hook is in the chain that a caller now reaches."""
    if missing := [target for target, hook in hooks.items() if not _reaches(resolve(target), hook)]:
        raise _refuse(missing, "could not be hooked")


def _reaches(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether `function`, or one that it wraps, is a wrapper that SGLang's registry made around `hook`."""
    while not _calls(function, hook):
        if not hasattr(function, "__wrapped__"):
            return False
        function = function.__wrapped__
    return True


def _calls(function: Any, hook: Callable[..., Any]) -> bool:
    return any(cell.cell_contents == hook for cell in getattr(function, "__closure__", None) or ())


def install(hooks: Hooks) -> None:
    """Check, hook and verify all of `hooks`; a second call with the same hooks does nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    check(hooks)
    for target, hook in hooks.items():
        if target not in _installed:
            source = HookSource(plugin_name="kvpolicy", dist_name="sglang-kvpolicy")
            HookRegistry.register(target.path, hook, HookType(target.kind), source=source)
            _installed[target] = hook
    HookRegistry.apply_hooks()
    verify({target: _installed[target] for target in hooks})
