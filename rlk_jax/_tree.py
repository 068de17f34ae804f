"""The softmax's fixed tree over the vocabulary: eight groups, so that 1, 2, 4 or 8 ranks own whole ones."""

GROUPS = 8


def group_width(vocab_size: int) -> int:
    """For a true vocabulary of this size, columns of one of the eight groups; the last ones may be short or empty."""
    return -(-vocab_size // 64) * 8
