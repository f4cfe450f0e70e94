"""Start a run, go on with one, or try one out without writing anything."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from alltokens.engine import checks
from alltokens.engine.assembly import build_net, build_step
from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.feeding import Feed, open_feed
from alltokens.engine.loading import flatten, to_mapping, to_yaml
from alltokens.engine.metrics import Scores
from alltokens.engine.optimizer import build_optimizer
from alltokens.engine.progress import Progress, closing_table, duration
from alltokens.engine.run_folder import RunFolder, load_config
from alltokens.engine.run_words import closing, enough_memory, introduction
from alltokens.engine.runtime import Runtime, network, start_runtime
from alltokens.engine.schedule import peak_rate, total_epochs
from alltokens.engine.together import same_everywhere, together
from alltokens.engine.trainer import Trainer, placed
from alltokens.errors import UserError
from alltokens.labels.manifest import MANIFEST_NAME
from alltokens.models.weights import load_weights
from alltokens.supervision.step import DENSE_WEIGHT

GO_ON = "The run goes on from its last checkpoint with: alltokens train --resume RUN, started with as many processes"
DRY_RUN_UPDATES = 3  # timed after a first one


@dataclass
class Kept:
    """What a process that trains several times keeps: decoded pictures, and steps that are compiled already.

    A run finds its step again if only its seed is another: fresh weights are written into the same tensors. Its result
    is the same as in a process of its own.
    """

    pictures: dict[object, Any] = field(default_factory=dict[object, Any])
    steps: dict[str, tuple[Runtime, nn.Module]] = field(default_factory=dict[str, tuple[Runtime, nn.Module]])


class RunResult(NamedTuple):
    run_dir: Path
    best_top1: float
    best_epoch: int
    scores: Scores | None  # of the last evaluation; None if the run was complete before
    seconds: float  # spent training
    net: nn.Module  # as trained last
    feed: Feed


def train(
    config: RunConfig,
    *,
    recipe: str = "run",
    run_dir: Path | None = None,
    weights_from: str | None = None,
    command: Sequence[str] = (),
    quiet: bool = False,
    deadline: float | None = None,
    kept: Kept | None = None,
) -> RunResult:
    """Train a recipe from the start, in a new run folder (by default runs/<recipe>-<time>).

    `deadline`, a time of time.monotonic(), stops it as a signal would. `kept` is for a process that trains several
    times, and is alone.
    """
    checks.check(config)
    if was_restarted(run_dir):
        assert run_dir is not None
        return resume(run_dir, config=config, command=command, quiet=quiet, deadline=deadline, kept=kept)
    runtime = _runtime(config, run_dir, kept)
    with together(runtime, GO_ON):
        feed, step, optimizer, generator = _prepared(config, runtime, weights_from, kept)
        folder = RunFolder(choose_folder(runtime, recipe, run_dir))
        if runtime.is_main:
            folder.create(config, recipe, command, weights_from)
        runtime.wait()
        trainer = Trainer(config, runtime, folder, feed, step, optimizer, generator)
        trainer.deadline = deadline
        return _run(config, runtime, folder, feed, trainer, quiet)


def resume(
    run_dir: Path,
    *,
    config: RunConfig | None = None,
    command: Sequence[str] = (),
    quiet: bool = False,
    deadline: float | None = None,
    kept: Kept | None = None,
) -> RunResult:
    """Go on exactly where a run stopped. `config`, if given, must say what the run's own says."""
    own = load_config(run_dir)
    refuse_changes(own, config)
    runtime, folder = _runtime(own, run_dir, kept), RunFolder(run_dir)
    with together(runtime, GO_ON):
        if runtime.is_main:
            folder.lock()
        begun = runtime.agree(folder.last_checkpoint.exists())
        feed, step, optimizer, generator = _prepared(own, runtime, None if begun else folder.weights_from(), kept)
        trainer = Trainer(own, runtime, folder, feed, step, optimizer, generator)
        trainer.deadline = deadline
        if begun:
            trainer.restore()
        elif runtime.is_main:  # stopped before its first checkpoint: from the start
            folder.cut_metrics(0)
        return _run(own, runtime, folder, feed, trainer, quiet)


def was_restarted(run_dir: Path | None) -> bool:
    """Whether torchrun --max-restarts has started this command again, and its run is there."""
    if not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        return False
    if run_dir is None:
        raise UserError("torchrun --max-restarts starts this command again: say --run-dir, to find the run again")
    return bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) and RunFolder(run_dir).config_file.exists()


def choose_folder(runtime: Runtime, recipe: str, run_dir: Path | None) -> Path:
    """Where a new run goes, by default runs/<recipe>-<time>; the same in all processes."""
    chosen = run_dir or Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(runtime.agree(str(chosen)))


def refuse_changes(own: RunConfig, config: RunConfig | None) -> None:
    """A resumed run keeps its settings."""
    if config is None or config == own:
        return
    before, now = flatten(to_mapping(own)), flatten(to_mapping(config))
    changed = [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in now if before.get(key) != now.get(key)]
    raise UserError(
        f"a resumed run keeps its settings, these differ: {'; '.join(changed)}. "
        "To train on with others, start a new run with --weights-from"
    )


def dry_run(config: RunConfig, *, weights_from: str | None = None) -> str:
    """The resolved settings, one batch's shapes, the first loss, the estimated time. Nothing is written."""
    checks.check(config)
    resolved, config = config, _with_labels_at_hand(config)
    runtime = start_runtime(config.train)
    feed = open_feed(config, runtime)
    step, optimizer, generator = prepare(config, runtime, feed, weights_from)
    batches = feed.batches(0, 0)
    step.train()
    times, first_loss, lines = [], float("nan"), []
    with contextlib.closing(feed):
        for index, batch in zip(range(DRY_RUN_UPDATES + 1), batches, strict=False):
            start = time.perf_counter()
            batch = placed(batch, config, runtime.device)
            with enough_memory(config, runtime):
                loss, parts = step(batch, generator)
                runtime.accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            value = float(loss.detach())
            times.append(time.perf_counter() - start)
            if index == 0:
                first_loss = value
                lines = [
                    f"image    {tuple(batch.image.shape)} {batch.image.dtype}",
                    f"label    {tuple(batch.label.shape)} {batch.label.dtype}",
                    f"matrix   {tuple(batch.matrix.shape)} {batch.matrix.dtype}",
                    f"logits   {tuple(parts.output.shape)} {parts.output.dtype}",
                    f"targets  {tuple(parts.targets.shape)}, partner share {float(parts.share.mean()):.3f} on average",
                ]
    per_batch = sorted(times)[len(times) // 2] if len(times) < 3 else sorted(times[1:])[len(times[1:]) // 2]
    epochs = total_epochs(config.train.epochs, config.schedule)
    seconds = per_batch * config.train.accumulate * feed.updates_per_epoch * epochs
    return "\n".join(
        [
            to_yaml(resolved),
            *introduction(config, runtime, feed, step),
            *(["label maps  not made yet: here every token has its picture's label"] if config != resolved else []),
            "",
            "one batch of this process:",
            *(f"  {line}" for line in lines),
            "",
            f"first loss      {first_loss:.4f}",
            f"estimated time  {duration(seconds)} for {epochs:g} epochs of {feed.updates_per_epoch} updates "
            f"(steps alone, without evaluation; {1000 * per_batch:.0f} ms a batch)",
            "nothing was written: no run folder, no weights",
        ]
    )


def _with_labels_at_hand(config: RunConfig) -> RunConfig:
    """The same step where label maps are yet to be made: every token is trained, on its picture's label."""
    data, chosen = config.data, config.supervision
    if data.annotator is None or (data.labels is not None and (Path(data.labels) / MANIFEST_NAME).exists()):
        return config
    weight = DENSE_WEIGHT if chosen.is_dense and chosen.dense_weight is None else chosen.dense_weight
    classes = dataclasses.replace(
        chosen, source="class", dense_weight=weight, tail="zero", axes="right", ground_truth=None
    )
    return dataclasses.replace(config, data=dataclasses.replace(data, annotator=None, labels=None), supervision=classes)


def prepare(
    config: RunConfig, runtime: Runtime, feed: Feed, weights_from: str | None
) -> tuple[nn.Module, Any, torch.Generator]:
    """Network, step and optimizer on their device, wrapped for the processes at hand; and this rank's generator."""
    net = _fresh_net(config, feed, weights_from)
    if config.train.checkpoint_activations:
        if not hasattr(net, "set_grad_checkpointing"):
            raise UserError(f"train.checkpoint_activations: {config.model.name} cannot recompute activations")
        cast(Any, net).set_grad_checkpointing(True)
    if config.train.channels_last:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    peak = peak_rate(config.optimizer, config.train.batch_size)
    optimizer = build_optimizer(net, config.optimizer, peak, runtime.device)
    step = build_step(net, config, feed.num_classes)
    step, optimizer = runtime.accelerator.prepare(step, optimizer)
    torch.manual_seed(config.train.seed + runtime.rank)  # stochastic depth differs between processes
    return step, optimizer, torch.Generator().manual_seed(config.train.seed + runtime.rank)


def _fresh_net(config: RunConfig, feed: Feed, weights_from: str | None) -> nn.Module:
    torch.manual_seed(config.train.seed)  # the fresh weights: the same in every process
    net = build_net(config, feed.num_classes)
    if weights_from is not None:
        load_weights(net, weights_from)
    return net


def _runtime(config: RunConfig, run_dir: Path | None, kept: Kept | None) -> Runtime:
    if kept is not None and (there := kept.steps.get(_step_key(config))):
        return there[0]
    return start_runtime(config.train, config.log.trackers, str(run_dir) if run_dir else None)


def _step_key(config: RunConfig) -> str:
    """The same for runs that differ in their seed alone."""
    return to_yaml(dataclasses.replace(config, about=RecipeCard(), train=dataclasses.replace(config.train, seed=0)))


def _prepared(
    config: RunConfig, runtime: Runtime, weights_from: str | None, kept: Kept | None
) -> tuple[Feed, nn.Module, Any, torch.Generator]:
    """The feed, and what `prepare` gives: made anew, or taken from what is kept."""
    feed = open_feed(config, runtime, None if kept is None else kept.pictures)
    same_everywhere(runtime, settings=to_yaml(config), pictures=feed.pictures)
    if kept is None:
        return feed, *prepare(config, runtime, feed, weights_from)
    key = _step_key(config)
    if key not in kept.steps:
        step, optimizer, generator = prepare(config, runtime, feed, weights_from)
        kept.steps[key] = (runtime, step)
        return feed, step, optimizer, generator
    assert runtime.world == 1, "several processes would share what is kept here"
    step = kept.steps[key][1]
    net = network(step)
    net.load_state_dict(_fresh_net(config, feed, weights_from).state_dict())
    peak = peak_rate(config.optimizer, config.train.batch_size)
    runtime.accelerator._optimizers.clear()  # of the run before, with its moments
    optimizer = runtime.accelerator.prepare(build_optimizer(net, config.optimizer, peak, runtime.device))
    torch.manual_seed(config.train.seed)
    return feed, step, optimizer, torch.Generator().manual_seed(config.train.seed)


def _run(
    config: RunConfig, runtime: Runtime, folder: RunFolder, feed: Feed, trainer: Trainer, quiet: bool
) -> RunResult:
    quiet = quiet or not runtime.is_main
    if config.log.trackers:
        settings = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in flatten(to_mapping(config)).items()
        }
        where = {"wandb": {"dir": str(folder.path)}}
        runtime.accelerator.init_trackers("alltokens", config=settings, init_kwargs=where)
    done_before = trainer.position.epoch >= trainer.epochs
    try:
        updates = feed.updates_per_epoch * trainer.epochs
        with (
            enough_memory(config, runtime),
            Progress(updates, done=trainer.position.update, quiet=quiet) as progress,
        ):
            for line in introduction(config, runtime, feed, trainer.step):
                progress.line(line)
            progress.line(f"run folder  {folder.path}")
            if trainer.position.update:
                progress.line(f"going on after update {trainer.position.update}")
            trainer.fit(progress)
    finally:
        feed.close()
        if runtime.is_main:
            feed.write_skipped(folder.skipped_file)
        if config.log.trackers:
            runtime.accelerator.end_training()
        folder.release()
    at = trainer.position
    if not quiet:
        closing_table(closing(config, folder, feed, trainer, done_before))
    net = network(trainer.step)
    return RunResult(folder.path, at.best_top1, at.best_epoch, trainer.last_scores, at.seconds, net, feed)
