"""Quantised weights: how files store them, and what the stored numbers mean.

stored.py         a matrix as its file holds it, whatever the format (`Stored`)
formats.py        the table of formats that safetensors files may hold, and how a matrix's own is found
int8_groups.py    one format of that table: compressed-tensors' 8-bit integers in groups of 32
mxfp4.py          another: gpt-oss's experts, floats of 4 bits in groups of 32, read as `Coded`
coded.py          the one form that formats of 4 and 8 bits are read into (`Coded`)
group.py          weights as integers in groups of 32 (`GroupQuant`), which GGUF files hold too
"""
