"""Bad images are counted once, listed, remembered over a resume, and too many of them end the run."""

import pytest

from stop_mim.data.bad_images import BadImages
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


@pytest.mark.parametrize("file_name", ["bad.txt", None])
def test_more_than_one_in_a_hundred_is_refused(tmp_path, file_name):
    file = None if file_name is None else tmp_path / file_name
    bad = BadImages("photos", 200, file)
    bad.add("a.png: truncated")
    bad.add("b.png: truncated")
    with pytest.raises(InputError, match=r"3 of the 200 images of 'photos' .*c\.png: empty") as error:
        bad.add("c.png: empty")
    assert (str(file) in str(error.value)) == (file is not None)
    if file is not None:
        # Too many stay too many after a resume.
        with pytest.raises(InputError, match="3 of the 200"):
            BadImages("photos", 200, file).add("a.png: truncated")
