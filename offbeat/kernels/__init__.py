"""Fused kernels for small networks: BatchNorm with what follows it, narrow 3x3 convolutions; the Triton code is apart.

May import nothing of the package.
"""
