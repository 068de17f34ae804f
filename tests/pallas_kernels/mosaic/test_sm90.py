"""Which configurations `make test` compiles for an H200. The script sm90 compiles them, outside pytest."""

import itertools

from tests.pallas_kernels.mosaic import configurations
from tests.support.pairwise import cover


def pairs(every):
    return {frozenset(x) for options in every for x in itertools.combinations(options.items(), 2)}


def test_a_cover_has_every_kernel_and_every_pair_of_options():
    """The cover of shipped configurations is also a small part of them, and the same one in every process."""
    every = [x.options for x in configurations.every()]
    numbers = cover(every)
    covered = [every[i] for i in numbers]
    assert pairs(covered) == pairs(every)
    assert {x["kernel"] for x in covered} == {x["kernel"] for x in every}
    assert len(covered) < len(every) / 4 and numbers == cover(every)


def test_a_configuration_with_one_option_is_covered():
    assert cover([{"a": 1, "b": 2}, {"a": 1}, {"a": 3}]) == [0, 2]
