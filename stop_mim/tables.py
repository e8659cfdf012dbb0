"""Tables of text for the screen, Markdown and LaTeX; lines of text for the screen."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.text import Text

from stop_mim.errors import InputError, printable
from stop_mim.files import write_atomically

# Characters with a meaning in LaTeX, and those that its fonts lack.
LATEX = {one: f"\\{one}" for one in "&%$#_{}"} | {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "|": r"$|$", "<": r"$<$", ">": r"$>$", "–": "--", "−": "$-$", "·": r"$\cdot$", "…": r"\ldots{}"},
    **{"σ": r"$\sigma$", "Σ": r"$\Sigma$", "ψ": r"$\psi$", "m̃": r"$\tilde{m}$"},
}

NAME_WIDTH = 20
"""Names of rows are not folded to less than this on a narrow screen."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a caption; the first `names` columns name the rows, the others hold numbers."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    names: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the caption, the table and the note; a wide table is several tables, with the names in each."""
        yield Text(self.caption, style="table.title")
        for group in self._columns_that_fit(options.max_width):
            table = rich.table.Table()
            for number in group:
                # Names are folded, numbers never.
                named = number < self.names
                width = min(NAME_WIDTH, self._width(number)) if named else None
                justify: Literal["left", "right"] = "left" if named else "right"
                heading = escape(self.head[number])
                table.add_column(heading, justify=justify, no_wrap=not named, overflow="fold", min_width=width)
            for row in self.rows:
                table.add_row(*(escape(row[number]) for number in group))
            yield table
        if self.note:
            yield Text(self.note, style="table.caption")

    def _columns_that_fit(self, width: int) -> list[list[int]]:
        """Return the columns of each table, names included: as few tables as possible, of about the same width."""
        fewest = len(self._split(width))
        return next(groups for limit in range(width + 1) if len(groups := self._split(limit)) == fewest)

    def _split(self, width: int) -> list[list[int]]:
        """Return the columns of tables of at most this width; a column takes three cells more than its text."""
        names = list(range(self.names))
        used = 1 + sum(3 + min(NAME_WIDTH, self._width(number)) for number in names)
        groups, left = [list(names)], width - used
        for number in range(self.names, len(self.head)):
            needed = 3 + self._width(number)
            if needed > left and len(groups[-1]) > self.names:
                groups.append(list(names))
                left = width - used
            groups[-1].append(number)
            left -= needed
        return groups

    def _width(self, number: int) -> int:
        cells = [row[number] for row in (self.head, *self.rows)]
        return max(cell_len(line) for cell in cells for line in cell.split("\n"))

    def markdown(self) -> str:
        """Return a pipe table below its caption."""
        marks = ["---" if number < self.names else "---:" for number in range(len(self.head))]
        rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (self.head, *self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in (rows[0], marks, *rows[1:])]
        return "\n".join([self.caption, "", *lines, *(["", self.note] if self.note else [])]) + "\n"

    def latex(self) -> str:
        """Return a table environment with rules of the package booktabs."""
        columns = "".join("l" if number < self.names else "r" for number in range(len(self.head)))
        head, *rows = (" & ".join(map(_latex, row)) + r" \\" for row in (self.head, *self.rows))
        caption = ". ".join(text.rstrip(".") for text in (self.caption, self.note) if text)
        lines = [
            r"\begin{table}",
            rf"\caption{{{_latex(caption)}}}",
            r"\centering",
            rf"\begin{{tabular}}{{{columns}}}",
            *(r"\toprule", head, r"\midrule", *rows, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "% \\usepackage{booktabs}\n" + "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return re.sub("m̃|.", lambda found: LATEX.get(found[0], found[0]), text.replace("\n", " "))


def check_table_file(path: Path) -> None:
    """Raise InputError unless the name of a file ends in .md or .tex."""
    if path.suffix not in (".md", ".tex"):
        raise InputError(f"The table {path} has no known format: give a file that ends in .md or .tex.")


def write_tables(path: Path, tables: Sequence[Table]) -> None:
    """Write tables as Markdown (.md) or LaTeX (.tex)."""
    check_table_file(path)
    parts = [table.markdown() if path.suffix == ".md" else table.latex() for table in tables]
    write_atomically(path, lambda file: file.write_text("\n".join(parts), encoding="utf-8"))


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is, without markup; only the screen folds it."""
    console.print(escape(printable(text)), style=style, highlight=False, soft_wrap=True)


def as_rate(per_second: float) -> str:
    """Return a rate with about three digits, such as 0.42, 12.3 or 29,150."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def duration(seconds: float) -> str:
    """Return a time in words, such as 40 seconds, 3.5 minutes or 12.0 hours."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
