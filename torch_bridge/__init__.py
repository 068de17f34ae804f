"""The ops of `rlk_jax` for PyTorch trainers, over DLPack. The package holds no maths of its own."""

try:
    import torch as _torch  # noqa: F401
except ImportError as missing:
    from rlk_jax.core.packages import need_of as _need_of

    raise ImportError(f"torch_bridge {_need_of(['PyTorch'], extra='torch')}") from missing

from torch_bridge._memory import share_gpu_memory as _share_gpu_memory

_share_gpu_memory()

from torch_bridge._allowed import padded_allowed_ids  # noqa: E402
from torch_bridge._programs import CacheInfo, cache_info  # noqa: E402
from torch_bridge.clients import install, uninstall  # noqa: E402
from torch_bridge.det_gemm import det_gemm  # noqa: E402
from torch_bridge.grpo_loss import GrpoLoss, grpo_loss  # noqa: E402
from torch_bridge.head import FusedLMHead  # noqa: E402
from torch_bridge.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from torch_bridge.linear_kl import linear_kl  # noqa: E402
from torch_bridge.linear_logp import LinearLogp, RankedLogp, linear_logp  # noqa: E402
from torch_bridge.logp import logp  # noqa: E402
from torch_bridge.ratio_kl import RatioKl, ratio_kl  # noqa: E402

__all__ = [
    "CacheInfo",
    "FusedLMHead",
    "GrpoLoss",
    "LinearLogp",
    "RankedLogp",
    "RatioKl",
    "cache_info",
    "det_gemm",
    "grpo_loss",
    "install",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logp",
    "logp",
    "padded_allowed_ids",
    "ratio_kl",
    "uninstall",
]
