"""The candidates and cases of benchmarks.tunix."""

from dataclasses import dataclass

CANDIDATES = STOCK, LINEAR_LOGP, DECODER = "stock", "linear_logp", "decoder"
HEAD_SIZE = 64


@dataclass(frozen=True)
class Case:
    """A Qwen3 of these sizes, and a rollout of so many prompts, samples of each and new tokens."""

    width: int
    layers: int
    vocabulary: int
    prompts: int
    samples: int
    tokens: int

    @property
    def groups(self) -> int:
        """The heads of keys and values, each of which serves two of queries."""
        return max(1, self.width // (2 * HEAD_SIZE))

    @property
    def inner(self) -> int:
        """The width between the two halves of a feed-forward layer."""
        return 3 * self.width

    @property
    def model(self) -> str:
        """The sizes of the model, as an option gives them."""
        return f"{self.width},{self.layers},{self.vocabulary}"

    @property
    def batch(self) -> str:
        """The sizes of a rollout, as an option gives them."""
        return f"{self.prompts},{self.samples},{self.tokens}"
