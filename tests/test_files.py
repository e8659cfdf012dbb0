"""Files are whole or not there, whatever happens while they are written."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError

from stop_mim.errors import InputError
from stop_mim.files import locked, remove_temporaries, require_writable, write_atomically


class PowerCut(BaseException):
    pass


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("failure", [OSError, PowerCut])
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


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("n")
        assert file.read_text() == "old"
        temporary.write_text("new")
        assert file.read_text() == "old"

    require_writable("The file", file)
    write_atomically(file, write)
    assert file.read_text() == "new"
    assert names(tmp_path) == {"a.txt"}


def test_the_bytes_are_on_the_disk_before_the_file_takes_its_name_and_then_the_name(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), real_fsync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("replace"), real_replace(self, to))[1])
    write_atomically(tmp_path / "a.txt", lambda temporary: temporary.write_text("new"))
    # The last one is of the folder, which holds the name.
    assert events == ["fsync", "replace", "fsync"]


def test_a_full_disk_is_an_oserror_where_safetensors_writes(tmp_path):
    def fail(temporary):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left on device") as found:
        write_atomically(tmp_path / "exported", fail)
    assert found.value.filename == str(tmp_path / "exported")
    assert names(tmp_path) == set()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_decides_who_may_read(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a.txt", lambda temporary: temporary.write_text("new"))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode


def test_what_a_link_points_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "a.txt"
    link.symlink_to(tmp_path / "elsewhere" / "b.txt")
    write_atomically(link, lambda temporary: temporary.write_text("new"))
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "b.txt").read_text() == "new"
    assert names(tmp_path / "elsewhere") == {"b.txt"}


def test_a_pipe_is_refused_and_left_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(pipe, lambda temporary: temporary.write_text("new"))
    with pytest.raises(InputError, match=r"The list cannot be written: it is not a regular file; give a file"):
        require_writable("The list", pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == {"pipe"}


def test_what_a_killed_process_left_behind_is_removed(tmp_path):
    kept = ("a.txt", ".a.txt", ".b.txt.a1b2c3d4")
    for name in (*kept, ".a.txt.a1b2c3d4", ".step-7.x.a1b2c3d4"):
        (tmp_path / name).write_text("")
    remove_temporaries(tmp_path, ["a.txt", "step-*"])
    assert names(tmp_path) == set(kept)


def hold(lock, held, release):
    with locked(lock):
        held.set()
        release.wait(30)


def test_a_lock_has_one_holder_and_is_waited_for_where_asked(tmp_path):
    lock, context = tmp_path / ".lock", multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(lock, held, release))
    other.start()
    assert held.wait(30)
    with locked(lock) as is_ours:
        assert not is_ours
    assert lock.exists()
    release.set()
    with locked(lock, wait=True) as is_ours:
        assert is_ours
    other.join()
    assert names(tmp_path) == set()
