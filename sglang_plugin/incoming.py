"""Requests on their way to the scheduler: refuse what cannot work, and number the samples of one request."""

from __future__ import annotations

import copy
from typing import Any

from kvpolicy.sglang_plugin import arguments, support
from kvpolicy.sglang_plugin.errors import KVPolicyError
from kvpolicy.sglang_plugin.request_settings import SAMPLE_KEY, request_settings


def before_validate_request(manager: Any, obj: Any, input_ids: Any) -> None:
    """Refuse a request that asks for what the launch does not serve; SGLang answers with the sentence."""
    config = arguments.config_of(manager.server_args)
    if config is None:  # another engine of this process, without a policy
        return
    parameters = {**(manager.preferred_sampling_params or {}), **(getattr(obj, "sampling_params", None) or {})}
    support.check_request(obj, parameters)
    custom = parameters.get("custom_params") or {}
    if not isinstance(custom, dict):
        raise KVPolicyError(f"custom_params must be an object of names and values, got {custom!r}.")
    if SAMPLE_KEY in custom:
        raise KVPolicyError(f"custom_params must not contain {SAMPLE_KEY}.")
    request_settings(config, custom)


class SampleNumbers:
    """Numbers the `n` samples of one request, so that one seed gives n different answers.

    SGLang sends one shallow copy of the request per sample, all with the same `sampling_params`, after a
    warm-up copy with parameters of its own. A request whose `n` copies never come in full (its `n` is a preferred
    parameter of the server, which SGLang does not multiply, or a send failed) is forgotten after many others.
    """

    MOST = 1024  # requests at a time that are being sent

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Any, int]] = {}  # by identity of the parameters, kept alive until the last copy

    def before_send_one_request(self, _manager: Any, request: Any) -> None:
        parameters = getattr(request, "sampling_params", None)
        if parameters is None or parameters.n == 1 or parameters.max_new_tokens == 0:
            return
        _, number = self._sent.pop(id(parameters), (None, 0))
        if number + 1 < parameters.n:
            self._sent[id(parameters)] = (parameters, number + 1)
            if len(self._sent) > self.MOST:
                del self._sent[next(iter(self._sent))]
        if number:
            request.sampling_params = copy.copy(parameters)
            request.sampling_params.custom_params = {**(parameters.custom_params or {}), SAMPLE_KEY: number}
