"""A TurboQuant cache: codes of a few bits in the engine's blocks, and uncoded rows of some blocks in pages beside them.

    format.py     the tensors: codes, pages, and the map from blocks to pages
    capture.py    an exact cache is read, and codes are written beside it to measure their errors
    centre.py     the mean key of each layer, which is subtracted before keys are coded

The arithmetic of codes is in kernels/turboquant, the Triton kernels are in kernels/cuda/turboquant, and
plan/turboquant.py plans bits and bytes. Which blocks have a page, and which pages a request holds, is decided as for
sliding windows: cache/pages.py, cache/recent_rows.py.
"""
