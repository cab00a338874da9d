"""`kvpolicy survivors`: a picture of which tokens a policy kept for one request."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvpolicy.reports.survivors.figures import save_all
from kvpolicy.reports.survivors.page import page, token_texts
from kvpolicy.reports.trace_file import TraceError, TraceFile, load_trace

_EPILOG = """\
A server, an engine or lm-eval that was given kv_trace=FOLDER leaves one trace per finished request that evicted:

  sglang serve --model-path Qwen/Qwen3-4B --kv-policy vase-dkv --kv-budget 1024 --kv-trace out/trace
  kvpolicy survivors out/trace/REQUEST_ID.npz -o survivors.html --tokenizer Qwen/Qwen3-4B

The page shows, with nothing loaded from elsewhere:
  who holds which token   position and age against layer and KV head, after an eviction; a slider moves through them
  how tokens leave        position against the number of the eviction, shaded by the share of heads that hold it
  value range             of the tokens that were kept and of those that were evicted, per layer
  the text                shaded by the share of heads that still hold each token; hover for position and share
A name that ends in .png gives the first three in one picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, and where to draw it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("trace", type=Path, metavar="FILE", help="one .npz file of the folder that kv_trace named")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("survivors.html"), help=".html or .png (default: survivors.html)"
    )
    parser.add_argument(
        "--eviction", type=int, metavar="N", help="whose survivors the map shows, from 1 on (default: the last)"
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or hub id, to show words where a trace has token ids"
    )


def run(args: argparse.Namespace) -> int:
    """Draw one trace."""
    try:
        trace = load_trace(args.trace)
        eviction = _chosen(trace, args)
        if args.out.suffix not in (".html", ".png"):
            raise TraceError(f"-o {args.out} must end in .html or .png.")
        title = _title(trace)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        if args.out.suffix == ".png":
            save_all(trace, eviction, title, args.out)
        else:
            texts = _texts(trace, args.tokenizer)
            args.out.write_text(page(trace, eviction, title, texts), encoding="utf-8")
    except TraceError as error:
        raise SystemExit(f"kvpolicy survivors: {error}") from None
    print(f"{args.out}: {title}")
    return 0


def _chosen(trace: TraceFile, args: argparse.Namespace) -> int:
    """Number of the eviction, counted from 0."""
    if not trace.evictions:
        raise TraceError(f"{args.trace} holds no evictions: the request never outgrew its budget.")
    if args.eviction is None:
        return trace.evictions - 1
    if not 1 <= args.eviction <= trace.evictions:
        raise TraceError(f"--eviction must be between 1 and {trace.evictions}, got {args.eviction}.")
    return int(args.eviction) - 1


def _title(trace: TraceFile) -> str:
    policy = (trace.policy or "policy not recorded") + (f"[{trace.options}]" if trace.options else "")
    settings = f", budget {trace.budget}, period {trace.period}" if trace.budget else ""
    return f"{policy}{settings}: {trace.evictions} evictions over {trace.true_len[-1]} tokens"


def _texts(trace: TraceFile, tokenizer: str | None) -> list[str]:
    """One text per token: what it adds to the text, or its id where there is no tokenizer."""
    token_ids = trace.token_ids.tolist()
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    try:
        from transformers import AutoTokenizer

        words = AutoTokenizer.from_pretrained(tokenizer)
    except ImportError as error:
        raise TraceError(f"--tokenizer needs transformers ({error}); leave it out to see token ids.") from error
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise TraceError(f"--tokenizer {tokenizer} could not be loaded: {first}") from error

    def decode(ids: Sequence[int]) -> str:
        text: str = words.decode(list(ids), skip_special_tokens=False)
        return text

    return token_texts(token_ids, decode)
