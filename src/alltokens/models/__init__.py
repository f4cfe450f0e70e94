"""Ring 2: what timm lacks, and what is needed around its models: weights in and out, cost.

Importing this registers our models with timm: `timm.create_model("lvvit_s")` after `import alltokens`.
"""

from alltokens.models import lvvit, pvt

__all__ = ["lvvit", "pvt"]
