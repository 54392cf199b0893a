"""Quantised weights: how files store them, and what the stored numbers mean.

stored.py         a matrix as its file holds it, whatever the format (`Stored`)
coded.py          the one form that formats of 4 and 8 bits are read into (`Coded`)
group.py          weights as integers in groups of 32 (`GroupQuant`), as some GGUF files and the CPU kernels have them
formats.py        the table of formats that safetensors files may hold, and how a matrix's own is found
fp8.py e2m1.py mxfp4.py int8.py qweight.py pack_quantized.py    the formats; unpack.py has what they share
stated.py         what a checkpoint's config says of a matrix
checks.py         whether that is so, and whether the numbers can be weights
quantise.py       rounds floats to 4 and 8 bits at load
"""
