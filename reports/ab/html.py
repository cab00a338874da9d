"""Pieces of the page of a comparison: tables, pictures, lists."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping

from kvpolicy.reports.ab.tables import Rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em } h3 { font-size: 1em } img { max-width: 100% }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1em } dt { color: #666 }
dd { margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: .5em 0 1.5em }
th, td { text-align: right; padding: .15em .6em; border-bottom: 1px solid #ddd; vertical-align: top }
th:first-child, td:first-child { text-align: left } th { color: #666; font-weight: normal }
caption { text-align: left; font-weight: bold; padding-top: .6em }
.found li { margin: .5em 0 } .warnings { border-left: 4px solid #c8501e; padding: .2em 1em }
.unmatched { color: #b5431a; font-weight: bold } .matched { color: #1d6f42; font-weight: bold }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; background: #f6f6f6; padding: .6em }
summary { cursor: pointer; color: #1f5fa8 }
"""


def table(rows: Rows, caption: str = "") -> str:
    """A table; cells that say "matched" or "unmatched" are marked."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows.header)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows.rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}<tr>{head}</tr>\n{body}</table></div>'


def _cell(text: str) -> str:
    label = text.partition(",")[0]
    mark = f' class="{label}"' if label in ("matched", "unmatched") else ""
    return f"<td{mark}>{html.escape(text)}</td>"


def image(png: bytes, alt: str) -> str:
    """A picture inside of the page."""
    return f'<img src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}" alt="{html.escape(alt)}">'


def sentences(found: Iterable[str], style: str = "") -> str:
    """A list; empty without sentences."""
    lines = "\n".join(f"<li>{html.escape(each)}</li>" for each in found)
    return f'<ul class="{style}">\n{lines}\n</ul>' if lines else ""


def facts(found: Mapping[str, str]) -> str:
    """Names and what they are; those without are left out."""
    lines = "\n".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(fact)}</dd>" for name, fact in found.items() if fact
    )
    return f"<dl>\n{lines}\n</dl>"


def document(title: str, body: str) -> str:
    """The page."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
{body}
</body>
</html>
"""
