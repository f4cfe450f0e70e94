"""The command line: one file per verb, no logic. A new verb is one line here and one file with `main(words) -> int`.

Files whose names begin with an underscore are shared by the verbs.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from alltokens.errors import Stopped, TrainingFailed, UserError, printable
from alltokens.version import __version__

# Verb -> what it does. The file of the same name is imported when the verb is used.
VERBS = {
    "train": "train a model by a recipe, or go on with a run",
    "evaluate": "top-1, top-5 and loss of a run or a model",
    "annotate": "make a label map for every picture with an annotator",
    "report": "one HTML page of what became of runs",
    "explain": "where a model looks, and what becomes of a mix in it",
    "labels": "look into label maps, verify, import and export them",
    "recipes": "list the packaged recipes, show or copy one",
    "models": "list models with their cost",
    "bench": "measure what we say about speed, on this machine",
    "study": "train arms times seeds, and compare them",
    "doctor": "what this machine has, and what is missing",
}

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name, or a terminal, may know other letters than we do
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(words)
    except UserError as error:
        return _fail(str(error), 2)
    except TrainingFailed as error:
        return _fail(str(error), 1)
    except Stopped as error:
        return _fail(str(error), 128 + error.signal)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # `alltokens models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    verb, rest = words[0], words[1:]
    if verb in ("--version", "-V"):
        print(f"alltokens {__version__}")
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        kind = "option" if verb.startswith("-") else "verb"
        raise UserError(f"unknown {kind} {verb!r}.{guess} Allowed: {', '.join(VERBS)}; alltokens --help explains them.")
    return importlib.import_module(f"alltokens.cli.{verb}").main(rest)


def overview() -> str:
    verbs = "\n".join(f"  {verb:<10}{summary}" for verb, summary in VERBS.items())
    return (
        "usage: alltokens VERB ...\n\n"
        "Train vision transformers with a true label for every token.\n\n"
        f"{verbs}\n\n"
        "alltokens VERB --help says more; alltokens --version; a first run: alltokens train quickstart"
    )


def _fail(message: str, code: int) -> int:
    print(f"alltokens: {printable(message)}", file=sys.stderr)
    return code
