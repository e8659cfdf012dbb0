"""Bad images are counted once, listed, remembered over a resume, and too many of them end the run."""

import pytest

from stop_mim.data.bad_images import BadImages
from stop_mim.errors import InputError


def test_one_is_counted_and_listed_once(tmp_path):
    file = tmp_path / "run" / "bad.txt"
    bad = BadImages("photos", 1000, file)
    assert not file.exists()
    for description in ("a.png: truncated", "b.png: empty", "a.png: truncated"):
        bad.add(description)
    assert len(bad) == 2
    assert file.read_text() == "a.png: truncated\nb.png: empty\n"


def test_one_image_is_one_line(tmp_path):
    bad = BadImages("photos", 1000, tmp_path / "bad.txt")
    bad.add("a\n.png:  broken\r\nheader")
    assert (tmp_path / "bad.txt").read_text() == "a .png: broken header\n"


def test_the_list_is_continued_on_resume(tmp_path):
    file = tmp_path / "bad.txt"
    BadImages("photos", 1000, file).add("a.png: truncated")
    resumed = BadImages("photos", 1000, file)
    assert len(resumed) == 1
    resumed.add("a.png: truncated")
    resumed.add("b.png: empty")
    assert len(resumed) == 2
    assert file.read_text() == "a.png: truncated\nb.png: empty\n"


@pytest.mark.parametrize("file_name", ["bad.txt", None])
def test_more_than_one_in_a_hundred_is_refused(tmp_path, file_name):
    file = None if file_name is None else tmp_path / file_name
    bad = BadImages("photos", 200, file)
    bad.add("a.png: truncated")
    bad.add("b.png: truncated")
    with pytest.raises(InputError, match="3 of the 200 images of 'photos' cannot be used") as error:
        bad.add("c.png: empty")
    assert "c.png: empty" in str(error.value)
    assert (str(file) in str(error.value)) == (file is not None)
    assert file is None or len(file.read_text().splitlines()) == 3


def test_too_many_stay_too_many_after_a_resume(tmp_path):
    file = tmp_path / "bad.txt"
    bad = BadImages("photos", 100, file)
    bad.add("a.png: truncated")
    with pytest.raises(InputError):
        bad.add("b.png: truncated")
    with pytest.raises(InputError, match="2 of the 100"):
        BadImages("photos", 100, file).add("a.png: truncated")
