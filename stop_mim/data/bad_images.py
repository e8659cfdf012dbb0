"""Images that could not be used: skipped, counted, listed, and too many of them end the run."""

from pathlib import Path

from stop_mim.errors import InputError

MAX_BAD_PART = 0.01


class BadImages:
    """The bad images of a data set, by name; listed in a file if there is one, which is continued on resume."""

    def __init__(self, source_name: str, total: int, file: Path | None = None) -> None:
        self.source_name, self.total, self.file = source_name, total, file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = set(lines)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, description: str) -> None:
        """Count and list one, once; raises InputError when they are too many."""
        line = " ".join(description.split())
        if line not in self._known:
            self._known.add(line)
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a") as file:
                    file.write(line + "\n")
        if len(self._known) > MAX_BAD_PART * self.total:
            listed = f" (listed in {self.file})" if self.file is not None else ""
            raise InputError(
                f"{len(self._known)} of the {self.total} images of '{self.source_name}' cannot be used{listed}, such as "
                f"{line}: more than {MAX_BAD_PART:.0%} is taken for a mistake; repair or remove them."
            )
