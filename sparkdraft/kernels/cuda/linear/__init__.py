"""Matrix products with weights: fused kernels up to 16 rows (few_rows.py), coded weights for more (planes.py), and the
choice between them and cuBLAS (matmul.py)."""
