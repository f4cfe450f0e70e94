"""The line that says how far a pass over pictures is."""

import io

from rich.console import Console

from alltokens.engine.picture_progress import Pace, PictureProgress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def said(terminal, lines=True, quiet=False):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    with PictureProgress("annotating", quiet=quiet, lines=lines, console=console, clock=clock) as progress:
        for done in (1000, 1040, 1240, 1300):  # 1,000 were done before
            progress(done, 2000)
            clock.now += 8
        if progress._live is not None:
            progress._live.refresh()  # as the terminal would, now and then
    return out.getvalue()


def test_a_pipe_gets_a_line_now_and_then_and_speed_counts_what_was_done_here():
    lines = said(terminal=False).splitlines()
    assert lines == ["annotating  1,240 of 2,000 pictures  15.0 pictures/s  0:51 left"]


def test_a_terminal_gets_a_live_line():
    shown = said(terminal=True)
    assert "annotating" in shown
    assert "1,300 of 2,000 pictures  12.5 pictures/s  0:56 left" in shown


def test_nothing_is_said_where_nothing_is_wanted():
    assert said(terminal=False, lines=False) == ""
    assert said(terminal=True, quiet=True) == ""


def test_an_end_that_is_not_known_is_not_guessed():
    out, clock = io.StringIO(), Clock()
    progress = PictureProgress("reading", console=Console(file=out, width=100), clock=clock)
    for done in (10, 10_010):
        clock.now += 20
        progress(done, None)
    assert out.getvalue().splitlines() == ["reading  10 pictures", "reading  10,010 pictures  500 pictures/s"]


def test_the_start_is_no_part_of_the_pace_nor_is_what_was_done_before():
    clock = Clock()
    pace = Pace(clock)
    for seconds, done in ((30, 1064), (2, 1128), (2, 1192)):  # 1,000 before
        clock.now += seconds
        pace(done)
    clock.now += 4  # the index is written
    pace.end()
    assert (pace.seconds, pace.to_first, pace.after) == (38, 30, 128 / 8)
    few = Pace(clock)
    clock.now += 3
    few(64)
    few.end()
    assert (few.to_first, few.after) == (3, None)
    assert (Pace(clock).to_first, Pace(clock).after) == (None, None)
