"""Ring 3: where a model looks, and what becomes of a mix inside it.

`Explainer` gives maps (attribution, rollout, class attention, token heat), `fluctuation` the mixing ratio layer by
layer, token presence and the distance of aligned labels from areas. Both work on a copy of the model, so that nothing
in it can change. `relevance` holds the rules of attribution as pure functions, `recording` how a forward is read.

`explain` finds all of that out about some pictures, for one model or several (`subject` opens them); what it returns
becomes a page or figures in `report.explain_page`.
"""

from alltokens.explain.explanation import PARTS, Explanation, explain
from alltokens.explain.fluctuation import AlignmentError, alignment_error, mixing_ratios, token_presence
from alltokens.explain.maps import METHODS, Explainer
from alltokens.explain.subject import Subject, open_subject

__all__ = [
    "METHODS",
    "PARTS",
    "AlignmentError",
    "Explainer",
    "Explanation",
    "Subject",
    "alignment_error",
    "explain",
    "mixing_ratios",
    "open_subject",
    "token_presence",
]
