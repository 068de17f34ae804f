"""GPUs that need not be here: where JAX's CUDA plugin is installed, it compiles for one from its description alone."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from rlk_jax.core import gpu_memory
from rlk_jax.core.packages import need_of


@dataclass(frozen=True)
class Gpu:
    """What XLA is told of a GPU. Sizes are bytes."""

    title: str
    compute_capability: int
    """The major number; the minor one is 0."""
    core_count: int
    memory: int
    memory_bandwidth: int
    l2_cache: int
    clock_ghz: float
    shared_memory_per_core: int
    shared_memory_per_block: int

    @property
    def usable_memory(self) -> int:
        """What JAX takes of its memory, as the environment says it."""
        return int(self.memory * gpu_memory.fraction())

    def devices(self, count: int) -> list[jax.Device]:
        """So many of them in one host. Programs can be compiled for them, and nothing can be put on them.

        Raises ValueError where the plugin is missing.
        """
        description: dict[str, Any] = {"target_config": self._description(), "topology": f"1x1x{count}"}
        try:
            return topologies.get_topology_desc(platform="cuda", **description).devices
        except NotImplementedError as error:
            raise ValueError(need_of(["JAX's CUDA plugin"], extra="cuda13")) from error

    def _description(self) -> str:
        """The text of XLA's GpuTargetConfigProto."""
        features = "ACCELERATED_FEATURES" if self.compute_capability >= 9 else "NONE"
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024
                threads_per_warp: 32
                shared_memory_per_block: 49152
                shared_memory_per_core: {self.shared_memory_per_core}
                threads_per_core_limit: 2048
                core_count: {self.core_count}
                fpus_per_core: {64 if self.compute_capability == 8 else 128}
                block_dim_limit_x: 2147483647
                block_dim_limit_y: 65535
                block_dim_limit_z: 65535
                memory_bandwidth: {self.memory_bandwidth}
                l2_cache_size: {self.l2_cache}
                clock_rate_ghz: {self.clock_ghz}
                device_memory_size: {self.memory}
                shared_memory_per_block_optin: {self.shared_memory_per_block}
                cuda_compute_capability {{ major: {self.compute_capability} feature_extension: {features} }}
                registers_per_core_limit: 65536
                registers_per_block_limit: 65536
                thread_dim_limit_x: 1024
                thread_dim_limit_y: 1024
                thread_dim_limit_z: 64
                device_vendor: "NVIDIA Corporation"
                name: "{self.title}"
                driver_version: "13.0.0"
                runtime_version: "12.8.0"
                compile_time_toolkit_version: "12.8.0"
                dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.title}"
        """


_HOPPER: dict[str, Any] = {
    "compute_capability": 9,
    "core_count": 132,
    "l2_cache": 50 * 2**20,
    "clock_ghz": 1.98,
    "shared_memory_per_core": 228 * 2**10,
    "shared_memory_per_block": 227 * 2**10,
}
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", memory=84942979072, memory_bandwidth=3352320000000, **_HOPPER),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", memory=151397597184, memory_bandwidth=4800000000000, **_HOPPER),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        compute_capability=8,
        core_count=108,
        memory=85100068864,
        memory_bandwidth=2039040000000,
        l2_cache=40 * 2**20,
        clock_ghz=1.41,
        shared_memory_per_core=164 * 2**10,
        shared_memory_per_block=163 * 2**10,
    ),
    "b200": Gpu(
        "NVIDIA B200",
        compute_capability=10,
        core_count=148,
        memory=191514411008,
        memory_bandwidth=7672320000000,
        l2_cache=132644864,
        clock_ghz=1.965,
        shared_memory_per_core=228 * 2**10,
        shared_memory_per_block=227 * 2**10,
    ),
}
"""GPUs by the names that people give them."""
