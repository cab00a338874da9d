"""``name:value;name:value`` into the typed fields of a policy's dataclass."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from kvpolicy.policies.base import Policy


def parse_options(text: str) -> dict[str, str]:
    """Split ``name:value;name:value``; a semicolon inside square brackets belongs to the value.

    Raises
    ------
    ValueError
        On a piece without a name or a value, a name given twice, or brackets that do not match.
    """
    options: dict[str, str] = {}
    for piece in filter(None, (piece.strip() for piece in _pieces(text))):
        name, colon, value = (part.strip() for part in piece.partition(":"))
        if not (name and colon and value):
            raise ValueError(f"kv_options is written name:value;name:value, got {piece!r}")
        if name in options:
            raise ValueError(f"kv_options gives {name!r} twice")
        options[name] = value
    return options


def _pieces(text: str) -> Iterator[str]:
    """What the semicolons outside of square brackets separate."""
    start = depth = 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth < 0:
            break
        if character == ";" and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth != 0:
        raise ValueError(f"the brackets of kv_options {text!r} do not match")
    yield text[start:]


def build(policy: type[Policy], options: dict[str, str]) -> Policy:
    """An instance of `policy` with its fields overridden by `options`.

    Raises
    ------
    ValueError
        On an unknown option or a value that does not fit the field's type; the message says which
        options there are.
    """
    fields = {field.name: field for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(policy)
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in fields:
            known = ", ".join(f"{f.name} ({f.default})" for f in fields.values()) or "none"
            raise ValueError(f"{policy.name!r} has no option {name!r}; its options and defaults: {known}")
        values[name] = _convert(name, text, hints[name], **fields[name].metadata)
    return policy(**values)


def _convert(name: str, text: str, hint: Any, *, least: float = 0, odd: bool = False) -> Any:
    """`text` as the type of a field: int or float of at least `least`, bool, str, Literal, or one of these or None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if text not in choices:
            raise ValueError(f"option {name!r} is one of {', '.join(choices)}, got {text!r}")
        return text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"option {name!r} is true or false, got {text!r}")
        return text.lower() == "true"
    if hint is str:
        return text
    kind = {int: "a whole number", float: "a number"}[hint]
    try:
        value = hint(text)
    except ValueError:
        raise ValueError(f"option {name!r} must be {kind}, got {text!r}") from None
    if value == float("inf"):
        raise ValueError(f"option {name!r} must be finite, got {text!r}")
    if not value >= least:
        raise ValueError(f"option {name!r} must be at least {least}, got {text!r}")
    if odd and value % 2 == 0:
        raise ValueError(f"option {name!r} must be odd, got {text!r}")
    return value
