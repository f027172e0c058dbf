"""How blocks of products lie on the card: numbers that all products share."""

BOX_COLUMNS, BOX_ROWS = 64, (64, 128)
"""Of the parts in which experts' matrices are copied: of a gate or its other half, of what comes after them."""
FEW, MOST = 8, 16
"""Tokens of a step that the products take at once: one or two rows of eight."""
FOUR = 4
"""Tokens that one instruction of the tensor cores multiplies with plain weights."""
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
SQUEEZED = 448
"""Threads that the compiler is told a product's block may have, of which two have to find room: so no thread takes more
than 72 registers. Then a block of the delta rule finds room beside two of products, of which each counts as twelve
warps."""
LONE = 62 << 10
"""Bytes of shared memory of a block of the delta rule that finds no room beside two of products: so that no three
of them come to lie on one multiprocessor, and the next product's blocks unevenly with them."""
