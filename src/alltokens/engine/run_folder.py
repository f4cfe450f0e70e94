"""The folder of a run: all that is needed to rebuild it, written before step 0.

config.yaml      every setting, resolved           checkpoints/last.safetensors   the state to go on from
run.json         command, versions, git, seed      weights/{best,last}/           what stock timm loads
metrics.jsonl    one line per interval and epoch   skipped.txt                    pictures that could not be read
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from alltokens.engine.config import RunConfig
from alltokens.engine.loading import build, read_yaml, to_yaml
from alltokens.errors import TrainingFailed, UserError
from alltokens.version import __version__


class RunFolder:
    """Paths of a run and the few files that grow while it runs. Only the main process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.facts_file = path / "run.json"
        self.metrics_file = path / "metrics.jsonl"
        self.skipped_file = path / "skipped.txt"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self._lock: IO[str] | None = None

    @property
    def last_checkpoint(self) -> Path:
        return self.checkpoints / "last.safetensors"

    def lock(self) -> None:
        """Refuse a second process on this folder. The lock goes with the process, however it ends.

        A record lock, not flock: loader workers, which are forked, must not inherit it and outlive us with it.
        """
        with writing(self.path / ".lock"):
            self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise UserError(
                f"{self.path} is in use by another process; wait until that one has ended, or end it"
            ) from None
        for left in (*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp"), *self.path.glob("weights/*/.*.tmp")):
            with suppress(OSError):  # what a killed process was writing when it ended
                left.unlink()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def create(self, config: RunConfig, recipe: str, command: Sequence[str], weights_from: str | None = None) -> None:
        if self.config_file.exists():
            raise UserError(
                f"{self.path} already holds a run. Go on with it: alltokens train --resume {self.path}; "
                "or choose another --run-dir"
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.weights.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.path}: {error.strerror}") from None
        self.lock()
        facts = run_facts(config, recipe, command)
        facts["weights_from"] = None if weights_from is None else str(Path(weights_from).resolve())
        write_atomically(self.facts_file, json.dumps(facts, indent=2) + "\n")
        write_atomically(self.config_file, to_yaml(config))  # the last: with it the folder holds a run

    def weights_from(self) -> str | None:
        """The weights that the run began with, for one that was stopped before its first checkpoint."""
        try:
            return json.loads(self.facts_file.read_text(encoding="utf-8")).get("weights_from")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{self.facts_file} cannot be read: {error}") from None

    def log(self, **values: Any) -> None:
        """One line of metrics.jsonl; JSON has no infinity or NaN, so those become null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with writing(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")

    def metrics_size(self) -> int:
        return self.metrics_file.stat().st_size if self.metrics_file.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Forget the lines written after the checkpoint that a resumed run starts from."""
        if self.metrics_size() > size:
            with writing(self.metrics_file):
                os.truncate(self.metrics_file, size)


def load_config(run_dir: Path) -> RunConfig:
    """The settings that a run folder was made with."""
    file = RunFolder(run_dir).config_file
    if not run_dir.is_dir() or not file.exists():
        near = (
            sorted(str(p.parent) for p in run_dir.parent.glob("*/config.yaml"))[-3:] if run_dir.parent.is_dir() else []
        )
        beside = f" Runs beside it: {', '.join(near)}." if near else ""
        raise UserError(f"{run_dir} is not a run folder: it has no config.yaml.{beside}")
    return build(RunConfig, read_yaml(file), str(file))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. One that a kill cut off at the end is no line yet; any other damage is an error."""
    file = RunFolder(run_dir).metrics_file
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{file} is damaged: a line of it is no JSON ({error})") from None


def run_facts(config: RunConfig, recipe: str, command: Sequence[str]) -> dict[str, Any]:
    import torch

    packages = ("torch", "torchvision", "timm", "accelerate", "numpy", "pillow")
    return {
        "recipe": recipe,
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.train.seed,
        "versions": {"alltokens": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in packages},
        "git": git_state(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "platform": platform.platform(),
        "python": sys.executable,
    }


def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the folder the command runs in, if it is a git checkout."""
    if shutil.which("git") is None:
        return None

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(git("status", "--porcelain"))}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write aside, flush to the disk, rename: whoever reads `path` sees the old content or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        # Not the parents too: where a run's folder was removed, none may grow anew.
        path.parent.mkdir(exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            _flush_folder(path.parent)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that is full, a permission that was lost, a folder that is gone: one sentence, and the run has failed."""
    try:
        yield
    except OSError as error:
        gone = "" if path.parent.exists() else "; its folder is gone"
        raise TrainingFailed(
            f"cannot write {path}: {error.strerror or error}{gone}. What was written before is whole; once it can be "
            "written again, go on with: alltokens train --resume RUN"
        ) from None


def _flush_folder(folder: Path) -> None:
    """The rename itself must be on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
