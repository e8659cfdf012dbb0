"""Signals become a wish to stop, for the time of the context alone."""

import os
import signal
import threading

import pytest

from stop_mim.training.interruption import catch_interruption


@pytest.fixture(autouse=True)
def _handlers_are_put_back():
    # A shell starts its background jobs with Ctrl-C ignored, and the tests may be one of them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_nothing_else_happens(number):
    with catch_interruption() as interruption:
        assert not interruption
        assert interruption.signal_name is None
        os.kill(os.getpid(), number)
        assert interruption
        assert interruption.signal_name == number.name


def test_without_a_signal_there_is_no_interruption():
    with catch_interruption() as interruption:
        pass
    assert not interruption


def test_a_second_ctrl_c_ends_as_usual():
    with catch_interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_after_an_error():
    with pytest.raises(RuntimeError), catch_interruption():
        raise RuntimeError


def test_one_interruption_does_not_tell_of_the_next():
    with catch_interruption():
        os.kill(os.getpid(), signal.SIGTERM)
    with catch_interruption() as second:
        assert not second
        os.kill(os.getpid(), signal.SIGTERM)
        assert second


def test_other_threads_can_train_though_they_cannot_catch_signals():
    seen = []

    def work():
        with catch_interruption() as interruption:
            seen.append(bool(interruption))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
