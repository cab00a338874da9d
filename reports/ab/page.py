"""One HTML page of a comparison, with nothing outside it."""

from __future__ import annotations

import html
from collections.abc import Iterable

from kvpolicy.reports.ab import figures, memory_figures, tables
from kvpolicy.reports.ab import sentences as words
from kvpolicy.reports.ab.html import document, facts, image, sentences, table
from kvpolicy.reports.ab.memory import TOLERANCE
from kvpolicy.reports.ab.origin import Origin
from kvpolicy.reports.ab.report import Report
from kvpolicy.reports.ab.statistics import ALPHA

_TERMS = f"""
<dl>
<dt>difference</dt><dd>Of accuracy, on the same problems: the responses to a problem are averaged first, and the
problems are the sample. Its interval is from a paired bootstrap over problems, its p from random signs.</dd>
<dt>Bonferroni, Holm</dt><dd>p corrected for all comparisons on this page; Holm's below {ALPHA:g} is called a
difference.</dd>
<dt>detectable</dt><dd>Points that a comparison with this spread would find significant in 4 of 5 studies, among as many
comparisons.</dd>
<dt>matched</dt><dd>Mean KV bytes within {100 * TOLERANCE:.0f} % of each other, each decode step counting once, with
scales, protected rows and index. Accuracy at unmatched memory says what a smaller cache costs, and not which method is
better.</dd>
</dl>"""


def page(report: Report) -> str:
    """The page."""
    models = sorted({model for origin in report.origins for model in origin.models})
    title = f"{', '.join(models) or 'model not recorded'}: {', '.join(report.arms)}"
    body = [
        facts(_facts(report, models)),
        f"<p>{html.escape(words.plan_sentence(report))}</p>",
        _warnings(report),
        "<h2>In words</h2>",
        sentences((words.sentence(comparison, len(report.comparisons)) for comparison in report.comparisons), "found"),
        "<h2>Differences</h2>",
        image(figures.differences_png(report), "paired differences with intervals"),
        *(table(tables.comparison_rows(report, task), task) for task in report.pairs.tasks),
        _TERMS,
        *(part for task in report.pairs.tasks for part in _task(report, task)),
        "<h2>Throughput</h2>",
        "<p>All tasks together. The seconds of a run have the start of the engine in them, and the grading. Arms whose "
        "responses are longer have more to write.</p>",
        table(tables.throughput_rows(report)),
        *_failure_modes(report),
        "<h2>How it was run</h2>",
        *map(_origin, report.origins),
        _plan(report),
    ]
    return document(f"A/B of {title}", "\n".join(filter(None, body)))


def _facts(report: Report, models: list[str]) -> dict[str, str]:
    counts = [f"{task}: {len(report.pairs.problems(task))}" for task in report.pairs.tasks]
    return {
        "model": ", ".join(models),
        "arms": ", ".join(report.arms),
        "baseline": report.baseline,
        "problems": ", ".join(counts),
        "comparisons": str(len(report.comparisons)),
    }


def _warnings(report: Report) -> str:
    own = [f"{c.task}, {c.arm}: {warning}" for c in report.comparisons for warning in c.accuracy.warnings]
    found = [*report.warnings, *own]
    return f'<div class="warnings"><b>Warnings</b>{sentences(found)}</div>' if found else ""


def _task(report: Report, task: str) -> Iterable[str]:
    yield f"<h2>{html.escape(task)}: accuracy and failures</h2>"
    yield image(figures.accuracy_png(report, task), f"accuracy on {task}")
    yield image(figures.verdicts_png(report, task), f"verdicts on {task}")
    yield image(figures.flags_png(report, task), f"flags on {task}")
    yield "<p>One verdict for each response; the flags are independent of it and of each other.</p>"
    yield table(tables.accuracy_rows(report, task))
    yield f"<h3>{html.escape(task)}: length</h3>"
    yield image(figures.lengths_png(report, task), f"lengths of the responses on {task}")
    yield table(tables.length_rows(report, task))
    yield f"<h2>{html.escape(task)}: memory</h2>"
    yield table(tables.memory_rows(report, task))
    yield "<p>Mean KV bytes of each arm (column) over those of each other (row):</p>"
    yield table(tables.match_rows(report, task))
    if any(each == task for each, _, _ in report.memory):
        yield image(memory_figures.matches_png(report, task), f"mean KV bytes of each pair on {task}")
    if any(report.of(arm, task).memory is not None for arm in report.arms):
        yield image(memory_figures.frontier_png(report, task), f"accuracy against KV bytes on {task}")
        yield f"<h3>{html.escape(task)}: residency of each response</h3>"
        yield "<p>Records hold mean, peak and end of each response, and no value for each step.</p>"
        yield image(memory_figures.residency_png(report, task), f"KV bytes of each response on {task}")
    yield f"<h3>{html.escape(task)}: what the arms did</h3>"
    yield (
        "<p>No page is written if an arm that was due evicted nothing, read everything, packed nothing or protected "
        "nothing: its results would be those of the whole cache.</p>"
    )
    yield table(tables.effect_rows(report, task))


def _failure_modes(report: Report) -> Iterable[str]:
    yield "<h2>Two ways to be deceived</h2>"
    yield "<h3>A gain that evaporates as problems are added</h3>"
    studies = [(comparison, study) for comparison in report.comparisons for study in comparison.evaporation]
    if studies:
        yield image(figures.evaporation_png(report), "what studies of fewer problems would have reported")
        yield sentences(words.evaporation_sentence(*each) for each in studies)
    else:
        yield "<p>It takes 50 problems to show what studies of 50 would report; here are fewer.</p>"
    yield "<h3>A gain that comes from memory</h3>"
    yield sentences(filter(None, map(words.iso_sentence, report.comparisons)))
    if report.contrasts:
        yield (
            "<p>A method that shrinks the prompt alone looks small after prefill. Against another method under several "
            "budgets, the one nearest after prefill, then the one nearest on average:</p>"
        )
        yield image(memory_figures.contrasts_png(list(report.contrasts)), "gains at two kinds of equal cache")
        yield sentences(map(words.contrast_sentence, report.contrasts))
        yield sentences(
            f"{each.task}, {each.arm}: {warning}" for each in report.contrasts for warning in each.found.warnings
        )
    else:
        yield (
            "<p>To show it takes an arm, and another method under two budgets or more: one with the arm's cache after "
            "prefill, one with its mean cache. No such arms are here.</p>"
        )


def _origin(origin: Origin) -> str:
    found = {
        "folder": ", ".join(origin.folders),
        "started": ", ".join(origin.started),
        "model": ", ".join(origin.models),
        "arguments": ", ".join(f"{name}={value}" for name, value in origin.model_args.items()),
        "generation": ", ".join(f"{name}={value}" for name, value in origin.generation.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
        "chat template": f"SHA-256 {origin.chat_template}" if origin.chat_template else "not recorded, or none",
        **{f"{task}, hash": ", ".join(hashes) for task, hashes in origin.task_hashes.items()},
    }
    commands = "\n".join(origin.commands) or "The command was not recorded: the results were there already."
    return f"<h3>{html.escape(origin.arm)}</h3>{facts(found)}<pre>{html.escape(commands)}</pre>"


def _plan(report: Report) -> str:
    if report.plan is None:
        return ""
    runs = tables.Rows(("started", "folder"), [(run.time, run.folder) for run in report.plan.runs])
    return f"<h3>Plan</h3><p>SHA-256 {report.plan.plan.digest}</p>{table(runs)}"
