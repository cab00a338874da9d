"""kvpolicy: hold every request's KV cache to a fixed budget inside SGLang.

Importing this package has no side effects. SGLang finds the plugin through its entry points
(`sglang.srt.plugins`, `sglang.srt.platforms`); see `docs/structure.md` for one request's life.
"""

__version__ = "0.1.0"
