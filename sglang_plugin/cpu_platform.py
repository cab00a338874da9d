"""SGLang from the wheel on a plain CPU: torch-native attention, no compiled CPU kernels."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCPUPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """An out-of-tree platform, so that SGLang takes its plain PyTorch code paths.

    As PlatformEnum.CPU SGLang would ask for CPU kernels that its wheel does not contain.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"
