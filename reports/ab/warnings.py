"""What makes the numbers of a comparison less than they seem, beside what the statistics themselves say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpolicy.reports.ab.measures import Measures
from kvpolicy.reports.ab.origin import Origin


def warnings_of(measures: Mapping[tuple[str, str], Measures], origins: Sequence[Origin]) -> list[str]:
    """One sentence each."""
    warnings = []
    for (arm, task), found in measures.items():
        if found.memory is None:
            warnings.append(f"{task}: no response of arm {arm} carries a record, so its cache is not known.")
        elif found.memory.without_record:
            warnings.append(
                f"{task}: {found.memory.without_record} of {found.responses} responses of arm {arm} carry no record; "
                "its numbers of memory leave them out."
            )
        if found.effect is not None and found.effect.deferred:
            warnings.append(
                f"{task}: {found.effect.deferred} evictions of arm {arm} were put off for want of free slots; a "
                "larger pool avoids it."
            )
        if found.effect is not None and found.effect.denied:
            warnings.append(
                f"{task}: the rows for protected tokens ran out under arm {arm} (up to {found.effect.denied} tokens "
                "were denied one); a larger max_running_requests sets more of them aside."
            )
    models = {origin.models for origin in origins if origin.models}
    if len(models) > 1:
        warnings.append(f"the arms ran different models: {', '.join(sorted({each for m in models for each in m}))}.")
    for package in sorted({name for origin in origins for name in origin.versions}):
        found_versions = {origin.versions[package] for origin in origins if package in origin.versions}
        if len(found_versions) > 1:
            warnings.append(f"the arms ran under different versions of {package}: {', '.join(sorted(found_versions))}.")
    if len({origin.chat_template for origin in origins}) > 1:
        warnings.append("the arms were run with different chat templates, or not all with one.")
    return warnings
