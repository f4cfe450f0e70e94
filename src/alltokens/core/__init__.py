"""Ring 1: pure functions of tensors, torch only.

Nothing here knows of models, files or configurations; nothing changes its inputs; random draws take a generator.
Shapes: B batch, C channels, H and W picture, h and w token grid, N tokens, K classes.
"""
