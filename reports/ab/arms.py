"""What `--arm` names: arguments of a run, or results that are there already."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The plugin's arguments, which only `sglang_plugin` may import. A test holds the two lists together.
KV_ARGUMENTS = (
    "kv_policy",
    "kv_budget",
    "kv_period",
    "kv_seed",
    "kv_options",
    "kv_trace",
    "kv_quant",
    "kv_quant_group",
    "kv_protect",
    "kv_quant_keys",
)
# SGLang has arguments of its own that begin so: another name is refused only if it is nearly one of ours.
_ALIKE = 0.75
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_POLICY = re.compile(r"[\w.]+:\w+")  # package.module:Class
_TAKEN = ("index.html", "report.json", "plan.json")
_WRITTEN = (
    "an arm is written [NAME=]POLICY, [NAME=]kv_policy=…,kv_budget=…,argument=value or [NAME=]FOLDER "
    "with results of lm-eval"
)


class AbError(Exception):
    """A comparison cannot be run or reported; the message is one sentence for the user."""


@dataclass(frozen=True)
class ArmSpec:
    """One arm: `arguments` for lm-eval's ``--model_args``, as text, or the `folder` of results; the other is None."""

    name: str
    arguments: Mapping[str, str] | None = None
    folder: Path | None = None


def parse_arms(texts: Sequence[str]) -> list[ArmSpec]:
    """All arms of a comparison.

    Raises
    ------
    AbError
        See :func:`parse_arm`; if there are fewer than two, or two of one name.
    """
    arms = [parse_arm(text) for text in texts]
    if len(arms) < 2:
        raise AbError(f"a comparison needs at least two arms, got {len(arms)}; give --arm once for each.")
    counts = Counter(arm.name for arm in arms)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise AbError(f"two arms are called {twice[0]}; write a name before one of them: --arm NAME=….")
    return arms


def parse_arm(text: str) -> ArmSpec:
    """``[NAME=]POLICY``, ``[NAME=]argument=value,…`` or ``[NAME=]FOLDER``.

    A name of a policy goes before a folder of that name. Without a name an arm is called by what it is.

    Raises
    ------
    AbError
        If it is none of these, or the plugin would refuse its policy, options or format by what they are called.
    """
    from kvpolicy.policies.registry import POLICIES

    head, equals, rest = text.partition("=")
    # "small=kv_policy=…" has a name, "kv_policy=…" has none; "out/a=b" may be a folder.
    named = bool(equals) and not head.startswith("kv_") and not Path(text).is_dir()
    name, what = (head, rest) if named else ("", text)
    if named and not _NAME.fullmatch(name):
        raise AbError(f"--arm {text}: an arm's name has letters, digits, '.', '_' and '-' only, got {name!r}.")
    if name in _TAKEN:
        raise AbError(f"--arm {text}: {name} is a file of the report; take another name.")
    if "=" not in what and (_OWN_POLICY.fullmatch(what) or what.partition("[")[0] in POLICIES):
        arguments = {"kv_policy": what}
    elif what and Path(what).is_dir():
        return ArmSpec(name or _as_name(Path(what).resolve().name), folder=Path(what))
    elif "=" in what:
        arguments = items(what, f"--arm {text}")
    else:
        near = difflib.get_close_matches(what, POLICIES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise AbError(f"--arm {text}: {what!r} is neither a folder nor a policy{hint}; {_WRITTEN}.")
    _check(text, arguments)
    if "kv_quant" in arguments and "kv_policy" not in arguments:
        arguments = {"kv_policy": "full", **arguments}  # the same cache; the tasks give seeds where a policy is named
    return ArmSpec(name or _default_name(arguments), arguments)


def items(text: str, option: str) -> dict[str, str]:
    """``name=value,name=value`` as lm-eval divides it; a comma inside brackets or quotes belongs to the value.

    Raises
    ------
    AbError
        On a piece that is not written so, or a name that is given twice.
    """
    found: dict[str, str] = {}
    for piece in filter(None, _pieces(text)):
        name, equals, value = piece.partition("=")
        if not (equals and name.isidentifier()):
            raise AbError(f"{option}: {piece!r} is not written name=value.")
        if name in found:
            raise AbError(f"{option} gives {name} twice.")
        found[name] = value
    return found


def _pieces(text: str) -> list[str]:
    pieces, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth = max(0, depth + (character in "[({") - (character in "])}"))
        if character == "," and not quote and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _check(text: str, arguments: Mapping[str, str]) -> None:
    """What is certain to be refused by the engine is refused before it is started."""
    from kvpolicy.policies.options import build, parse_options
    from kvpolicy.policies.registry import policy_type
    from kvpolicy.quant.cache_format import CacheFormat

    for name in arguments:
        near = difflib.get_close_matches(name, KV_ARGUMENTS, n=1, cutoff=_ALIKE)
        if name not in KV_ARGUMENTS and near:
            raise AbError(f"--arm {text}: {name} is not an argument; did you mean {near[0]}?")
    try:
        if (policy := arguments.get("kv_policy")) is not None:
            if "|" in policy:
                raise ValueError(f"kv_policy={policy} names several policies, and an arm has one")
            plain, bracket, own = policy.partition("[")
            options = own.removesuffix("]") if bracket else arguments.get("kv_options", "")
            build(policy_type(plain), parse_options(options))
        if (quant := arguments.get("kv_quant")) is not None:
            CacheFormat(quant, keys=arguments.get("kv_quant_keys", "none"))
    except ValueError as error:
        raise AbError(f"--arm {text}: {error}.") from error


def _default_name(arguments: Mapping[str, str]) -> str:
    """Policy, budget and format by their values, everything else with its name; "full" only where it stands alone."""
    shown = dict(arguments)
    if "kv_quant" in shown and shown.get("kv_policy") == "full":
        del shown["kv_policy"]
    parts = [shown.pop(name) for name in ("kv_policy", "kv_budget", "kv_quant") if name in shown]
    parts += [f"{name.removeprefix('kv_')}-{value}" for name, value in shown.items()]
    return _as_name("-".join(parts))


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._") or "arm"
