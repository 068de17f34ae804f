"""Which configurations `make test` compiles for an H200. The script sm90 compiles them, outside pytest."""

import importlib
import itertools
import sys

from tests.support.pairwise import cover


def pairs(configurations):
    return {frozenset(x) for options in configurations for x in itertools.combinations(options.items(), 2)}


def test_a_cover_has_every_kernel_and_every_pair_of_options(monkeypatch):
    """The cover of shipped configurations is also a small part of them, and the same one in every process."""
    monkeypatch.setenv("RLK_SM90_PLUGINS", "nothing is compiled")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    sm90 = importlib.import_module("tests.pallas_kernels.mosaic.sm90")
    every = [x.options for x in sm90.configurations()]
    numbers = cover(every)
    covered = [every[i] for i in numbers]
    assert pairs(covered) == pairs(every)
    assert {x["kernel"] for x in covered} == {x["kernel"] for x in every}
    assert len(covered) < len(every) / 4 and numbers == cover(every)


def test_a_configuration_with_one_option_is_covered():
    assert cover([{"a": 1, "b": 2}, {"a": 1}, {"a": 3}]) == [0, 2]
