"""One HTML page of one trace, with nothing outside it: figures, and the text shaded by who still holds each token."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence

import numpy as np

from kvpolicy.reports.survivors import figures
from kvpolicy.reports.trace_file import TraceFile

FRAMES = 12  # evictions that the slider of the survival map stops at, at most
SHADES = 10

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
img { max-width: 100% } input[type=range] { width: 100% }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1em } dt { color: #666 } dd { margin: 0 }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.9 ui-monospace, monospace; padding: .5em }
.prompt { border: 2px solid #c8501e } .answer { border: 2px solid #ccc; margin-top: .5em }
.s0 { color: #999 } .new { border-bottom: 1px dotted #1f5fa8 }
"""
_SCRIPT = """
const maps = document.querySelectorAll("#map img"), slider = document.querySelector("#map input");
slider.oninput = () => maps.forEach((map, i) => { map.hidden = i != slider.value; });
"""


def page(trace: TraceFile, eviction: int, title: str, texts: Sequence[str]) -> str:
    """The page.

    Parameters
    ----------
    eviction : int
        The one whose survival map is shown before the slider is moved, counted from 0.
    texts : one for each token of prompt and output, or none at all: then the page has no text.
    """
    frames = frames_of(trace.evictions, eviction)
    maps = "\n".join(
        _image(figures.map_png(trace, number), f"survival map after eviction {number + 1}", number != eviction)
        for number in frames
    )
    start = frames.index(eviction)
    shades = "\n".join(
        f".s{shade} {{ background: rgba(31, 95, 168, {shade / SHADES * 0.6:.2f}) }}" for shade in range(1, SHADES + 1)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}{shades}</style></head>
<body>
<h1>{html.escape(title)}</h1>
{_facts(trace)}
<h2>Who holds which token</h2>
<p>Every row is one KV head of one layer. The slider moves through the evictions
{", ".join(str(number + 1) for number in frames)}.</p>
<div id="map"><input type="range" min="0" max="{len(frames) - 1}" value="{start}" aria-label="eviction">
{maps}</div>
<h2>How tokens leave</h2>
{_image(figures.over_evictions_png(trace), "share of heads that hold a position, over evictions")}
<h2>Value range of survivors and of evicted tokens</h2>
<p>The value range of a token is the largest less the smallest channel of its value vector, per layer and KV head.</p>
{_image(figures.ranges_png(trace), "value range per layer")}
<h2>The text</h2>
{_text(trace, texts)}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def frames_of(evictions: int, chosen: int) -> list[int]:
    """At most FRAMES evictions, first and last among them, and the chosen one."""
    spread = np.linspace(0, evictions - 1, min(FRAMES - 1, evictions)).astype(int)
    return sorted({*spread.tolist(), evictions - 1, chosen})


def token_texts(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text that each token adds to those before it.

    A character that several tokens spell belongs to the last of them, the others add nothing. `decode` is called on a
    few tokens at a time, with those before as context, because tokenizers drop a space at the start of a text.
    """
    texts = []
    context = done = 0
    for end in range(1, len(token_ids) + 1):
        before, now = decode(token_ids[context:done]), decode(token_ids[context:end])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            texts.append(now[len(before) :])
            context, done = done, end
        else:
            texts.append("")
    return texts


def _facts(trace: TraceFile) -> str:
    policy = trace.policy + (f"[{trace.options}]" if trace.options else "")
    generated = max(0, len(trace.token_ids) - trace.prompt_len)
    facts = {
        "model": trace.model,
        "policy": policy,
        "budget and period": f"{trace.budget} and {trace.period} tokens" if trace.budget else "",
        "evictions": str(trace.evictions),
        "prompt": f"{trace.prompt_len} tokens",
        "output": f"{generated} tokens" if len(trace.token_ids) else "",
        "heads": f"{trace.layers} layers of {trace.heads} KV heads",
        "held after the last eviction": f"{trace.shares()[-1].mean():.1%} of all tokens computed by then",
    }
    rows = "\n".join(f"<dt>{name}</dt><dd>{html.escape(fact)}</dd>" for name, fact in facts.items() if fact)
    return f"<dl>\n{rows}\n</dl>"


def _text(trace: TraceFile, texts: Sequence[str]) -> str:
    if not texts:
        return "<p>The trace holds no token ids.</p>"
    heads, shares = trace.layers * trace.heads, trace.shares()[-1]
    spans = []
    for position, text in enumerate(texts):
        if position < len(shares):
            share = float(shares[position])
            shade, says = f"s{int(np.ceil(share * SHADES))}", f"held by {share:.1%} of {heads} heads"
        else:
            shade, says = "new", "newer than the last eviction"
        shown = html.escape(text or "·").replace("\n", "↵\n")
        spans.append(f'<span class="{shade}" title="position {position}: {says}">{shown}</span>')
    prompt, answer = "".join(spans[: trace.prompt_len]), "".join(spans[trace.prompt_len :])
    return f"""<p>The darker, the more heads still hold the token after the last eviction; grey: none does; dotted:
newer than that eviction. The prompt has the orange frame. Hover over a token for its position and share.</p>
<div class="text prompt">{prompt}</div>
<div class="text answer">{answer}</div>"""


def _image(png: bytes, alt: str, hidden: bool = False) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{alt}"{" hidden" if hidden else ""}>'
