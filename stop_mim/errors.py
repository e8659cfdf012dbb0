"""Errors that a user can mend: the command line prints their one sentence and exits with code 2."""


class InputError(ValueError):
    """Something that was given cannot be used: the message names the thing, its value and the remedy."""


class MissingExtra(InputError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed: run pip install 'stop-mim[{extra}]'."
        )


class TrainingDiverged(RuntimeError):
    """The loss was not finite for several steps in a row; none of these steps changed the weights."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, as far as it fits into a sentence; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
