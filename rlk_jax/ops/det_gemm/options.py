"""What a call of det_gemm carries."""

from typing import Any, NamedTuple


class GemmInputs(NamedTuple):
    """One call's arrays as the user shaped them; accumulate_into may be None."""

    a: Any
    b: Any
    accumulate_into: Any
