"""How blocks of the kernels lie on the card: constants that several kernels share (kernels/common.cuh)."""

BOX_COLUMNS, BOX_ROWS = 64, (64, 128)
"""Boxes in which the tensor memory accelerator copies expert matrices: rows of gate and up, rows of down."""
MMA_TOKENS, MAX_GEMV_TOKENS = 8, 16
"""Tokens of one tensor core tile, and of a step that our own products serve (one or two tiles)."""
PLAIN_MMA_TOKENS = 4
"""Tokens that one tensor core instruction multiplies with bfloat16 weights."""
MAX_SPLIT_HEAD_TOKENS = 2
"""Tokens of a step whose heads are split into slices, one block each, if the card has room for so many blocks."""
WARPS = 8
"""Warps of a block that multiply; others copy."""
SHARED_BYTES_BESIDE_NEXT = 105 << 10
"""Shared memory of a block that leaves room for the next kernel's block and a small one, on cards that have so much."""
TWO_BLOCKS_SHARED_BYTES = 84 << 10
"""Shared memory with which only two blocks fit on a multiprocessor."""
BOUND_FOR_72_REGISTERS = 448
"""Launch bound (threads) with which the compiler gives a thread at most 72 registers if two blocks must fit. A block of
the delta rule then fits beside two blocks of products, each of which counts as twelve warps."""
SPLIT_HEAD_SHARED_BYTES = 62 << 10
"""Shared memory of a delta rule block that does not fit beside two blocks of products. It keeps three of them off one
multiprocessor, which would spread the next product's blocks unevenly."""
