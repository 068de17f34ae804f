"""Bits of fixed inputs, kept as hashes in golden_<op>.json for one GPU model, jaxlib and numerics version.

Those of another implementation than `mosaic` are in golden_<op>_<implementation>.json.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

import rlk_jax
from tests.support.helpers import bits


def check(op: str, outputs: Callable[[], dict[str, Any]], implementation: str = "mosaic") -> None:
    """They may only change together with `numerics_version`. Where none are kept for here, or none of some outputs, it
    prints all and skips.
    """
    name = op if implementation == "mosaic" else f"{op}_{implementation}"
    path = pathlib.Path(__file__).parent / f"golden_{name}.json"
    golden = json.loads(path.read_text()) if path.exists() else {}
    here = {
        "device": jax.devices()[0].device_kind,
        "jaxlib": jax.lib.__version__,
        "numerics_version": rlk_jax.numerics_version[op],
    }
    hashes = {name: hashlib.sha256(bits(x).tobytes()).hexdigest() for name, x in outputs().items()}
    kept = {key: golden.get(key) for key in here}
    if kept != here:
        print(json.dumps({**here, "hashes": hashes}, indent=1))
        pytest.skip(f"hashes are of {list(kept.values())}, here is {list(here.values())}")
    assert {name: hashes.get(name) for name in golden["hashes"]} == golden["hashes"]
    if new := sorted(hashes.keys() - golden["hashes"].keys()):
        print(json.dumps({**here, "hashes": hashes}, indent=1))
        pytest.skip(f"no hashes are kept of {new}")
