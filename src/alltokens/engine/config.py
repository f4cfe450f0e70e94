"""Every setting of a run. The same words stand in YAML, on the command line (`--train.epochs 50`) and in Python.

A batch is counted over all processes: a recipe means the same on one GPU and on eight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MixerName = Literal["none", "mixup", "cutmix", "mixup+cutmix", "random", "block", "mixtoken"]
SourceName = Literal["class", "relabel", "tokens"]
FollowerName = Literal["area", "transmix", "tl_align"]


@dataclass(frozen=True)
class RecipeCard:
    """What a recipe promises. Every packaged recipe fills this in."""

    summary: str = ""
    """One line: what this trains."""
    command: str = ""
    """The command that runs it as measured."""
    hardware: str = ""
    """Where it was measured, or what it was published for."""
    time: str = ""
    """How long it takes there."""
    expected: str = ""
    """The result, with n and spread, or the published number."""
    source: str = ""
    """The paper and table, or the file, that the numbers come from."""


@dataclass(frozen=True)
class ModelConfig:
    name: str = "deit_tiny_patch16_224"
    """Any timm model (`alltokens models`)."""
    pretrained: bool = False
    """Start from timm's pretrained weights (they are downloaded)."""
    drop_path: float = 0.0
    """Stochastic depth: the rate of the last block, rising linearly from 0."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keyword arguments of timm.create_model, as YAML: '{embed_dim: 192, depth: 12}'."""


@dataclass(frozen=True)
class DataConfig:
    root: str | None = None
    """A folder of class folders, a tar, WebDataset shards, hfds:PATH, or 'scenes', the embedded pictures."""
    train: str | None = None
    """Where the training pictures are, if not in the split 'train' of the root."""
    val: str | None = None
    """Where the validation pictures are, if not in the split 'val' of the root."""
    image_size: int = 224
    """Side of the network's input, in pixels."""
    num_classes: int | None = None
    """Checked against the data when stated."""
    labels: str | None = None
    """The label store of the training pictures (`alltokens annotate`), for the sources relabel and tokens."""
    annotator: str | None = None
    """Makes the label store before training, unless it is there: a model's name, a run's folder, or a recipe, which is
    then trained on the same pictures. data.labels says where (default: labels/ in the run folder)."""
    train_pictures: int | None = None
    """Use only so many training pictures (scenes: how many are made; default 6000)."""
    val_pictures: int | None = None
    """Use only so many validation pictures (scenes: how many are made; default 1000)."""
    workers: int | None = None
    """Loader processes (with data.cache: threads) per training process, 0 for none; the default is the number of
    usable cores, at most 8."""
    cache: Literal["off", "device"] = "off"
    """device: decode everything once, keep it on the accelerator, augment whole batches there."""
    cache_size: int | None = None
    """Side of the cached pictures; the default is 8/7 of image_size."""
    max_pixels: int = 180_000_000
    """Larger pictures are refused (JPEG: decoded at a reduced scale)."""
    on_bad_picture: Literal["error", "skip"] = "error"
    """What to do with a picture that cannot be read; skipped ones are counted and listed in the run folder."""
    allow_empty_classes: bool = False
    """Accept class folders without a picture."""


@dataclass(frozen=True)
class AugmentConfig:
    scale: tuple[float, float] = (0.08, 1.0)
    """Random resized crop: its area, as a fraction of the picture's."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Random resized crop: width over height."""
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    rand_augment: str | None = "rand-m9-mstd0.5-inc1"
    """RandAugment in timm's spelling, or null."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation; used when there is no rand_augment."""
    erase_probability: float = 0.25
    """Random erasing, after normalisation."""
    erase_mode: Literal["pixel", "const"] = "pixel"
    erase_count: int = 1
    labels_follow: Literal["all", "crop"] = "all"
    """Label maps follow all geometry; crop: only crop and flip, not rotation, shear and translation (an ablation)."""
    repeats: int = 1
    """Repeated augmentation: every chosen picture so many times per pass (the pass keeps its length)."""
    crop_fraction: float = 0.875
    """Evaluation: the centre crop's side over the picture's shorter side."""
    evaluation: Literal["center", "squash"] = "center"
    """Evaluation: a centre crop, or the whole picture squashed to a square."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class MixerConfig:
    name: MixerName = "none"
    alpha: float = 1.0
    """Beta(alpha, alpha) gives the share of the partner."""
    mixup_alpha: float = 0.8
    """The same for the MixUp half of mixup+cutmix."""
    patch_size: int | None = None
    """Snap CutMix to a grid of so many pixels; the patch of random, block and mixtoken (default: the model's)."""
    probability: float = 1.0
    """How often anything is mixed at all."""
    switch_probability: float = 0.5
    """mixup+cutmix: how often it is CutMix."""
    then_mixup: float = 0.0
    """How often MixUp comes on top of a mix of places."""
    per_sample: bool = False
    """Draw a mix for every sample, not for every batch."""


@dataclass(frozen=True)
class FollowerConfig:
    name: FollowerName = "area"
    layers: tuple[int, ...] | None = None
    """tl_align: the attention layers that move the share, counted from 1; null for all."""
    residual: Literal["average", "ignore"] = "average"
    """tl_align: what a residual connection does with the share."""
    drop_path_aware: bool = False
    """tl_align: a branch that stochastic depth drops does not move the share."""
    official: bool = False
    """transmix: a patch's share is that of its first pixel, as in the published program, and not its mean."""


@dataclass(frozen=True)
class SupervisionConfig:
    source: SourceName = "class"
    """Where labels come from: the data set's classes, or label maps (data.labels), by the picture or by the token."""
    mixer: MixerConfig = field(default_factory=MixerConfig)
    """How two pictures are mixed."""
    follower: FollowerConfig = field(default_factory=FollowerConfig)
    """What the mixed label follows."""
    smoothing: float = 0.1
    """Label smoothing."""
    dense_weight: float | None = None
    """Weight of the tokens' loss; the default is 0.5 for the source tokens, else 0 (no dense head)."""
    class_weight: float = 1.0
    """Weight of the picture's loss."""
    participation: float = 1.0
    """The share of each picture's tokens that take part in the dense loss, drawn anew each time."""
    tail: Literal["zero", "true"] = "zero"
    """Classes that a map does not keep: score zero as published, or share what the map left them."""
    axes: Literal["right", "official"] = "right"
    """official: x and y of crops change places, as in the published programs."""
    ground_truth: Literal["official", "sensible"] | None = None
    """Blend the map's label of the picture with the data set's, by one of two rules."""

    @property
    def is_dense(self) -> bool:
        """Whether tokens are trained, so that the network needs a dense head."""
        return self.source == "tokens" if self.dense_weight is None else self.dense_weight > 0


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"
    """Any optimizer of timm's factory."""
    lr: float = 1e-3
    lr_per: int | None = None
    """The batch size that lr is stated for; lr is scaled linearly from it. null: lr is absolute."""
    weight_decay: float = 0.05
    """Not applied to biases, norms, and what the model names in no_weight_decay()."""
    momentum: float = 0.9
    betas: tuple[float, float] | None = None
    eps: float | None = None
    layer_decay: float | None = None
    """Each layer's rate is this factor below the next one's."""
    clip_norm: float | None = None
    """Clip the gradient's norm."""


@dataclass(frozen=True)
class ScheduleConfig:
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    """The rate at the very first step; never scaled."""
    min_lr: float = 1e-5
    """The rate at the end; never scaled."""
    cooldown_epochs: float = 0.0
    """Further epochs at min_lr, after train.epochs."""
    official_deit_offset: bool = False
    """As DeiT's program: a rate per epoch, and one epoch late (the first two are at warmup_lr)."""


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 300
    batch_size: int = 1024
    """Pictures per update, over all processes and accumulation steps."""
    accumulate: int = 1
    """Split an update into so many passes, to save memory."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["off", "on", "reduce-overhead", "max-autotune", "aot_eager"] = "off"
    """torch.compile the whole step: on, or one of torch's modes (aot_eager traces without generating code)."""
    channels_last: bool = False
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass, to save memory."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """How several processes share the model."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, evaluate and save it too."""
    ema_warmup: bool = True
    """Let the average forget its start: decay min(ema_decay, (1 + t) / (10 + t)) at update t."""
    timeout_minutes: float = 30.0
    """Of several processes: how long one waits for another before it ends and names it."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class EvaluationConfig:
    every_epochs: int = 1
    batch_size: int | None = None
    """The default is that of training."""
    compiled: bool = True
    """Evaluate with what train.compile made, too; false saves compiling it, which pays in short runs."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_epochs: int = 1
    """How often the last state is saved (and always at the end, and on SIGTERM and SIGINT)."""
    every_minutes: float | None = None
    """Save inside long epochs too."""
    keep_every: int | None = None
    """Keep the state of every so many epochs."""


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = 50
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()


@dataclass(frozen=True)
class RunConfig:
    """One training run, whole."""

    about: RecipeCard = field(default_factory=RecipeCard)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    compare: str | None = None
    """A recipe to train afterwards, on the same pictures, as long and from the same seed: table and page at the end."""
