"""SGLang from the wheel on a plain CPU: attention in PyTorch, no compiled CPU kernels."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from kvpolicy.sglang_plugin.platform import ATTENTION_BACKEND


class TorchCPUPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """An out-of-tree platform, so that SGLang takes its plain PyTorch code paths.

    As PlatformEnum.CPU SGLang would ask for CPU kernels that its wheel does not contain.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([ATTENTION_BACKEND])

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        """Where the device is "cpu" SGLang does not ask for it: `launcher.fit_to_machine` names it."""
        return ATTENTION_BACKEND

    def init_backend(self) -> None:
        """Called in each process that loads a model."""
        from kvpolicy.sglang_plugin import cpu_attention

        cpu_attention.register()

    def get_dispatch_key_name(self) -> str:
        return "native"
