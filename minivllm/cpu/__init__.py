"""What makes a CPU fast: attention that reads blocks in place, packed weights, fused small operations.

Each has its reference in plain torch in `minivllm.model`, which runs wherever this package can't. Nothing outside
imports it before it is used: Numba may be missing.
"""
