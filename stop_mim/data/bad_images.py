"""Images that cannot be read: counted, listed in a file, and refused if there are too many."""

from collections.abc import Callable, Mapping
from pathlib import Path

from stop_mim.errors import InputError, printable
from stop_mim.files import append_line

MAX_BAD_FRACTION = 0.01
SHOWN_ONE_BY_ONE = 5
UNREAD_PHOTOS = frozenset({".heic", ".heif", ".avif", ".dng", ".cr2", ".cr3", ".nef", ".arw"})
"""Extensions of photographs that cannot be read."""


class BadImages:
    """The bad images of a dataset, by description; the list in `file` is continued on resume.

    Args:
        source_name: the dataset.
        total: its number of images.
        file: the list of bad images, one a line.
        max_fraction: the fraction of bad images above which they are taken for a mistake; default: 1%.
        show: shows a message for each of the first bad images.
    """

    def __init__(
        self,
        source_name: str,
        total: int,
        file: Path | None = None,
        max_fraction: float | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.source_name, self.total, self.file, self.show = source_name, total, file, show
        self.max_fraction = MAX_BAD_FRACTION if max_fraction is None else max_fraction
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = set(lines)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, description: str) -> None:
        """Add an image, unless it is known; raise InputError if there are too many."""
        line = printable(" ".join(description.split()))
        listed = f" (listed in {self.file})" if self.file is not None else ""
        if line not in self._known:
            self._known.add(line)
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                append_line(self.file, line)
            if self.show is not None and len(self._known) <= SHOWN_ONE_BY_ONE:
                more = f"; more are not shown{listed}" if len(self._known) == SHOWN_ONE_BY_ONE else ""
                self.show(f"skipped    {line}{more}")
        if len(self._known) > self.max_fraction * self.total:
            enough = min(100, 100 * len(self._known) // self.total + 1)
            raise InputError(
                f"{len(self._known)} of the {self.total} images of '{self.source_name}' cannot be used{listed}, such as "
                f"{line}: more than {100 * self.max_fraction:g}% is taken for a mistake; repair or remove them, or start "
                f"a run that allows more with --max-bad {enough}%."
            )


def skipped(unreadable: int, ignored: Mapping[str, int]) -> str:
    """Return what was left out of a dataset, such as "1 unreadable; ignored: 2 .png.bak, 1 .txt"; "" if nothing was."""
    kinds = sorted(ignored.items(), key=lambda kind: (-kind[1], kind[0]))
    files = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in kinds)
    photos = " and ".join(kind for kind, _ in kinds if kind in UNREAD_PHOTOS)
    parts = [
        f"{unreadable:,} unreadable" if unreadable else "",
        f"ignored: {files}" if files else "",
        f"convert {photos} files to JPEG to use them" if photos else "",
    ]
    return "; ".join(filter(None, parts))
