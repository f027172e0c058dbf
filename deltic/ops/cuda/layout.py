"""How blocks of products lie on the card: numbers that all products share."""

FEW, MOST = 8, 16
"""Tokens of a step that the products take at once: one or two rows of eight."""
SPREAD = 2
"""Tokens of a step whose heads are spread over the card in slices, if that many find room."""
WARPS = 8
"""Of a block that multiply; one more copies."""
HALF, WHOLE = 105 << 10, 226 << 10
"""Bytes of shared memory of a block that leave room for the next kernel's block, and for a small one, beside it; of one
that stays alone."""
ALONE = 84 << 10
"""Of which only two blocks fit on a multiprocessor: see kernels/common.cuh."""
INPUT = 132 << 10
"""Bytes of input that a block keeps in shared memory at most."""
