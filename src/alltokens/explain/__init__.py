"""Ring 3: where a model looks, and what becomes of a mix inside it.

`Explainer` gives maps (attribution, rollout, class attention, token heat), `fluctuation` the mixing ratio layer by
layer, token presence and the distance of aligned labels from areas. Both work on a copy of the model, so that nothing
in it can change. `relevance` holds the rules of attribution as pure functions, `recording` how a forward is read.
"""

from alltokens.explain.fluctuation import AlignmentError, alignment_error, mixing_ratios, token_presence
from alltokens.explain.maps import METHODS, Explainer

__all__ = [
    "METHODS",
    "AlignmentError",
    "Explainer",
    "alignment_error",
    "mixing_ratios",
    "token_presence",
]
