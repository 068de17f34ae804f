"""Tunix: its log-probabilities by `linear_logp`, from hidden states and the head of the model, without logits; and a
rollout that samples from a decoder of `rlk_jax.models` with the bits that training computes.
"""

from packaging.requirements import Requirement as _Requirement

from rlk_jax.core.packages import install_command as _install_command
from rlk_jax.core.packages import installed_version as _installed_version

_NEEDED = "google-tunix>=0.1.7,<0.2"
_found = _installed_version("google-tunix")
if _found is None or not _Requirement(_NEEDED).specifier.contains(_found, prereleases=True):
    raise ImportError(
        f"rlk_jax.clients.tunix needs {_NEEDED}, of rlk-jax's extra `tunix`, and {_found or 'no version of it'} is "
        f"installed: {_install_command('tunix')}"
    )

from rlk_jax.clients.tunix.heads import Head, head_of, hidden_of  # noqa: E402
from rlk_jax.clients.tunix.logps import (  # noqa: E402
    install_chunked_logps,
    install_logps,
    register_policy_loss,
    uninstall_chunked_logps,
    uninstall_logps,
)
from rlk_jax.clients.tunix.rollout import DecoderRollout  # noqa: E402

__all__ = [
    "DecoderRollout",
    "Head",
    "head_of",
    "hidden_of",
    "install_chunked_logps",
    "install_logps",
    "register_policy_loss",
    "uninstall_chunked_logps",
    "uninstall_logps",
]
