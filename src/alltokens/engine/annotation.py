"""An annotation as the command runs it: its processes, signals, what is shown meanwhile, and the summary at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from alltokens.data.picture_source import PictureSource
from alltokens.engine.annotators import OpenedAnnotator, open_annotator
from alltokens.engine.loading import read_yaml
from alltokens.engine.picture_progress import Pace, PictureProgress
from alltokens.engine.runtime import join_slurm
from alltokens.engine.signals import StopRequest
from alltokens.errors import Stopped, UserError, unknown
from alltokens.labels.annotate import annotate
from alltokens.labels.given import labels_in, open_folder
from alltokens.labels.inspect import Summary, summarise
from alltokens.labels.manifest import MANIFEST_NAME, UNFINISHED_NAME
from alltokens.labels.processes import processes
from alltokens.labels.sink import read_failures
from alltokens.labels.store import LabelStore

# Processes meet at the beginning and at the end only; one may have hours of work left when another is done.
LONGEST_WAIT = timedelta(days=30)


Begun = Literal["fresh", "earlier", "finished"]  # what there was of the store when this call came


class Annotation(NamedTuple):
    """What came of it."""

    store: LabelStore
    summary: Summary
    failed: dict[str, str]  # pictures without a map, and why
    begun: Begun
    pace: Pace  # from building the annotator to the finished store
    processes: int


def run_annotation(
    model: str,
    data: str,
    out: str,
    *,
    split: str | None = None,
    weights: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    class_map: str | None = None,
    image_size: int | None = None,
    device: str = "auto",
    command: str = "the same command",
    **options: Any,
) -> Annotation | None:
    """`annotate` with an annotator by name, among however many processes were started; None in all but the main one.

    `class_map` is auto, own, or a YAML file. `options` go to `annotate`; `command` is what to say for going on.
    """
    mapped = _read_class_map(class_map)
    with joined() as rank:
        pace = Pace()
        opened = open_annotator(model, weights=weights, options=model_options, image_size=image_size)
        source = open_folder(data, split, mapped)
        begun = _begun(Path(out).expanduser())
        store = annotate_source(
            opened,
            source,
            out,
            device=_device(device),
            command=command,
            quiet=rank > 0,
            pace=pace,
            class_map=mapped,
            image_size=image_size,
            annotator=model,
            **options,
        )
        pace.end()
        world = processes()[1]
    if rank > 0:
        return None
    with PictureProgress("summing up") as progress:
        summary = summarise(store, own_labels(store, source), progress=progress)
    return Annotation(store, summary, read_failures(store.path), begun, pace, world)


def annotate_source(
    opened: OpenedAnnotator,
    source: PictureSource,
    out: str | Path,
    *,
    device: torch.device,
    command: str,
    quiet: bool = False,
    pace: Pace | None = None,
    annotator: str,
    **options: Any,
) -> LabelStore:
    """`annotate` with what a person sees of it; a signal ends it, and `command` goes on."""
    pace = pace or Pace()
    with StopRequest() as stop, PictureProgress("annotating", quiet=quiet) as progress:

        def step(done: int, total: int | None) -> None:
            if stop.received:
                raise Stopped(stop.received, command)
            if pace.to_first is None and device.type == "cuda":
                torch.cuda.synchronize(device)  # labels were asked for, and are there only now
            pace(done)
            progress(done, total)

        if not quiet:
            where = f"{len(source):,} pictures of {source.location}"
            print(f"annotating {where} with {annotator} on {device}", file=sys.stderr)
        try:
            return annotate(
                opened.model.to(device),
                source,
                out,
                preprocessing=opened.preprocessing,
                annotator=annotator,
                annotator_classes=opened.class_names or None,
                progress=step,
                **options,
            )
        except RuntimeError as error:
            if stop.received:  # which also ends loader processes, and other processes' connections
                raise Stopped(stop.received, command) from None
            if dist.is_initialized() and "gloo" in str(error).lower():
                raise UserError(
                    "another process of this annotation has ended, its message says why; whole shards are kept"
                ) from None
            raise


def own_labels(store: LabelStore, source: PictureSource) -> dict[str, int] | None:
    """The pictures' labels in the store's classes, by key; None where they cannot be told."""
    try:
        return labels_in(store, source)
    except UserError:
        return None


@contextmanager
def joined() -> Iterator[int]:
    """This process's rank among those that a launcher started. They meet over the CPU, whatever the device is.

    What is wrong in all of them alike is said by the first that finds it; the others leave with the same exit code.
    """
    join_slurm(os.environ)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    meeting, rank, world = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=LONGEST_WAIT)
    try:
        yield rank
    except UserError as error:
        if meeting.add(f"alltokens annotate: {error}", 1) > 1:
            raise SystemExit(2) from None
        raise
    except Stopped as stopped:
        if rank > 0:
            raise SystemExit(128 + stopped.signal) from None
        raise
    finally:
        dist.destroy_process_group()


def _begun(out: Path) -> Begun:
    if (out / MANIFEST_NAME).exists():
        return "finished"
    return "earlier" if (out / UNFINISHED_NAME).exists() else "fresh"


def _read_class_map(wanted: str | None) -> str | dict[str, Any] | None:
    if wanted is None or wanted in ("auto", "own"):
        return wanted
    if not Path(wanted).is_file():
        raise unknown("class map", wanted, ("auto", "own"), hint="Or a YAML file: class: number or name in each line.")
    return read_yaml(Path(wanted))


def _device(wanted: str) -> torch.device:
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError("this machine has no CUDA device that torch can use; `alltokens doctor` says more")
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
