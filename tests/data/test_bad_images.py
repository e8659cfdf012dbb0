"""Bad images are counted once, listed, remembered over a resume, and too many of them end the run."""

import pytest

from stop_mim.data.image_source import SHOWN_ONE_BY_ONE, BadImages, skipped
from stop_mim.errors import InputError


def test_one_is_counted_and_listed_once_also_after_a_resume(tmp_path):
    file = tmp_path / "run" / "bad.txt"
    bad = BadImages("photos", 1000, file)
    assert not file.exists()
    for description in ("a.png: truncated", "b\n.png:  broken\r\nheader", "a.png: truncated"):
        bad.add(description)
    resumed = BadImages("photos", 1000, file)
    for description in ("a.png: truncated", "c.png: empty"):
        resumed.add(description)
    assert (len(bad), len(resumed)) == (2, 3)
    assert file.read_text() == "a.png: truncated\nb .png: broken header\nc.png: empty\n"


def test_control_characters_of_a_name_reach_neither_the_list_nor_the_screen(tmp_path):
    shown = []
    bad = BadImages("photos", 1000, tmp_path / "bad.txt", show=shown.append)
    bad.add("\x1b[2Ja\x07.png: truncated")
    assert (tmp_path / "bad.txt").read_text() == "\\x1b[2Ja\\x07.png: truncated\n"
    assert "\x1b" not in shown[0]


def test_more_than_one_in_a_hundred_is_refused(tmp_path):
    file = tmp_path / "bad.txt"
    for bad in (BadImages("photos", 200), BadImages("photos", 200, file)):
        bad.add("a.png: truncated")
        bad.add("b.png: truncated")
        with pytest.raises(InputError, match=r"3 of the 200 images of 'photos' .*c\.png: empty") as error:
            bad.add("c.png: empty")
    assert str(file) in str(error.value)
    # Only training has an option that allows more.
    assert "--max-bad" not in str(error.value)
    # Too many stay too many after a resume.
    with pytest.raises(InputError, match="3 of the 200"):
        BadImages("photos", 200, file).add("a.png: truncated")


def test_more_are_allowed_on_request_and_the_first_ones_are_shown():
    shown = []
    bad = BadImages("photos", 20, max_fraction=0.5, show=shown.append)
    for number in range(10):
        bad.add(f"{number}.png: truncated")
    assert len(shown) == SHOWN_ONE_BY_ONE
    assert shown[0].endswith("0.png: truncated")
    assert "more are not shown" in shown[-1]
    with pytest.raises(InputError, match=r"11 of the 20 .* more than 50% .* --max-bad 56%"):
        bad.add("10.png: truncated")


def test_what_was_skipped_is_told_in_a_few_words():
    assert skipped(1, {".txt": 1200, "": 1}) == "1 unreadable; ignored: 1,200 .txt, 1 without extension"
    assert skipped(0, {".txt": 1, ".heic": 2}) == "ignored: 2 .heic, 1 .txt; convert .heic files to JPEG to use them"
    assert skipped(3, {}) == "3 unreadable"
    assert skipped(0, {}) == ""
