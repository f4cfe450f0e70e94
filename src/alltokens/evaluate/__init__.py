"""Ring 3: how good a model is. `scoring` counts, `evaluation` finds the model and its pictures."""

from alltokens.evaluate.evaluation import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
