"""Ring 2: what timm lacks, and what is needed around its models: weights in and out, cost."""
