"""Tables as Markdown and LaTeX: what has a meaning there is escaped."""

import io

import pytest
from rich.console import Console

from stop_mim.errors import InputError
from stop_mim.tables import Table, as_rate, say, write_tables

TABLE = Table("Scores of a_b", ["variant", "|m̃|"], [["σ|1", "50% ± 2\\"]], "A & B.")


def test_markdown(tmp_path):
    write_tables(tmp_path / "t.md", [TABLE, TABLE])
    text = (tmp_path / "t.md").read_text()
    assert text.startswith("Scores of a_b\n\n| variant | \\|m̃\\| |\n| --- | ---: |\n| σ\\|1 | 50% ± 2\\ |\n\nA & B.\n")
    assert text.count("| --- |") == 2


def test_latex(tmp_path):
    write_tables(tmp_path / "t.tex", [TABLE])
    lines = (tmp_path / "t.tex").read_text().splitlines()
    assert r"\caption{Scores of a\_b. A \& B}" in lines
    assert r"\begin{tabular}{lr}" in lines
    assert r"variant & $|$$\tilde{m}$$|$ \\" in lines
    assert r"$\sigma$$|$1 & 50\% $\pm$ 2\textbackslash{} \\" in lines


def test_other_forms_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"t\.xls.*\.md or \.tex"):
        write_tables(tmp_path / "t.xls", [TABLE])


def test_a_table_wider_than_the_screen_is_split_with_its_names_in_each_part():
    table = Table("Scores", ["variant", *"abcd"], [["stochastic", *["+0.75 [-2.43, +3.93]"] * 4]], "A note.")
    console = Console(file=io.StringIO(), width=90)
    console.print(table)
    text = console.file.getvalue()
    rows = [line.count("+0.75 [-2.43, +3.93]") for line in text.splitlines() if "stochastic" in line]
    assert rows == [2, 2], "three columns would fit, but the parts are of about the same width"
    assert max(map(len, text.splitlines())) <= 90
    assert text.count("Scores") == text.count("A note.") == 1


@pytest.mark.parametrize(("value", "text"), [(0.4213, "0.421"), (12.34, "12.3"), (1234.5, "1,234"), (29_150, "29,150")])
def test_rates_of_any_size_are_written_without_an_exponent(value, text):
    assert as_rate(value) == text


def test_a_line_of_any_characters_is_printed_as_it_is():
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    say(Console(file=stream, width=20), "[bold]runs/\udcff\x1b" + " x" * 20)
    stream.seek(0)
    assert stream.read() == r"[bold]runs/\udcff\x1b" + " x" * 20 + "\n"
