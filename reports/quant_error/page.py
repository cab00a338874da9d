"""One HTML page of a quantization-error report, with nothing outside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from kvpolicy.reports.quant_error import figures, maps
from kvpolicy.reports.quant_error.advice import RULES
from kvpolicy.reports.quant_error.measure import ATTENDING, BINS
from kvpolicy.reports.quant_error.report import Report
from kvpolicy.reports.quant_error.tables import Block, Rows, advice_sentences, arm_blocks, layer_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em } img { max-width: 100% }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1em } dt { color: #666 } dd { margin: 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: .5em 0 1.5em }
th, td { text-align: right; padding: .15em .6em; border-bottom: 1px solid #ddd; vertical-align: top }
th:first-child, td:first-child, td.text { text-align: left } th { color: #666; font-weight: normal }
caption { text-align: left; font-weight: bold; padding-top: .6em }
.advice li { margin: .5em 0 } summary { cursor: pointer; color: #1f5fa8 }
"""

_MEASURES = """
<dl>
<dt>V error, K error</dt><dd>Frobenius norm of a head's error over that of its rows, all tokens.</dd>
<dt>attention error</dt><dd>The same of the attention output of the newest {attending} queries, per query head, with the
model's own queries; arms of values read exact keys.</dd>
<dt>KL, flips</dt><dd>Of the next-token distribution from that of the 16-bit cache, in nats, at every position; flips:
positions whose most likely token is another one.</dd>
<dt>NLL delta</dt><dd>Change of the mean negative log-likelihood of the text's own tokens. <b>It can fall while KL
grows</b>: noise may happen to favour these tokens. It is shown because perplexity is what others report, and
never alone.</dd>
<dt>bits</dt><dd>Per number as stored: codes, scales and minima in 16 bits; where tokens are protected, their 16-bit
rows beside their codes and an index of 32 bits for every token and KV head.</dd>
<dt>random, l2, range, oracle</dt><dd>Who is protected, per layer and KV head: tokens drawn by lot, of the longest
value, of the largest value range (max less min over channels), or of the largest error, which no cache can know.</dd>
<dt>≤ bits, &gt; bits</dt><dd>The controls, codecs without protection: the costliest that costs no more than
protection, and the cheapest that costs more. Protection is worth its bits if it beats the first.</dd>
</dl>"""


def page(report: Report) -> str:
    """The page."""
    title = f"Quantization error of {report.model}"
    blocks = "\n".join(map(_block, arm_blocks(report)))
    advice = "\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in advice_sentences(report))
    rules = "\n".join(f"<li>{html.escape(rule[0].upper() + rule[1:])}.</li>" for rule in RULES)
    layers = "\n".join(
        f"<details{' open' if not i else ''}><summary>{one.codec}, layer by layer</summary>"
        f"{_table(layer_rows(report, one))}</details>"
        for i, one in enumerate(report.comparisons)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
{_facts(report)}
<p>The model read the text once for each arm, with all cached rows stored as the arm says, the newest and the first
included. An engine that spares recent tokens does better than every arm here, by about the same.</p>
<h2>Advice</h2>
<ul class="advice">
{advice}
</ul>
<details><summary>The rules it follows from, first that applies</summary><ul>
{rules}
</ul></details>
<h2>Arms</h2>
{blocks}
{_image(figures.arms_png(report), "real bits against KL and attention error")}
{_MEASURES.format(attending=min(ATTENDING, report.tokens))}
<h2>Layers</h2>
<p>Error of the attention output, mean over query heads.</p>
{_image(figures.attention_png(report), "attention error per layer")}
{layers}
<h2>Heads</h2>
<p>Without protection. Every panel has its own colours.</p>
{_image(maps.attention_map_png(report), "attention error per layer and head")}
{_image(maps.errors_png(report, "relative"), "relative Frobenius error per layer and head")}
<details><summary>SQNR, mean squared error, largest error, cosine</summary>
{_other_maps(report)}
</details>
<h2>Value range and error</h2>
<p>Pearson's correlation over the tokens of a head, of the range with the Euclidean error; shaded: from the lowest to
the highest head. Where one group spans the head its step is the range over the number of levels, and r is highest.</p>
{_image(figures.correlation_png(report), "correlation of range and error per layer")}
{_image(maps.correlation_map_png(report), "correlation of range and error per layer and head")}
{_image(figures.scatter_png(report), "value range against error of single tokens")}
<h2>Tails of the range</h2>
<p>How far the largest ranges lie above the median. A light tail leaves protection little to gain.</p>
{_image(figures.tails_png(report), "tail ratios per layer")}
<h2>What the protected tokens hold</h2>
<p>Share of the squared error of all tokens, without protection, that lies in those which a selector would protect.</p>
{_image(figures.held_png(report), "share of squared error held by the protected tokens")}
<h2>Error against position</h2>
<p>Squared error of a token over the mean squared length of its head's rows, in {min(BINS, report.tokens)} stretches of
the text.</p>
{_image(figures.position_png(report), "error against position")}
</body>
</html>
"""


def _facts(report: Report) -> str:
    precision = str(report.dtype).removeprefix("torch.")
    facts = {
        "text": f"{report.source}: {report.tokens} tokens",
        "model": f"{len(report.layers)} layers of {report.kv_heads} KV heads of {report.head_dim}, run in {precision}",
        "cache": f"rows of {str(report.cache_dtype).removeprefix('torch.')}, keys after RoPE",
        "protected": f"{100 * report.share:g}% of the tokens of each layer and KV head",
    }
    rows = "\n".join(f"<dt>{name}</dt><dd>{html.escape(fact)}</dd>" for name, fact in facts.items())
    return f"<dl>\n{rows}\n</dl>"


def _other_maps(report: Report) -> str:
    measures = [measure for measure in maps.MEASURES if measure != "relative"]
    return "\n".join(
        _image(maps.errors_png(report, measure), f"{maps.MEASURES[measure][0]} per layer and head")
        for measure in measures
    )


def _block(block: Block) -> str:
    return _table(block.rows, block.title)


def _table(rows: Rows, caption: str = "") -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows.header)
    body = "\n".join(f"<tr>{_cells(rows.header, row)}</tr>" for row in rows.rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}<tr>{head}</tr>\n{body}</table></div>'


def _cells(header: Sequence[str], row: Sequence[str]) -> str:
    return "".join(
        f"<td{' class=text' if name == 'advice' else ''}>{html.escape(cell)}</td>"
        for name, cell in zip(header, row, strict=True)
    )


def _image(png: bytes, alt: str) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}" alt="{alt}">'
