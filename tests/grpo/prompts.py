"""A task of prompts of mixed lengths, which a policy soon learns to answer now and then."""

import json
import random
from pathlib import Path


def write(path: Path, longest: int) -> str:
    """Write prompts of 1 to `longest` characters, half of them short, to a file. An answer is the first of two letters.

    Returns the path as a string.
    """
    draw = random.Random(0)
    lengths = [draw.randint(1, longest if i % 2 else 4) for i in range(24)] + [longest]
    prompts = dict.fromkeys("".join(draw.choices("ab", k=n)) + "=" * (i % 3) for i, n in enumerate(lengths))
    path.write_text("".join(json.dumps({"prompt": p, "answer": p[0]}) + "\n" for p in prompts))
    return str(path)
