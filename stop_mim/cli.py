"""The command line: commands, recipes and fields; every mistake of a user is one sentence and exit code 2."""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import stop_mim
from stop_mim.errors import InputError

# What a command needs of the package is imported when it runs, so that --help need not wait for torch.
if TYPE_CHECKING:
    from stop_mim.training.loop import TrainResult

Options = TypeVar("Options")
EXIT_FAILURE, EXIT_INPUT, EXIT_INTERRUPTED = 1, 2, 130
HELP = ("-h", "--help")


@dataclass(frozen=True)
class DemoOptions:
    """Train a small StoP model on the embedded scenes; compare it with an untrained one and with pixels."""

    out: str = "stop-mim-demo"
    """Folder of the run; if it is there already, a number is added."""
    seed: int = 0
    """Seed of the run."""


def demo(arguments: list[str]) -> None:
    """Train a small model on the embedded scenes and see what it learned: three minutes, no data, no GPU."""
    options = parse(DemoOptions(), arguments, "stop-mim demo")
    from stop_mim.demo import run_demo
    from stop_mim.training.recipes import find_recipe

    run_demo(replace(find_recipe("demo"), out=options.out, seed=options.seed))


def pretrain(arguments: list[str]) -> None:
    """Train an encoder on your images: stop-mim pretrain RECIPE --data NAME [--GROUP.FIELD VALUE …]."""
    from stop_mim.training.loop import train
    from stop_mim.training.recipes import RECIPES, find_recipe, summary

    if arguments and arguments[0] in HELP:
        _print_table(
            "stop-mim pretrain RECIPE --data NAME [--GROUP.FIELD VALUE …]",
            "recipe",
            {name: summary(name) for name in RECIPES},
        )
        _print("stop-mim pretrain RECIPE --help shows every field with its value in that recipe.")
        return
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"pretrain needs the name of a recipe first: choose one of {', '.join(RECIPES)}.")
    name = arguments[0]
    config = parse(find_recipe(name), arguments[1:], f"stop-mim pretrain {name}")
    _tell_end(train(config, recipe=name))


def resume(arguments: list[str]) -> None:
    """Continue a run as if it had never stopped: stop-mim resume RUN."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in HELP):
        raise InputError("resume needs the folder of a run first: stop-mim resume RUN.")
    from stop_mim.training.config import SpeedConfig
    from stop_mim.training.loop import resume as resume_run
    from stop_mim.training.run_folder import RunFolder

    asked_for_help = arguments[0] in HELP
    speed = SpeedConfig() if asked_for_help else RunFolder(Path(arguments[0])).config().speed

    @dataclass(frozen=True)
    class ResumeOptions:
        """Continue a run from its newest checkpoint; what changes results is the run's own and cannot be changed."""

        speed: SpeedConfig
        """Where and how fast it goes on."""
        checkpoint: Path | None = None
        """Checkpoint to continue from, instead of the newest one."""
        stop_after_steps: int | None = None
        """Stop (and save) when so many steps of the whole run are done."""

    options = parse(ResumeOptions(speed), arguments[not asked_for_help :], "stop-mim resume RUN")
    _tell_end(resume_run(arguments[0], options.checkpoint, options.speed, options.stop_after_steps))


COMMANDS: dict[str, Callable[[list[str]], None]] = {"demo": demo, "pretrain": pretrain, "resume": resume}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a mistake of the user's ends the process with one sentence and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(given)
    except InputError as error:
        _fail(str(error), EXIT_INPUT)
    except KeyboardInterrupt:
        _fail("Interrupted.", EXIT_INTERRUPTED)
    except Exception as error:
        # Looked up by name, so that a command that never trains never imports the trainer.
        if type(error).__name__ != "TrainingDiverged":
            raise
        _fail(str(error), EXIT_FAILURE)


def _dispatch(given: list[str]) -> None:
    if not given or given[0] in HELP:
        summaries = {name: (command.__doc__ or "").strip() for name, command in COMMANDS.items()}
        _print_table("stop-mim COMMAND [options]", "command", summaries)
        _print("stop-mim COMMAND --help tells more.")
    elif given[0] == "--version":
        _print(f"stop-mim {stop_mim.__version__}")
    elif given[0] in COMMANDS:
        COMMANDS[given[0]](given[1:])
    else:
        raise InputError(f"There is no command '{given[0]}': choose one of {', '.join(COMMANDS)}.")


def parse(default: Options, arguments: list[str], program: str) -> Options:
    """Options from the command line, with the given ones as default; a mistake is an InputError."""
    if any(argument in HELP for argument in arguments):
        return tyro.cli(type(default), default=default, args=arguments, prog=program)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            options, unknown = tyro.cli(
                type(default), default=default, args=arguments, prog=program, return_unknown_args=True
            )
    except SystemExit:
        raise InputError(_sentence(complaint.getvalue(), program)) from None
    if unknown:
        raise InputError(_unknown(unknown[0], default, program))
    return options


def _sentence(complaint: str, program: str) -> str:
    """The message of tyro's box, on one line."""
    parts = re.split(r"\n\s*-{8,}\s*\n", complaint)
    text = " ".join((parts[1] if len(parts) > 1 else complaint).split()).rstrip(".")
    # A value that our own checks refused comes with our own sentence.
    own = re.fullmatch(r"Error parsing [\w.-]+: (\w[\w.]* is .*:.*)", text)
    return f"{own[1]}." if own else f"{text}: '{program} --help' shows every field."


def _unknown(argument: str, default: object, program: str) -> str:
    if not argument.startswith("-"):
        return f"'{argument}' is one word too many: '{program} --help' shows what can be given."
    name = argument.split("=")[0].lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(name, [*_field_names(default)], n=1, cutoff=0.5)
    hint = f"did you mean --{close[0]}? " if close else ""
    return f"There is no field {argument.split('=')[0]}: {hint}'{program} --help' shows every field."


def _field_names(options: object, prefix: str = "") -> Iterable[str]:
    for name in getattr(options, "__dataclass_fields__", {}):
        value = getattr(options, name)
        if hasattr(value, "__dataclass_fields__"):
            yield from _field_names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".replace("_", "-")


def _tell_end(result: "TrainResult") -> None:
    if result.finished:
        _print(f"Done: {result.total_steps} steps. The encoder: {result.folder / 'encoder.safetensors'}")
        return
    why = f"Stopped by {result.interrupted_by}" if result.interrupted_by else "Stopped"
    _print(
        f"{why} after step {result.step} of {result.total_steps}; saved. Go on with: stop-mim resume {result.folder}"
    )


def _print_table(title: str, heading: str, rows: dict[str, str]) -> None:
    table = Table(heading, "", title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(escape(name), escape(text))
    Console().print(table)


def _print(text: str) -> None:
    Console().print(escape(text), highlight=False, soft_wrap=True)


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"stop-mim: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
