"""A run whose result cannot depend on how its batches are split: no mixing, no stochastic depth, no batch norm."""

import dataclasses

from tests.tiny import tiny_config

PLAIN = tiny_config(
    model={"drop_path": 0.0},
    supervision={"mixer": {"name": "none"}},
    augment={"erase_probability": 0.0},
    data={"val_pictures": 41},  # odd: one rank has a picture more
    optimizer={"name": "sgd", "lr": 0.05, "clip_norm": 1.0},
    train={"epochs": 2, "batch_size": 8},
)

# What ranks draw for themselves does not depend on how the weights are kept.
FOLLOWED = dataclasses.replace(
    PLAIN, supervision=tiny_config(supervision={"mixer": "cutmix", "follower": "tl_align"}).supervision
)
