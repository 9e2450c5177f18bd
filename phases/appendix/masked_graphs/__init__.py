"""Steps with grammar masks on a GPU: a kernel that applies the masks, and sampling as CUDA graphs."""
