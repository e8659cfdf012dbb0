"""JSON files read into dataclasses by their types; a value that does not fit is an InputError with its path."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from stop_mim.errors import InputError, first_line
from stop_mim.files import require_regular, write_atomically

# Larger integers fit neither tensors nor seeds.
MOST = 2**63 - 1
SHOWN = 40


def read_record(path: Path, kind: Any, remedy: str) -> Any:
    """Read a JSON file as a value of type `kind`; raise InputError with path and remedy if it does not fit."""
    require_regular(path)
    try:
        return from_plain(kind, json.loads(path.read_bytes()))
    # An InputError is a ValueError; a file that is nested too deeply is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error).rstrip('.')}): {remedy}.") from error


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(document, indent=2)
    write_atomically(path, lambda file: file.write_text(text + "\n"))


def from_plain(kind: Any, value: Any, name: str = "", base: Any = None) -> Any:
    """Convert plain values, as read from JSON or YAML, to a type.

    Args:
        kind: a dataclass, or a type of a dataclass field.
        value: plain values; lists become tuples where the type is one, whole numbers become floats, and so do texts such as
            1e-3, which YAML does not read as a number.
        name: the value's name in errors, such as optim.lr.
        base: an instance of the dataclass that provides missing fields; default: the defaults of the type.
    """
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, name, base)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(parts, value, name)
    if kind is Any:
        return value
    if origin is Literal:
        known = any(value == one and type(value) is type(one) for one in parts)
        return _required(value, known, name, " or ".join(map(str, parts)))
    if kind in (dict, Mapping) or origin in (dict, Mapping):
        _required(value, isinstance(value, dict) and all(isinstance(key, str) for key in value), name, "a mapping")
        return {key: from_plain(parts[1] if parts else Any, part, _path(name, key)) for key, part in value.items()}
    if kind in (list, tuple) or origin in (list, tuple):
        return _sequence(origin or kind, parts, value, name)
    return _scalar(kind, value, name)


def _dataclass(kind: type, value: Any, name: str, base: Any) -> Any:
    _required(value, isinstance(value, dict), name or "the record", "a mapping")
    known = typing.get_type_hints(kind, include_extras=True)
    if unknown := [key for key in value if key not in known]:
        close = difflib.get_close_matches(str(unknown[0]), known, n=1)
        remedy = f"did you mean '{_path(name, close[0])}'?" if close else "remove it."
        raise InputError(f"The configuration has an unknown field '{_path(name, str(unknown[0]))}': {remedy}")
    parts = {
        key: from_plain(known[key], part, _path(name, key), getattr(base, key, None)) for key, part in value.items()
    }
    if base is not None:
        return dataclasses.replace(base, **parts)
    needed = [
        one.name
        for one in dataclasses.fields(kind)
        if one.default is one.default_factory is dataclasses.MISSING and one.name not in parts
    ]
    if needed:
        raise InputError(f"{_path(name, needed[0])} is missing: add it.")
    return kind(**parts)


def _one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return from_plain(kind, value, name)
        except InputError as error:
            errors.append(error)
    # The error for the first type, such as float in "float | None".
    raise errors[0]


def _sequence(kind: type, parts: tuple[Any, ...], value: Any, name: str) -> Any:
    _required(value, isinstance(value, list | tuple), name, "a list")
    has_length = kind is tuple and parts and Ellipsis not in parts
    kinds = list(parts) if has_length else [parts[0] if parts else Any] * len(value)
    _required(value, len(kinds) == len(value), name, f"{len(kinds)} values")
    pairs = zip(kinds, value, strict=True)
    return kind(from_plain(one, part, f"{name}[{place}]") for place, (one, part) in enumerate(pairs))


def _scalar(kind: Any, value: Any, name: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > MOST
    if kind is float:
        if isinstance(value, str):
            with suppress(ValueError):
                return float(value)
        # Some measurements are infinite or NaN.
        return float(_required(value, is_number or isinstance(value, float), name, "a number"))
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is int:
        return _required(value, is_number and isinstance(value, int), name, "a whole number")
    described = {bool: "true or false", str: "a text", type(None): "nothing"}.get(kind, str(kind))
    return _required(value, isinstance(value, kind), name, described)


def _required(value: Any, fits: bool, name: str, wanted: str) -> Any:
    if not fits:
        text = repr(value)
        raise InputError(f"{name or 'the value'} is {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}: give {wanted}.")
    return value


def _path(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
