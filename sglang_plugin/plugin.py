"""Entry point of the plugin: called by SGLang in each of its processes before the engine starts.

Arguments are not known yet. What is hooked here is only what reads them: the flags, the keyword
arguments of `Engine`, and `Scheduler.__init__`, through which the rest comes in if a policy was
asked for.
"""

from __future__ import annotations

from typing import Any

from kvpolicy.sglang_plugin import arguments, launcher, targets
from kvpolicy.sglang_plugin.runtime import Runtime


def around_scheduler_init(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Install the runtime hooks before the scheduler loads weights, bind them once its pools exist."""
    config = arguments.config_of(server_args)
    if config is None:
        original(scheduler, server_args, *args, **kwargs)
        return
    runtime = Runtime(config)
    targets.install(runtime.hooks())
    original(scheduler, server_args, *args, **kwargs)
    runtime.attach(scheduler)


LOAD_HOOKS: targets.Hooks = {
    targets.ADD_CLI_ARGS: arguments.after_add_cli_args,
    targets.FROM_CLI_ARGS: arguments.around_from_cli_args,
    targets.SCHEDULER_INIT: around_scheduler_init,
}


def register() -> None:
    """Register the hooks of :data:`LOAD_HOOKS` and take the `kv_*` keywords of `Engine`."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in LOAD_HOOKS.items():
        HookRegistry.register(target.path, hook, HookType(target.kind))
    Engine.server_args_class = staticmethod(launcher.server_args_from_keywords)
