"""The real engine: SGLang's schedulers as rank processes, driven token ids in, token ids out."""

from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.models import make_random_llama, prepare_smollm2
from meshift.backends.sglang.settings import SglangSettings

__all__ = ["SglangEngine", "SglangSettings", "make_random_llama", "prepare_smollm2"]
