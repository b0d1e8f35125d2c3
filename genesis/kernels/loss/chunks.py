"""How many tokens the language model head takes at a time. No kernels: memory plans import this, too."""

from __future__ import annotations

WORKSPACE = (
    832 << 20
)  # bytes of logits at a time: 2816 tokens × 152k classes in 2 bytes; a smaller one accumulates dW more often
MANY = 16384  # tokens above which the workspace grows with them, as other activations do
MIN_ROWS = 256  # of a chunk; below, accumulating dW would cost more than the GEMM
COLUMNS = 128  # of a tile of 2-byte logits, which stores two statistics per row
GRAIN = 64  # the row stride of a chunk's logits is a multiple of it, so that TMA takes any vocabulary


def chunk_rows(tokens: int, row: int, workspace: int) -> int:
    """Tokens per chunk, for `row` bytes a token: nearly equal chunks of whole tiles within the workspace.

    Args:
        workspace: bytes for up to `MANY` tokens; in proportion for more.
    """
    room = workspace * max(tokens, MANY) // MANY
    most = max(MIN_ROWS, room // max(row, 1) // MIN_ROWS * MIN_ROWS)
    even = -(-tokens // -(-tokens // most)) if tokens else 0
    return min(tokens, -(-even // 128) * 128)
