"""The one training loop.

Batches come from `feeding`, the loss from `Supervision`; this file does backward, step, schedule, average, evaluation,
log and checkpoint, and can stop and go on at any update.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alltokens.data.datasets import Sample
from alltokens.engine import checkpoint
from alltokens.engine.assembly import model_arguments, preprocessing
from alltokens.engine.averaging import WeightAverage
from alltokens.engine.config import RunConfig
from alltokens.engine.feeding import Feed
from alltokens.engine.metrics import Scores
from alltokens.engine.optimizer import set_learning_rate
from alltokens.engine.progress import Progress
from alltokens.engine.run_folder import RunFolder, write_atomically
from alltokens.engine.runtime import Runtime, network
from alltokens.engine.schedule import learning_rate, peak_rate, total_epochs
from alltokens.engine.signals import StopRequest
from alltokens.errors import TrainingFailed, TrainingStopped, UserError
from alltokens.evaluate.scoring import score
from alltokens.models.weights import save_weights

AGREE_EVERY = 10  # updates between two looks at the other processes' stop requests


@dataclass
class Position:
    """How far a run is; all that a checkpoint must know besides tensors."""

    epoch: int = 0
    batch: int = 0  # batches of this process done in this epoch
    update: int = 0
    best_top1: float = -1.0
    best_epoch: int = 0
    epoch_loss: float = 0.0  # summed over this epoch's updates
    seconds: float = 0.0  # spent training, over all sessions of the run


class Trainer:
    """One run in one process. `step` and `optimizer` are prepared by accelerate; `net` is the bare network."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        folder: RunFolder,
        feed: Feed,
        step: nn.Module,
        optimizer: Any,
        generator: torch.Generator,
    ) -> None:
        self.config, self.runtime, self.folder, self.feed = config, runtime, folder, feed
        self.step, self.optimizer, self.generator = step, optimizer, generator
        self.net = network(step)
        train = config.train
        self.average = (
            WeightAverage(self.net, train.ema_decay, train.ema_warmup) if train.ema_decay is not None else None
        )
        self.peak = peak_rate(config.optimizer, train.batch_size)
        self.epochs = math.ceil(total_epochs(train.epochs, config.schedule))
        self.position = Position()
        self.last_scores: Scores | None = None
        self.deadline: float | None = None  # of time.monotonic(): stop then, as if asked to by SIGALRM
        self._window: list[Tensor] = []  # losses since the last log line, on the device
        self._window_start = time.perf_counter()
        self._saved_at = time.monotonic()

    # --- the loop ---

    def fit(self, progress: Progress) -> None:
        """Train to the end, or to a stop request (TrainingStopped) or a failure (TrainingFailed)."""
        with StopRequest() as stop:
            while self.position.epoch < self.epochs:
                self._train_epoch(progress, stop)
                self._finish_epoch(progress)
        self._export("last", average=False)

    def _train_epoch(self, progress: Progress, stop: StopRequest) -> None:
        at, feed = self.position, self.feed
        self.step.train()
        self._window_start = time.perf_counter()
        for micro_batches in _grouped(feed.batches(at.epoch, at.batch), self.config.train.accumulate):
            done = at.batch // self.config.train.accumulate
            rate = learning_rate(
                at.epoch + done / feed.updates_per_epoch, self.peak, self.config.train.epochs, self.config.schedule
            )
            set_learning_rate(self.optimizer, rate)
            self._window.append(self.update(micro_batches))
            at.batch += len(micro_batches)
            at.update += 1
            if at.update % self.config.log.every_steps == 0 or done + 1 == feed.updates_per_epoch:
                self._log_window(progress, rate)
            if self._must_stop(stop):
                self._log_window(progress, rate)
                self.save(self.folder.last_checkpoint)
                raise TrainingStopped(stop.received or 15, self.folder.path)
            minutes = self.config.checkpoint.every_minutes
            if minutes is not None and self.runtime.any(time.monotonic() - self._saved_at > 60 * minutes):
                self._log_window(progress, rate)
                self.save(self.folder.last_checkpoint)

    def update(self, micro_batches: list[Sample]) -> Tensor:
        """One optimizer step on one or more batches; returns their mean loss, on the device."""
        accelerator = self.runtime.accelerator
        total = torch.zeros((), device=self.runtime.device)
        for index, batch in enumerate(micro_batches):
            last = index + 1 == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(self.step):
                loss, _ = self.step(placed(batch, self.config, self.runtime.device), self.generator)
                accelerator.backward(loss / len(micro_batches))
            total += loss.detach() / len(micro_batches)
        if self.config.optimizer.clip_norm is not None:
            accelerator.clip_grad_norm_(self.step.parameters(), self.config.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return total

    def _must_stop(self, stop: StopRequest) -> bool:
        if self.deadline is not None and time.monotonic() >= self.deadline and not stop.received:
            stop.received = signal.SIGALRM
        if self.runtime.world == 1:
            return stop.received != 0
        if self.position.update % AGREE_EVERY:
            return False
        stop.received = self.runtime.any(stop.received)
        return stop.received != 0

    def _log_window(self, progress: Progress, rate: float) -> None:
        """Read the losses since the last line (the only wait for the device), check them, write and show them."""
        if not self._window:
            return
        losses = torch.stack(self._window).tolist()
        self._window.clear()
        at = self.position
        first = at.update - len(losses) + 1
        for offset, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._exploded(f"the loss is {loss} at update {first + offset}")
        if not _are_finite(self.net.parameters()):  # before they are evaluated, exported or saved
            raise self._exploded(f"the weights are no longer finite after update {at.update}, whose loss still was,")
        now = time.perf_counter()
        seconds, self._window_start = now - self._window_start, now
        at.seconds += seconds
        at.epoch_loss += sum(losses)
        speed = len(losses) * self.config.train.batch_size / max(seconds, 1e-9)
        mean = sum(losses) / len(losses)
        best = at.best_top1 if at.best_epoch else None
        progress.step(update=at.update, epoch=at.epoch + 1, loss=mean, speed=speed, rate=rate, best=best)
        self._record(kind="train", epoch=at.epoch + 1, update=at.update, loss=mean, lr=rate, pictures_per_second=speed)

    def _exploded(self, what: str) -> TrainingFailed:
        kept = self.folder.last_checkpoint
        return TrainingFailed(
            f"{what} (epoch {self.position.epoch + 1}). "
            + (f"The last good state is kept in {kept}. " if kept.exists() else "No state was saved before. ")
            + "Lower optimizer.lr, set optimizer.clip_norm, or train in bf16 or fp32"
        )

    # --- after an epoch ---

    def _finish_epoch(self, progress: Progress) -> None:
        at = self.position
        at.epoch += 1
        at.batch = 0
        epoch_loss, at.epoch_loss = at.epoch_loss / self.feed.updates_per_epoch, 0.0
        if at.epoch % self.config.evaluation.every_epochs == 0 or at.epoch == self.epochs:
            self._evaluate(progress, epoch_loss)
        every, keep = self.config.checkpoint.every_epochs, self.config.checkpoint.keep_every
        if at.epoch % every == 0 or at.epoch == self.epochs:
            self.save(self.folder.last_checkpoint)
        if keep is not None and at.epoch % keep == 0:
            self.save(self.folder.checkpoints / f"epoch-{at.epoch:04d}.safetensors")

    def _evaluate(self, progress: Progress, train_loss: float) -> None:
        at = self.position
        scores = self._scores()
        values = {"kind": "evaluation", "epoch": at.epoch, "update": at.update, "train_loss": train_loss}
        values |= asdict_scores(scores)
        if self.average is not None:
            with self.average.applied():
                averaged = self._scores()
            values |= asdict_scores(averaged, prefix="average_")
            scores = averaged  # the average is what is kept and reported
        self.last_scores = scores
        if scores.top1 > at.best_top1:
            at.best_top1, at.best_epoch = scores.top1, at.epoch
            self._export("best", average=self.average is not None)
        self._record(**values)
        progress.evaluated(epoch=at.epoch, train_loss=train_loss, scores=scores, best=at.best_top1)

    def _scores(self) -> Scores:
        compiled = self.config.evaluation.compiled
        return score(
            self.step if compiled else getattr(self.step, "_orig_mod", self.step),
            self.feed.evaluation_batches(),
            forwards=self.feed.evaluation_forwards,
            batch_size=self.feed.evaluation_batch_size,
            image_size=self.config.data.image_size,
            device=self.runtime.device,
            channels_last=self.config.train.channels_last,
        )

    def _record(self, **values: Any) -> None:
        if self.runtime.is_main:
            self.folder.log(**values)
        if self.config.log.trackers:
            prefix = values.pop("kind")
            numbers = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self.runtime.accelerator.log(numbers, step=self.position.update)

    # --- what is kept ---

    def save(self, path: Any) -> None:
        """The whole state, so that a resumed run goes on to the bit. Every process takes part."""
        at, runtime = self.position, self.runtime
        tensors, extra = checkpoint.collect(self.step, self._bare_optimizer, self.average)
        random = runtime.everyone(checkpoint.random_state(runtime.device, self.generator))
        if runtime.is_main:
            for rank, state in enumerate(random):
                tensors |= {f"random.{rank}.{name}": value for name, value in state.items()}
            scaler = runtime.accelerator.scaler
            facts = {
                "position": asdict(at),
                "world": runtime.world,
                "metrics_size": self.folder.metrics_size(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                **extra,
            }
            checkpoint.write(path, tensors, facts)
        runtime.wait()
        self._saved_at = time.monotonic()

    def restore(self) -> None:
        """Go back to the last checkpoint of the run's folder."""
        tensors, facts = checkpoint.read(self.folder.last_checkpoint)
        if facts.get("world") != self.runtime.world:
            raise TrainingFailed(
                f"the run was made with {facts.get('world')} processes, this is {self.runtime.world}: "
                "it can only go on exactly with as many"
            )
        try:
            self._take_over(tensors, facts)
        except (UserError, TrainingFailed):
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"{self.folder.last_checkpoint} is no checkpoint of this run ({type(error).__name__}: {reason}); "
                "put another one of its checkpoints in its place, or start anew"
            ) from None

    def _take_over(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        runtime = self.runtime
        checkpoint.restore(self.step, self._bare_optimizer, self.average, tensors, facts)
        own = {
            name.rpartition(".")[2]: value
            for name, value in tensors.items()
            if name.startswith(f"random.{runtime.rank}.")
        }
        checkpoint.set_random_state(own, runtime.device, self.generator)
        if facts["scaler"] is not None and runtime.accelerator.scaler is not None:
            runtime.accelerator.scaler.load_state_dict(facts["scaler"])
        self.position = Position(**facts["position"])
        if runtime.is_main:
            self.folder.cut_metrics(facts["metrics_size"])

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer  # inside accelerate's wrapper

    def _export(self, name: str, average: bool) -> None:
        """Weights that stock timm loads, into weights/<name>. Every process takes part."""
        with self.average.applied() if average and self.average is not None else nullcontext():
            state = checkpoint.whole_weights(self.step)
        if not self.runtime.is_main:
            return
        save_weights(
            self.net,
            state,
            self.folder.weights / name,
            model_args=model_arguments(self.config),
            preprocessing=preprocessing(self.config),
            class_names=self.feed.class_names,
            write=write_atomically,
        )


def placed(batch: Sample, config: RunConfig, device: torch.device) -> Sample:
    """A batch where and as the step wants it."""
    batch = batch.to(device)
    if config.train.channels_last:
        batch = batch._replace(image=batch.image.contiguous(memory_format=torch.channels_last))
    return batch


def asdict_scores(scores: Scores, prefix: str = "") -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in scores._asdict().items()}


def _are_finite(parameters: Iterable[Tensor]) -> bool:
    own = (value.to_local() if isinstance(value, DTensor) else value for value in parameters)
    return bool(torch.stack([torch.isfinite(value.detach()).all() for value in own]).all())


def _grouped(batches: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Lists of exactly `size` batches; what is left over at the end is dropped."""
    iterator = iter(batches)
    while len(group := list(islice(iterator, size))) == size:
        yield group
