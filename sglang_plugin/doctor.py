"""What `kvpolicy doctor` looks at: the machine, how SGLang finds the plugin, what is hooked, and one launch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.sglang_plugin import doctor_hooks, doctor_installed, doctor_launch
from kvpolicy.sglang_plugin.doctor_findings import Finding, Status


def examine(
    arguments: Mapping[str, Any],
    model: str | None,
    server_flags: Sequence[str],
    trials: Mapping[str, str],
) -> list[Finding]:
    """Look at everything, without starting an engine or loading weights.

    Parameters
    ----------
    arguments : the ``kv_*`` arguments of the launch in question; None counts as not given
    model : folder or hub id, if the launch is to be looked at too
    server_flags : SGLang's own flags of that launch, as on its command line
    trials : what else to try on this machine, by name; each is the path of a function that returns what works, or
        raises RuntimeError
    """
    findings = doctor_installed.findings(trials)
    findings += doctor_hooks.entry_points()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's imports warn about its own dependencies
        if (unusable := doctor_hooks.import_sglang()) is not None:
            findings += [unusable]
        else:
            findings += [doctor_hooks.loaded(os.environ), doctor_hooks.platform(os.environ)]
            findings += doctor_hooks.hooks()
        whole = all(finding.status is not Status.PROBLEM for finding in findings)
        findings += doctor_launch.findings(arguments, model, server_flags, sglang=unusable is None and whole)
    return findings
