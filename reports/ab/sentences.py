"""What a comparison found, in words. A difference that was not shown is said as plainly as one that was."""

from __future__ import annotations

from kvpolicy.reports.ab.failure_modes import LOOKS, Evaporation
from kvpolicy.reports.ab.memory import TOLERANCE, MemoryMatch
from kvpolicy.reports.ab.report import Comparison, Contrast, Report
from kvpolicy.reports.ab.statistics import ALPHA, PairedDifference

MINUS = "\u2212"


def sentence(comparison: Comparison, cells: int) -> str:
    """One comparison with the baseline, of `cells` in the report."""
    c, found = comparison, comparison.accuracy
    numbers = f"95 % {_interval(found)}, p {p_value(found.p)}, Holm {p_value(c.holm)}"
    if found.differing == 0:
        said = f"{c.arm} and {c.baseline} are equally accurate on each of the {found.problems} problems of {c.task}"
        said = f"{said} ({numbers})"
    elif c.holm < ALPHA:
        said = f"{c.arm} is {_apart(found.difference)} {c.baseline} on {c.task} ({numbers})"
    else:
        said = f"{c.arm} is not shown to differ from {c.baseline} on {c.task}: "
        said += f"{points(found.difference)} points ({numbers})"
    said += f" {_memory(c.memory)}"
    if c.holm >= ALPHA > found.p:
        said += f"; alone it would count, among {cells} comparisons it does not"
    if c.holm >= ALPHA and found.detectable is not None:
        said += f"; a true difference of {100 * found.detectable:.1f} points would be found 4 times in 5, a smaller "
        said += "one less often"
    return f"{said}."


def memory_label(match: MemoryMatch | None) -> str:
    """One word, and the ratio."""
    if match is None:
        return "unknown"
    return f"{'matched' if match.matched else 'unmatched'}, {match.ratio:.3f}"


def iso_sentence(comparison: Comparison) -> str | None:
    """Whether the arms would pass as equal by their caches after prefill; None if not."""
    c = comparison
    if c.iso is None or not c.iso.misleading:
        return None
    return (
        f"{c.task}: after prefill {c.arm} has {c.iso.after_prefill:.3f} times the cache of {c.baseline}, and over all "
        f"decode steps {c.iso.mean:.3f} times: by the first they would pass as matched, and they are not."
    )


def evaporation_sentence(comparison: Comparison, study: Evaporation) -> str:
    """What studies of fewer problems would have reported."""
    c = comparison
    said = (
        f"{c.task}: studies of {study.size} such problems would put {c.arm} between {points(study.low)} and "
        f"{points(study.high)} points from {c.baseline} (9 of 10 of them; here {points(c.accuracy.difference)}), and "
        f"the best of {LOOKS} would report {points(study.best_of_looks)}; {percent(study.significant)} of them would "
        "find p below 0.05"
    )
    if study.significant_gain is not None:
        said += f", and report a difference of {100 * study.significant_gain:.1f} points on average"
    return f"{said}."


def contrast_sentence(contrast: Contrast) -> str:
    """A gain at equal cache after prefill beside that at equal mean cache."""
    found = contrast.found
    if found.by_prefill == found.by_mean:
        return (
            f"{contrast.task}: {found.by_mean} is nearest to {contrast.arm} after prefill "
            f"({_times(found.by_mean_sizes.after_prefill)}) and on average ({_times(found.by_mean_sizes.mean)}), so "
            "there is nothing to contrast."
        )
    return (
        f"{contrast.task}: {contrast.arm} is {_apart(found.by_prefill_gain.difference)} {found.by_prefill}, which has "
        f"the nearest cache after prefill ({_times(found.by_prefill_sizes.after_prefill)}, on average "
        f"{_times(found.by_prefill_sizes.mean)}), and {_apart(found.by_mean_gain.difference)} {found.by_mean}, which "
        f"has the nearest mean cache ({_times(found.by_mean_sizes.mean)})."
    )


def plan_sentence(report: Report) -> str:
    """What part of the data this is, and how often it was looked at under a plan."""
    if report.split is None:
        return "The results were taken as they are; which part of the data they are of was not asked."
    if report.split == "dev":
        return "This is the dev part: settings may be chosen on it, and no result of it is a confirmation."
    if report.split == "all":
        return "These are all problems, dev and confirm together: settings that were chosen on them are not confirmed."
    if report.plan is None:
        return (
            "This is the confirm part, and no plan was written before it was looked at: how often it was, and what "
            "else was compared, is not known."
        )
    folders = [run.folder for run in report.plan.runs]
    again = len(folders) - len(set(folders))
    said = (
        f"This is the confirm part. Its plan ({report.plan.plan.digest[:12]}) was written before the first of "
        f"{len(folders)} runs"
    )
    said += f"; {again} of them ran an arm again" if again else ", one of each arm that was run"
    there = [name for name, asked in report.plan.plan.arms.items() if "folder" in asked]
    return f"{said}; results of {', '.join(there)} were there already." if there else f"{said}."


def points(share: float) -> str:
    """A signed difference in percentage points."""
    rounded = round(100 * share, 1)
    return f"{MINUS if rounded < 0 else '+' if rounded > 0 else ''}{abs(rounded):.1f}"


def percent(share: float) -> str:
    """A share, with a digit more where it is small."""
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def p_value(p: float) -> str:
    """Two significant digits, no less than the resamples can tell."""
    return f"{p:.2f}" if p >= 0.095 else f"{p:.3f}" if p >= 0.0095 else f"{p:.4f}"


def _interval(found: PairedDifference) -> str:
    return f"{points(found.low)} … {points(found.high)}"


def _apart(difference: float) -> str:
    rounded = round(100 * difference, 1)
    if rounded == 0:
        return "0.0 points from"
    return f"{abs(rounded):.1f} points {'below' if rounded < 0 else 'above'}"


def _memory(match: MemoryMatch | None) -> str:
    if match is None:
        return "at a cache that is not known"
    if match.matched:
        return f"at equal memory (matched within {100 * TOLERANCE:.0f} %: {_times(match.ratio)} its mean KV bytes)"
    if match.ratio < 1:
        return f"at {percent(match.ratio)} of its mean KV bytes (unmatched)"
    return f"at {_times(match.ratio)} its mean KV bytes (unmatched)"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"
