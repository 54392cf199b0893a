"""Matrix products with weights: fused kernels for few tokens, coded weights for more, and the choice between them."""
