"""What `rlk check` prints says what failed, and what to do about it."""

from rlk_jax import cli

SMALL = ("--batch", "1", "--seq", "2", "--vocab", "17")
PLANTED = "tests.support.planted:"


def printed(capsys, *options) -> str:
    """What a check prints whose candidate fails."""
    assert cli.main(["check", *options]) == 1
    return capsys.readouterr().out


def test_a_gradient_that_must_not_be_is_to_be_detached(capsys):
    said = printed(
        capsys, "--op", "ratio_kl", "--candidate", f"{PLANTED}gradient_of_the_reference", "--check-grad", *SMALL
    )
    assert (
        "fault:gradient:ref_logits the candidate gives ref_logits a gradient, and it must have none: detach it "
        "(stop_gradient in JAX) passed=False"
    ) in said
