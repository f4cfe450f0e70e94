"""Train vision transformers with a true label for every token.

The names below are the public ones; everything else may move.
"""

from alltokens.core import geometry
from alltokens.core.label_maps import LabelMap, sample_class_targets, sample_token_labels, sample_token_targets
from alltokens.core.losses import blend_targets, smooth_one_hot, soft_cross_entropy
from alltokens.core.mixing import (
    draw_block_mix,
    draw_cutmix,
    draw_mixtoken,
    draw_mixup,
    draw_random_mix,
    mix_images,
)
from alltokens.core.plan import MixPlan
from alltokens.core.token_loss import TokenLabelLoss, blend_ground_truth
from alltokens.core.token_targets import TokenTargets
from alltokens.data.datasets import PictureDataset, Sample
from alltokens.data.device_augment import DeviceAugment
from alltokens.data.pictures import UnreadablePicture
from alltokens.data.transforms import EvalTransform, TrainTransform
from alltokens.errors import TrainingFailed, TrainingStopped, UnsupportedModel, UserError
from alltokens.follow.area import Area
from alltokens.follow.families import follower_support, supported_models
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix
from alltokens.labels.annotate import annotate
from alltokens.labels.store import LabelStore
from alltokens.models.token_classifier import TokenClassifier
from alltokens.models.token_output import TokenOutput
from alltokens.models.weights import load_weights
from alltokens.report.show import show
from alltokens.supervision.embedding import mix_embeddings
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.source import Source
from alltokens.supervision.step import Parts, Supervision
from alltokens.version import __version__

__all__ = [
    "Area",
    "DeviceAugment",
    "EvalTransform",
    "LabelMap",
    "LabelStore",
    "MixPlan",
    "Mixer",
    "Parts",
    "PictureDataset",
    "Sample",
    "Source",
    "Supervision",
    "TLAlign",
    "TokenClassifier",
    "TokenLabelLoss",
    "TokenOutput",
    "TokenTargets",
    "TrainTransform",
    "TrainingFailed",
    "TrainingStopped",
    "TransMix",
    "UnreadablePicture",
    "UnsupportedModel",
    "UserError",
    "__version__",
    "annotate",
    "blend_ground_truth",
    "blend_targets",
    "draw_block_mix",
    "draw_cutmix",
    "draw_mixtoken",
    "draw_mixup",
    "draw_random_mix",
    "follower_support",
    "geometry",
    "load_weights",
    "mix_embeddings",
    "mix_images",
    "sample_class_targets",
    "sample_token_labels",
    "sample_token_targets",
    "show",
    "smooth_one_hot",
    "soft_cross_entropy",
    "supported_models",
]
