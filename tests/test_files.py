"""Files are whole or not there, whatever happens while they are written."""

import os
import stat
from pathlib import Path

import pytest

from stop_mim.files import write_atomically


class PowerCut(BaseException):
    pass


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt, PowerCut])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("ha")
        raise failure

    with pytest.raises(failure):
        write_atomically(file, write)
    assert file.read_text() == "old"
    assert names(tmp_path) == {"a.txt"}


def test_a_failure_leaves_no_new_file(tmp_path):
    def write(temporary: Path) -> None:
        temporary.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "a.txt", write)
    assert names(tmp_path) == set()


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("n")
        assert file.read_text() == "old"
        temporary.write_text("new")
        assert file.read_text() == "old"

    write_atomically(file, write)
    assert file.read_text() == "new"
    assert names(tmp_path) == {"a.txt"}


def test_the_bytes_are_on_the_disk_before_the_file_takes_its_name(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), real_fsync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("replace"), real_replace(self, to))[1])
    write_atomically(tmp_path / "a.txt", lambda temporary: temporary.write_text("new"))
    assert events == ["fsync", "replace"]


def test_missing_folders_are_made(tmp_path):
    write_atomically(tmp_path / "a" / "b" / "c.txt", lambda temporary: temporary.write_text("new"))
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "new"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_decides_who_may_read(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a.txt", lambda temporary: temporary.write_text("new"))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode
