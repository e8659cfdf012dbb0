"""Signals that ask a process to stop: noted, so that the process can save before it ends."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# Terminals send SIGHUP when they close; clusters can send SIGUSR1 or SIGUSR2 before the time limit.
ALWAYS, UNLESS_HANDLED = (signal.SIGTERM, signal.SIGINT), (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interruption:
    """Whether, and by which signal, the process was asked to stop."""

    signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def catch_interruption(answer: str = "") -> Iterator[Interruption]:
    """Note the first signal that asks to stop, instead of ending the process; a second one ends it as usual.

    SIGTERM and Ctrl-C always; SIGHUP, SIGUSR1 and SIGUSR2 unless they are ignored, as under nohup, or have a handler.
    `answer` is written to standard error at once when Ctrl-C is pressed.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    unhandled = [number for number in UNLESS_HANDLED if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.getsignal(number) for number in (*ALWAYS, *unhandled)}

    def note(number: int, frame: FrameType | None) -> None:
        interruption.signal_name = signal.Signals(number).name
        if answer and number == signal.SIGINT:
            # Not with print: what the signal interrupts may be printing.
            with suppress(OSError):
                os.write(2, f"\n{answer}\n".encode())
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
