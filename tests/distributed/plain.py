"""A run whose result cannot depend on how its batches are split: no mixing, no stochastic depth, no batch norm."""

from tests.tiny import tiny_config

PLAIN = tiny_config(
    model={"drop_path": 0.0},
    supervision={"mixer": {"name": "none"}},
    augment={"erase_probability": 0.0},
    data={"val_pictures": 41},  # odd: one rank has a picture more
    optimizer={"name": "sgd", "lr": 0.05, "clip_norm": 1.0},
    train={"epochs": 2, "batch_size": 8},
)
