"""TurboQuant: keys and values as few bits per coordinate, after a rotation that makes all coordinates alike.

    layout.py      planes, blocks and bytes, as integers
    codebook.py    the levels of a coordinate, optimal for its density on the sphere
    vectors.py     a vector as codes and one scale, and back
    store.py       a layer's codes in blocks, and uncoded tokens in pages

kernels/reference/turboquant.py defines writing and attention. What is stored of a vector depends on that vector alone
and on a centre that never changes.
"""
