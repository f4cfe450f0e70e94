import io

import pytest
from rich.console import Console

from alltokens.engine.metrics import Scores
from alltokens.engine.progress import Progress, closing_table, duration, output_console, table


class Clock:
    """Time as the test wants it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def plain():
    return output_console(io.StringIO())


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, legacy_windows=False)


def test_a_pipe_gets_one_plain_line_per_interval():
    console, clock = plain(), Clock()
    with Progress(100, done=20, console=console, clock=clock) as progress:
        clock.now += 30.0
        progress.step(update=40, epoch=2, loss=1.25, speed=1234.4, rate=5e-4, best=0.0)
        clock.now += 30.0
        progress.step(update=60, epoch=3, loss=1.0, speed=1000.0, rate=4e-4, best=61.5)
    assert console.file.getvalue().splitlines() == [
        "epoch 2  update 40/100  rate 5.00e-04  loss 1.2500  1,234 pictures/s  1:30 left",
        "epoch 3  update 60/100  rate 4.00e-04  loss 1.0000  best 61.50 %  1,000 pictures/s  1:00 left",
    ]


def test_a_terminal_gets_a_live_line_and_lines_above_it():
    console, clock = terminal(), Clock()
    with Progress(10, console=console, clock=clock) as progress:
        clock.now += 5.0
        progress.step(update=5, epoch=1, loss=2.0, speed=640.0, rate=1e-3, best=50.0)
        progress.line("a [note] that stays")
    written = console.file.getvalue()
    assert "\x1b[2K" in written, "the live line is drawn over"
    for piece in ("epoch 1", "loss 2.0000", "best 50.00 %", "640 pictures/s", "0:05 left", "a [note] that stays"):
        assert piece in written
    assert written.endswith("\x1b[2K"), "nothing of the live line stays"


def test_an_evaluation_has_a_line_of_its_own():
    console = plain()
    with Progress(10, console=console) as progress:
        progress.evaluated(epoch=4, train_loss=1.5, scores=Scores(70.0, 95.5, 0.875, 1000), best=71.25)
    assert (
        console.file.getvalue()
        == "epoch 4  top-1 70.00 %  top-5 95.50 %  loss 0.8750  (training 1.5000)  best 71.25 %\n"
    )


@pytest.mark.parametrize("console", [plain(), terminal()])
def test_quiet_says_nothing(console):
    with Progress(10, quiet=True, console=console) as progress:
        progress.step(update=5, epoch=1, loss=2.0, speed=640.0, rate=1e-3)
        progress.line("unheard")
        progress.evaluated(epoch=1, train_loss=1.0, scores=Scores(1.0, 2.0, 3.0, 4), best=1.0)
    assert console.file.getvalue() == ""


def test_an_error_ends_the_live_line():
    console = terminal()
    with pytest.raises(KeyError), Progress(10, console=console):
        raise KeyError
    assert console.file.getvalue().count("\x1b[?25h") == 1, "the cursor is back"


def test_time_left_counts_from_where_this_process_began():
    clock = Clock()
    progress = Progress(110, done=10, clock=clock, quiet=True)
    assert progress.seconds_left(10) is None
    clock.now += 20.0
    assert progress.seconds_left(60) == pytest.approx(20.0)
    assert progress.seconds_left(110) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "0:07"), (59.7, "1:00"), (3723, "1:02:03"), (2 * 86400 + 3 * 3600 + 4, "2 d 03:00:04")]
)
def test_durations_are_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_the_closing_table_is_aligned_and_plain_in_a_pipe():
    console = plain()
    closing_table(
        [("best top-1", "61.50 % (epoch 3)"), ("run folder", "runs/[x]"), ("long", "y" * 300)], console=console
    )
    assert console.file.getvalue().splitlines() == [
        "best top-1  61.50 % (epoch 3)",
        "run folder  runs/[x]",
        "long        " + "y" * 300,
    ]


def test_a_table_has_headers_and_numbers_to_the_right():
    console = plain()
    table(("model", "M"), [("a", "5.7"), ("bb", "22.1")], numbers=(1,), console=console)
    assert console.file.getvalue().splitlines() == ["model     M", "a       5.7", "bb     22.1"]


TOP = ["arm        n  top-1 %  interval", "area      20    61.50  -1 to +1", "tl_align   5    62.25"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (44, [TOP[0] + "  about", TOP[1] + "  short", TOP[2] + "            a few words"]),
        (32, [*TOP, "", "arm       about", "area      short", "tl_align  a few words"]),
        (21, ["arm        n  top-1 %", "area      20    61.50", "tl_align   5    62.25", "",
              "arm       interval", "area      -1 to +1", "tl_align", "",
              "arm       about", "area      short", "tl_align  a few words"]),
    ],
)  # fmt: skip
def test_what_a_narrow_terminal_has_no_room_for_follows_below(width, lines):
    console = terminal()
    console.width = width
    rows = [("area", "20", "61.50", "-1 to +1", "short"), ("tl_align", "5", "62.25", "", "a few words")]
    table(("arm", "n", "top-1 %", "interval", "about"), rows, numbers=(1, 2, 3), console=console)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == lines


def test_a_column_without_a_header_stays_with_the_one_before_it():
    console = terminal()
    console.width = 20
    table(("arm", "ms", "", "ratio"), [("a", "1.5", "(1 to 2)", "0.9")], numbers=(1, 3), console=console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["arm   ms", "a    1.5  (1 to 2)", "", "arm  ratio", "a      0.9"]
