"""What a user did that cannot work. Every message says what came, what is allowed, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An error that the user can mend; the command line prints its message alone and exits with code 2."""


class UnsupportedModel(UserError):
    """A model that a follower or a mixer cannot work with; the message lists those it can."""


class TrainingFailed(RuntimeError):
    """A run that had to stop (loss not finite, out of memory); the command line prints the message and exits with 1."""


class Stopped(Exception):
    """Work that was asked to stop by a signal and can be gone on with; the command line exits with 128 + signal."""

    def __init__(self, signal: int, go_on: str) -> None:
        super().__init__(f"stopped by signal {signal}; go on with: {go_on}")
        self.signal = signal


class TrainingStopped(Stopped):
    """A run that was asked to stop by a signal, after it saved its state."""

    def __init__(self, signal: int, run_dir: object) -> None:
        super().__init__(signal, f"alltokens train --resume {run_dir}")


def printable(text: str) -> str:
    """The text with control signs spelled out: a file's name must not clear a terminal, or write to it."""
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)


def unknown(kind: str, came: object, allowed: Iterable[str], hint: str = "") -> UserError:
    """The error for a name that is not among the allowed ones, with the nearest match."""
    names = sorted(allowed)
    begun = sorted((name for name in names if str(came) and name.startswith(str(came))), key=len)
    near = [*dict.fromkeys([*begun, *difflib.get_close_matches(str(came), names, n=8, cutoff=0.5)])]
    guess = f" Did you mean {near[0]!r}?" if near else ""
    if len(names) <= 40:
        allowed_ones = f"Allowed: {', '.join(names)}."
    else:
        allowed_ones = f"{len(names)} are allowed{', such as ' if near else ''}{', '.join(near[:8])}."
    return UserError(f"unknown {kind} {came!r}.{guess} {allowed_ones}{' ' + hint if hint else ''}")
