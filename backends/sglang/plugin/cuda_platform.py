"""SGLang's own CUDA platform, with KV in units of an arena."""

from sglang.srt.platforms.cuda import CudaSRTPlatform


class MeshCudaPlatform(CudaSRTPlatform):  # type: ignore[misc]
    """It stays SGLang's CUDA platform in everything else, `_enum` included: SGLang chooses kernels by that."""

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Ours for plain K and V."""
        if kind != "mha":
            return None
        from meshift.backends.sglang.plugin.cuda_pool import CudaArenaKvPool

        return CudaArenaKvPool
