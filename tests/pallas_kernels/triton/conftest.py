"""Makes kernels run in Triton's interpreter on torch's CPU tensors. Where they cannot, these tests skip visibly."""

import importlib.util
import os

import jax
import pytest

_MISSING = [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]
if _MISSING:
    _REASON = f"Triton's interpreter needs {' and '.join(_MISSING)}"
elif jax.default_backend() == "gpu":
    _REASON = "Triton interprets all kernels of a process or none, and tests/gpu runs them on the GPU"
else:
    _REASON = None
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _REASON and "tests/pallas_kernels/triton/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=_REASON))
