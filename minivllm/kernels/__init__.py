"""Triton kernels, each beside its plain-torch reference in `minivllm.model.attention`. Knows nothing of requests.

Triton exists for Linux only: nothing outside this package imports it before it is used.
"""
