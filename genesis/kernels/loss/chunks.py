"""How many tokens the head of a language model takes at a time: the rule alone, for its kernels and memory plans."""

from __future__ import annotations

__all__ = ["COLUMNS", "GRAIN", "MIN_ROWS", "WORKSPACE", "chunk_rows"]

WORKSPACE = 832 << 20  # bytes of logits at a time: 2816 tokens of 152k words in 2 bytes; fewer add up dW more often
MANY = 16384  # tokens from which on the workspace grows with them, as all else of a step does
MIN_ROWS = 256  # of a chunk; below, adding up dW would cost more than the product
COLUMNS = 128  # of a tile of 2-byte logits, which leaves two statistics of each row
GRAIN = 64  # rows of the chunk's memory are multiples of so many elements, so that TMA takes any vocabulary


def chunk_rows(tokens: int, row: int, workspace: int) -> int:
    """How many tokens of `row` bytes go together: chunks of nearly equal size, of whole tiles, within the workspace.

    Args:
        workspace: bytes for up to `MANY` tokens; for more, as many times as much.
    """
    room = workspace * max(tokens, MANY) // MANY
    most = max(MIN_ROWS, room // max(row, 1) // MIN_ROWS * MIN_ROWS)
    even = -(-tokens // -(-tokens // most)) if tokens else 0
    return min(tokens, -(-even // 128) * 128)
