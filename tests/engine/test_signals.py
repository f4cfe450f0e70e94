"""What a signal to one process means to those that it started."""

import multiprocessing
import os
import signal
import time

import pytest

from alltokens.engine.signals import end_with_parent, stopping
from alltokens.errors import Stopped

processes = multiprocessing.get_context("fork")  # quick; these do nothing that a fork may not


def child(told):
    end_with_parent()
    told.send(os.getpid())
    time.sleep(40)


def parent(told):
    processes.Process(target=child, args=(told,)).start()
    time.sleep(40)


def test_a_child_ends_when_its_parent_is_killed():
    mine, its = processes.Pipe(duplex=False)
    process = processes.Process(target=parent, args=(its,))
    process.start()
    its.close()
    mine.recv()
    os.kill(process.pid, signal.SIGKILL)
    assert mine.poll(30), "the child holds the other end open"
    with pytest.raises(EOFError):
        mine.recv()
    process.join()


def test_a_request_to_end_is_an_error_where_there_is_something_to_clear_up():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="go on with: that") as stopped, stopping("that"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert stopped.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
