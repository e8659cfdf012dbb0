"""Images that cannot be read: counted, listed in a file, and refused if there are too many."""

from pathlib import Path

from stop_mim.errors import InputError

MAX_BAD_FRACTION = 0.01


class BadImages:
    """The bad images of a dataset, by description; the list in `file` is continued on resume."""

    def __init__(self, source_name: str, total: int, file: Path | None = None) -> None:
        self.source_name, self.total, self.file = source_name, total, file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = set(lines)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, description: str) -> None:
        """Add an image, unless it is known; raise InputError if there are too many."""
        line = " ".join(description.split())
        if line not in self._known:
            self._known.add(line)
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a") as file:
                    file.write(line + "\n")
        if len(self._known) > MAX_BAD_FRACTION * self.total:
            listed = f" (listed in {self.file})" if self.file is not None else ""
            raise InputError(
                f"{len(self._known)} of the {self.total} images of '{self.source_name}' cannot be used{listed}, such as "
                f"{line}: more than {MAX_BAD_FRACTION:.0%} is taken for a mistake; repair or remove them."
            )
