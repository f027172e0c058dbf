"""Sizes of the kernels' blocks: constants that several kernels share (kernels/common.cuh)."""

BOX_COLUMNS, BOX_ROWS = 64, (64, 128)
"""Boxes that the tensor memory accelerator copies from expert matrices. BOX_ROWS: of gate_up, and of down matrices."""
MMA_TOKENS, MAX_GEMV_TOKENS = 8, 16
"""Tokens of one tensor core tile, and largest number of tokens that deltic's own products serve (two tiles)."""
PLAIN_MMA_TOKENS = 4
"""Largest number of tokens that one tensor core instruction multiplies with bfloat16 weights."""
MAX_SPLIT_HEAD_TOKENS = 2
"""Largest number of tokens for which heads are split into slices, one block per slice, if the card has enough room."""
WARPS = 8
"""Warps of a block that multiply. Further warps copy."""
OVERLAP_SHARED_BYTES = 105 << 10
"""Shared memory of a block that leaves room for the next kernel's block and a small one, on cards with enough of it."""
TWO_BLOCKS_SHARED_BYTES = 84 << 10
"""Shared memory of a block with which no more than two blocks fit on a multiprocessor."""
BOUND_FOR_72_REGISTERS = 448
"""Launch bound (threads) with which the compiler gives a thread at most 72 registers if two blocks must fit. A block of
the delta rule then fits next to two blocks of products. Each of these counts as twelve warps."""
SPLIT_HEAD_SHARED_BYTES = 62 << 10
"""Shared memory with which a delta rule block does not fit next to two blocks of products, so that three blocks do not
meet on one multiprocessor, which would spread the next product's blocks unevenly."""
