"""Arguments of the command line: tyro reads them, and every mistake becomes one sentence (`InputError`)."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
from tyro.conf import OmitSubcommandPrefixes, subcommand

from stop_mim.errors import InputError

try:
    # Not public yet. Without it, tyro prints its own message and exits with the same code.
    from tyro import _errors as tyro_errors
except ImportError:
    tyro_errors = None  # type: ignore[assignment]

# Fields of commands whose own fields are options without a prefix.
UNPREFIXED = ("run", "config", "plan")
SWITCH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")
NOUNS: dict[Any, str] = {int: "whole number", float: "number", str: "text", Path: "path"}


def one_of(options: dict[str, tuple[Any, str]]) -> Any:
    """Return subcommands by name, each with its default and its line of help."""
    kinds = [
        Annotated[type(default), subcommand(name, default=default, description=text)]
        for name, (default, text) in options.items()
    ]
    return functools.reduce(operator.or_, kinds)


def parse(kind: Any, given: Sequence[str], **options: Any) -> tuple[Any, list[str]]:
    """Return what tyro reads from the arguments, and the arguments that it does not know."""
    on_parse_error = getattr(tyro_errors, "on_parse_error", contextlib.nullcontext)
    with on_parse_error(functools.partial(_refuse, given)):
        return tyro.cli(kind, args=given, return_unknown_args=True, config=(OmitSubcommandPrefixes,), **options)


def given_options(given: Sequence[str]) -> dict[str, str]:
    """Return the values of each option among the arguments as one text, by the path of its field, such as optim.epochs."""
    options: dict[str, str] = {}
    path = None
    for argument in given:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            path = name.replace("-", "_")
            options[path] = value
        elif path is not None:
            options[path] = f"{options[path]} {argument}".strip()
    return options


def refuse_unknown(unknown: Sequence[str], *options: object) -> None:
    """Raise InputError, with the nearest option, for the first argument that no option takes.

    Args:
        unknown: what `parse` returned as unknown.
        options: dataclasses whose fields are the known options.
    """
    if not unknown:
        return
    name = unknown[0].partition("=")[0]
    wanted, flags = name.lstrip("-").replace("_", "-"), dict(pair for one in options for pair in _flags(one))
    if not name.startswith("-"):
        remedy = "--help shows what can be given."
        if name.lower() in SWITCH_VALUES:
            remedy = "the option before it takes no more values; a switch takes none, and --log.no-tensorboard turns one off."
        elif Path(name).is_dir():
            remedy = "write the option before it, such as --data."
        elif wanted in flags:
            remedy = f"did you mean --{wanted}?"
        # The end of a file's name, which a shell puts in the place of a pattern.
        elif re.search(r"\.[A-Za-z]", name):
            remedy = "write patterns such as 'train-*.parquet' in quotes, or see --help."
        raise InputError(f"'{name}' is not expected: {remedy}")
    close = _nearest(wanted, flags)
    remedy = f"did you mean --{close}?" if close else "--help lists all options."
    raise InputError(f"There is no option {name}: {remedy}")


def _refuse(given: Sequence[str], event: Any) -> None:
    """Raise InputError for arguments that tyro rejects; for other events tyro prints its message."""
    if isinstance(event, tyro_errors.MissingArgs):
        missing = event.missing_arguments[0].arg
        name = missing.lowered.metavar if missing.is_positional() else missing.display_name()
        choices = missing.lowered.choices
        remedy = f"choose {_either(choices)}" if choices else "--help describes it"
        raise InputError(f"{name} is not given: {remedy}.")
    shown = getattr(event, "argument", None)
    if shown is None:
        if isinstance(event, tyro_errors.InstantiationFailure):
            # The message of a config that refuses its values.
            raise InputError(event.message)
        return
    flag = shown.display_name()
    if isinstance(event, tyro_errors.InvalidChoice):
        raise InputError(f"{flag} is '{event.value}': choose {_either(event.choices)}.")
    if isinstance(event, tyro_errors.InstantiationFailure | tyro_errors.BadValue):
        values = given_options(given).get(flag.lstrip("-").replace("-", "_"))
        what = f"is '{values}'" if values else "has no value"
        raise InputError(f"{flag} {what}: give {_needs(shown.field.type_stripped, shown.lowered.metavar)}.")


def _either(choices: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))


def _needs(kind: Any, metavar: str) -> str:
    """Return what an option of that type takes, such as one or more whole numbers; a metavar of its own says it itself."""
    parts = get_args(kind) or (kind,)
    kinds = [part for part in parts if part not in (types.NoneType, ...)]
    if len({*kinds}) != 1 or kinds[0] not in NOUNS or kinds[0].__name__.upper() not in metavar:
        return metavar
    noun = NOUNS[kinds[0]]
    if ... in parts:
        return f"one or more {noun}s"
    return f"a {noun}" if len(kinds) == 1 else f"{len(kinds)} {noun}s"


def _nearest(wanted: str, flags: dict[str, str]) -> str | None:
    """Return the option that is meant: one of another group, a mistyped one, or one whose name or help has the words."""
    group, _, name = wanted.rpartition(".")
    if not name:
        return None
    same = [flag for flag in flags if flag.rpartition(".")[2] == name]
    near = [flag for flag in flags if group and flag.startswith(f"{group}.")] or [*flags]
    named = [flag for flag in near if _words(name) <= _words(flag.rpartition(".")[2])]
    # Options without a group first, then short ones.
    named.sort(key=lambda flag: ("." in flag, len(flag)))
    described = sorted(
        (flag for flag in near if _words(name) <= _words(flags[flag])), key=lambda flag: len(flags[flag])
    )
    mistyped, similar = (difflib.get_close_matches(wanted, flags, 1, cutoff) for cutoff in (0.8, 0.5))
    return next(iter([*same, *mistyped, *named, *described, *similar]), None)


def _words(text: str) -> set[str]:
    """Return the words of a text, in the singular."""
    return {word.rstrip("s") for word in re.findall(r"\w+", text.lower())}


def _flags(options: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options of a dataclass and its groups, each with its help."""
    texts = _field_docs(type(options))
    for one in dataclasses.fields(options):
        value = getattr(options, one.name)
        if dataclasses.is_dataclass(value):
            yield from _flags(value, prefix if one.name in UNPREFIXED else f"{prefix}{one.name}.")
        else:
            yield f"{prefix}{one.name}".replace("_", "-"), texts.get(one.name, "")


def _field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's fields: the strings below them in its source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        # Classes that are made at run time have no source.
        except (OSError, TypeError):
            continue
        for field, text in itertools.pairwise(getattr(tree, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = str(text.value.value)
    return found
