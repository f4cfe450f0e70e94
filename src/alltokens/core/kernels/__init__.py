"""Fused kernels, each behind one torch.library op with its fake and its plain twin in PyTorch.

The twin is the definition: it runs wherever the kernel does not, and the tests hold the kernel to it.
"""
