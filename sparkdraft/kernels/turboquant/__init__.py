"""TurboQuant: keys and values as few bits per coordinate, after a rotation that makes every coordinate look alike.

    layout.py      planes, blocks and bytes, as integers
    codebook.py    the levels a coordinate may take, optimal for the density it has on the sphere
    rotation.py    the rotation: signs, then Hadamard
    codes.py       integers of 2 to 5 bits as planes of bytes
    vectors.py     a vector as codes and one scale, and back
    store.py       a layer's codes in blocks, and uncoded rows in pages beside them
    reference.py   writing to such a layer and attending to it, in plain torch
    attention.py   attention over codes without decoding them, in plain torch: what kernels are tested against

All of it is token-local: what is stored of a vector depends on that vector alone (and on a centre that never changes).
Where codes lie in memory, and who reads which of them, is left to the KV format.
"""
