"""Private test cases as the hub stores them: JSON, in a pickled string, compressed, in base 64."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any, NoReturn

# The largest of version 6 is far below; a small text may not fill the memory.
_MOST_BYTES = 1 << 30


class _StringUnpickler(pickle.Unpickler):
    """Reads a pickle without ever looking a class or function up, which is what makes pickles dangerous."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle asks for {module_name}.{global_name}, and only a string is allowed")


def decode(text: str) -> list[dict[str, Any]]:
    """The test cases in `text`, which may be plain JSON too.

    Raises
    ------
    ValueError
        If it is neither, or if the pickle holds anything but a string.
    """
    if text.lstrip().startswith("["):
        return _cases(text)
    try:
        expander = zlib.decompressobj()
        pickled = expander.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"private test cases are not compressed and in base 64: {error}") from error
    if not expander.eof:
        raise ValueError(f"private test cases are cut off, or hold more than {_MOST_BYTES} bytes")
    try:
        value = _StringUnpickler(io.BytesIO(pickled)).load()
    # What bytes that are no pickle raise is not limited to UnpicklingError (see the module's documentation).
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        IndexError,
        KeyError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"private test cases are no pickled string: {error}") from error
    if not isinstance(value, str):
        raise ValueError(f"private test cases are a pickled {type(value).__name__}, and only a string is allowed")
    return _cases(value)


def _cases(text: str) -> list[dict[str, Any]]:
    cases = json.loads(text)
    if not isinstance(cases, list):
        raise ValueError(f"private test cases are a JSON {type(cases).__name__}, and must be a list")
    return cases
