"""All-reduce over ranks by Triton kernels that read the peers' memory, with the residual addition fused."""
