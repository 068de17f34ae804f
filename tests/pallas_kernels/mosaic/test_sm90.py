"""Which configurations `make test` compiles for an H200. The script sm90 compiles them, outside pytest."""

import itertools

from tests.pallas_kernels.mosaic import configurations
from tests.support.pairwise import cover


def pairs(every):
    return {frozenset(x) for options in every for x in itertools.combinations(options.items(), 2)}


def of_kernels(every):
    return {(options["kernel"], x) for options in every for x in options.items()}


def test_a_cover_has_every_option_of_every_kernel():
    """The cover of shipped configurations is also a small part of them, and the same one in every process."""
    every = [x.options for x in configurations.every()]
    numbers = cover(every, "kernel")
    covered = [every[i] for i in numbers]
    assert of_kernels(covered) == of_kernels(every)
    assert len(covered) < len(every) / 10 and numbers == cover(every, "kernel")


def test_a_cover_has_every_pair_of_options():
    every = [dict(zip("abc", x, strict=True)) for x in itertools.product(range(3), range(4), (False, True))]
    covered = [every[i] for i in cover(every)]
    assert pairs(covered) == pairs(every) and len(covered) < len(every)


def test_a_configuration_with_one_option_is_covered():
    assert cover([{"a": 1, "b": 2}, {"a": 1}, {"a": 3}]) == [0, 2]
