"""TurboQuant: keys and values as few bits per coordinate, after a rotation that makes every coordinate look alike.

    layout.py      planes, blocks and bytes, as integers
    codebook.py    the levels a coordinate may take, optimal for the density it has on the sphere
    rotation.py    the rotation: signs, then Hadamard
    vectors.py     a vector as codes and one scale, and back; codes as planes of bytes
    store.py       a layer's codes in blocks, and uncoded rows in pages beside them

kernels/reference/turboquant.py defines writing and attention. All of it is token-local: what is stored of a vector
depends on that vector alone (and on a centre that never changes).
Where codes lie in memory, and who reads which of them, is left to the KV format.
"""
