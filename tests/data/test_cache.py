"""The disk cache: a file is written once, by whichever process comes first, and is complete if it exists."""

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from written_images import one_sentence

from stop_mim.data.cache import CacheError, cached_file, damage_named, gib_from
from stop_mim.errors import InputError

NAME = "texts/hello.txt"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "texts"


def hello(draft):
    draft.write_text("hello")


def cut_off(draft):
    draft.write_text("hel")
    raise RuntimeError("cut off")


def never(draft):
    pytest.fail("written again")


def test_a_file_is_written_once(folder):
    assert cached_file(NAME, hello) == cached_file(NAME, never) == folder / "hello.txt"
    assert (folder / "hello.txt").read_text() == "hello"
    assert [path.name for path in folder.iterdir()] == ["hello.txt"]


def test_a_write_that_fails_leaves_nothing_and_the_next_one_tidies_up_after_a_killed_one(folder):
    with pytest.raises(RuntimeError, match="cut off"):
        cached_file(NAME, cut_off)
    assert list(folder.iterdir()) == []
    (folder / ".hello.txt.abcd1234").mkdir()
    (folder / ".hello.txt.abcd1234" / "hello.txt").write_text("hel")
    assert cached_file(NAME, hello).read_text() == "hello"
    assert [path.name for path in folder.iterdir()] == ["hello.txt"]


def test_of_processes_that_begin_at_once_one_writes(folder):
    context = multiprocessing.get_context("fork")
    barrier, writers, found = context.Barrier(3), context.Queue(), context.Queue()

    def write(draft):
        writers.put("one")
        hello(draft)

    def work():
        barrier.wait()
        found.put(cached_file(NAME, write).read_text())

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == ["hello"] * 3
    for process in processes:
        process.join()
    assert (writers.get(), writers.empty()) == ("one", True)
    assert [path.name for path in folder.iterdir()] == ["hello.txt"]


def test_of_threads_that_begin_at_once_one_writes(folder):
    barrier, writers = threading.Barrier(3), []

    def write(draft):
        writers.append("one")
        time.sleep(0.05)
        hello(draft)

    def work(_):
        barrier.wait()
        return cached_file(NAME, write).read_text()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == ["hello"] * 3
    assert writers == ["one"]


def test_a_folder_that_cannot_be_written_is_named(folder):
    folder.parent.mkdir()
    folder.write_text("a file where the folder would be")
    with pytest.raises(CacheError, match=f"{folder} cannot be written .*set STOP_MIM_CACHE") as error:
        cached_file(NAME, hello)
    one_sentence(error)


def test_a_file_that_cannot_be_read_is_named(folder):
    path = cached_file(NAME, hello)
    with pytest.raises(InputError, match=f"{path} cannot be read .*delete it") as error, damage_named(path):
        int(path.read_text())
    one_sentence(error)


@pytest.mark.parametrize("wrong", ["much", "-1", "nan"])
def test_a_limit_is_a_number_of_gib(monkeypatch, wrong):
    monkeypatch.setenv("STOP_MIM_TEXTS_GIB", wrong)
    with pytest.raises(InputError, match=f"STOP_MIM_TEXTS_GIB is '{wrong}'"):
        gib_from("STOP_MIM_TEXTS_GIB", 4)
    monkeypatch.setenv("STOP_MIM_TEXTS_GIB", "0.5")
    assert gib_from("STOP_MIM_TEXTS_GIB", 4) == 2**29
    monkeypatch.delenv("STOP_MIM_TEXTS_GIB")
    assert gib_from("STOP_MIM_TEXTS_GIB", 4) == 2**32
