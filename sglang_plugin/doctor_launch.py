"""Whether one launch would be refused: its kvpolicy arguments, its model, its SGLang flags. Nothing is started."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpolicy.sglang_plugin.doctor_findings import LAUNCH, Finding, Status, asked, first_line, note, problem
from kvpolicy.sglang_plugin.doctor_installed import version_of
from kvpolicy.sglang_plugin.targets import TESTED_SGLANG

# How SGLang says that it cannot serve a set of options.
REFUSALS = (ValueError, AssertionError, RuntimeError, OSError, ImportError, LookupError, AttributeError, TypeError)


def findings(arguments: Mapping[str, Any], model: str | None, flags: Sequence[str], *, sglang: bool) -> list[Finding]:
    """Each part of a launch that can be judged beforehand.

    Parameters
    ----------
    arguments : the ``kv_*`` arguments; None counts as not given
    model : folder or hub id; without one only the arguments are looked at
    flags : of SGLang's server
    sglang : whether SGLang is there and is what the hooks were written for
    """
    if version_of("torch") is None:
        return []  # kvpolicy's own arguments cannot be read without; said among the packages
    config, found = _config(arguments)
    if model is None:
        if flags:
            found.append(
                problem(LAUNCH, "flags", "not looked at", "SGLang's flags are looked at together with --model.")
            )
        return found
    found.append(_model(model))
    if not sglang:
        advice = "What this model and these flags allow was not looked at; do first what is said above."
        return [*found, note(LAUNCH, "support", "not looked at", advice)]
    if found[-1].status is Status.PROBLEM:
        return found
    with _warnings() as said:
        found += _server(config, model, flags)
    return found + [note(LAUNCH, "warning", "see below", text.removeprefix("kvpolicy: ")) for text in said]


def _config(arguments: Mapping[str, Any]) -> tuple[Any, list[Finding]]:
    from kvpolicy.sglang_plugin.config import config_from
    from kvpolicy.sglang_plugin.errors import KVPolicyError

    try:
        config = config_from(arguments)
    except KVPolicyError as error:
        return None, [problem(LAUNCH, "arguments", "refused", str(error))]
    if config is None:
        return None, [Finding(LAUNCH, "arguments", "none, so SGLang would run as if kvpolicy were not installed")]
    parts = [f"policy {config.policy}", f"budget {config.budget}", f"period {config.period}"]
    parts += [f"kv_quant {config.quant}"] if config.quant is not None else []
    return config, [Finding(LAUNCH, "arguments", ", ".join(parts))]


def _model(model: str) -> Finding:
    """The model's configuration, as transformers reads it from a folder or the hub."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        advice = (
            f"The configuration of {model!r} cannot be read ({first_line(error).removesuffix('.')}): name a folder "
            "with a config.json, or a model of the hub while the hub can be reached."
        )
        return problem(LAUNCH, "model", "cannot be read", advice)
    text = config.get_text_config()
    heads = f"{text.num_attention_heads} query and {text.num_key_value_heads} KV heads"
    architecture = ", ".join(config.architectures or ["no architecture named"])
    return Finding(LAUNCH, "model", f"{architecture}: {text.num_hidden_layers} layers, {heads}")


def _server(config: Any, model: str, flags: Sequence[str]) -> list[Finding]:
    """SGLang's record of the launch, and what `support` says of it."""
    from kvpolicy.sglang_plugin import support

    server_args = _server_args(config, model, flags)
    found = [_judged("options", "all of them are supported", lambda: support.check_options(server_args))]
    try:
        server_args.resolve_once()
    except REFUSALS as error:
        advice = f"SGLang itself refuses this launch ({type(error).__name__}: {first_line(error)})."
        return [*found, problem(LAUNCH, "SGLang", "refused", advice)]
    found.append(_backend(server_args))
    found.append(_judged("architecture", "supported", lambda: support.check_model(server_args)))
    if config is None:
        return found
    found.append(_judged("policies", "fit the model", lambda: support.check_policies(server_args, config)))
    found.append(_judged("attention", "fits the policies", lambda: _check_attention(server_args, config)))
    if config.cache_format is not None:
        found.append(_judged("kv_quant", "fits the model", lambda: support.check_format(server_args, config)))
    return found


def _server_args(config: Any, model: str, flags: Sequence[str]) -> Any:
    """As the command line makes it, short of hooking anything."""
    from sglang.srt.server_args import ServerArgs

    from kvpolicy.sglang_plugin import launcher

    parser = argparse.ArgumentParser(prog="sglang serve", usage=argparse.SUPPRESS, add_help=False)
    ServerArgs.add_cli_args(parser)
    namespace = parser.parse_args(["--model-path", model, *flags])
    launcher.fit_to_machine(vars(namespace))
    launcher.fit_to_policy(vars(namespace), config)
    return ServerArgs.from_cli_args(namespace)


def _judged(name: str, passed: str, check: Callable[[], object]) -> Finding:
    try:
        return asked(LAUNCH, name, passed, check)
    except REFUSALS as error:
        advice = f"SGLang does not say what kvpolicy asks it ({first_line(error)}): install SGLang {TESTED_SGLANG}."
        return problem(LAUNCH, name, "cannot be asked", advice)


def _backend(server_args: Any) -> Finding:
    """What SGLang resolved that matters to a policy."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolved_view

    resolved = resolved_view(server_args)
    graphs = resolved.cuda_graph_config if resolved.device != "cpu" else None
    backends = " and ".join(dict.fromkeys(attention_backends_of(resolved)))
    said = [f"device {resolved.device}", f"attention backend {backends}", f"page size {resolved.page_size}"]
    said += [f"CUDA graphs: decode {graphs.decode.backend}, prefill {graphs.prefill.backend}"] if graphs else []
    return Finding(LAUNCH, "SGLang", ", ".join(said))


def _check_attention(server_args: Any, config: Any) -> None:
    """What a scheduler asks once its attention backend exists, of the class that SGLang will make."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolved_view

    from kvpolicy.sglang_plugin import runtime, support, targets

    if targets.ATTENTION in runtime.needed(config) and len(set(attention_backends_of(resolved_view(server_args)))) > 1:
        from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

        support.check_attention(object.__new__(HybridAttnBackend))


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What kvpolicy would log as warnings of a launch, in place of logging it."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("kvpolicy"), Keep(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
