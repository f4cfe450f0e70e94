"""Ring 2: how the partner's share of a mix travels through a network.

`tl_align.py`, `transmix.py` and `area.py` are the three followers, of one face: `follow(plan)` around the model's
forward, then `share` (B,) and `token_shares` (B, N). `tap.py` is how a share is moved in the middle of timm's modules,
`route.py` what a family of models has to say about itself, `families.py` the list of families. To support a new family
add one file like `cait.py` and its line in `families.py`; docs/followers.md walks through it.
"""
