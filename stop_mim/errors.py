"""Errors with a message for the user: the command line prints it as one sentence, without a traceback."""


class InputError(ValueError):
    """Something given by the user cannot be used: the message names the thing, its value and the remedy."""


class MissingExtra(InputError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed: run pip install 'stop-mim[{extra}]'."
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise InputError unless the value is one of the choices."""
    if value not in choices:
        raise InputError(f"{name} is '{value}': choose one of {', '.join(choices)}.")


class TrainingDiverged(RuntimeError):
    """Training cannot continue because the loss or the features are not finite."""


def printable(text: str) -> str:
    """Escape control characters, which could change what a terminal shows."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ProcessLost(Exception):
    """Another process of the run has ended, and this one cannot go on without it."""
