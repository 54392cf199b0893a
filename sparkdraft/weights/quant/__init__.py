"""Quantised weights: how files store them, and what the stored numbers mean.

stored.py       a matrix as its file holds it (`Stored`), and the forms that formats are read into (`Coded`, ...)
base.py         what a format is (`WeightFormat`), and what the formats share
formats.py      the table of formats in safetensors files: finds the format of each matrix and checks what was read
fp8.py fp4.py compressed_tensors.py gptq.py gguf_blocks.py    the published formats
stated.py       what a checkpoint's config says of each matrix
quantise.py     rounds floats to 4 and 8 bits at load
"""
