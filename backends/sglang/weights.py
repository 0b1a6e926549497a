"""Which weights a checkpoint folder holds, without reading all of them."""

import hashlib
from pathlib import Path

SAMPLES = 16
"""Places of each file that are looked at, its beginning and end among them."""

SAMPLE_BYTES = 64 * 1024
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")


def fingerprint(model_path: Path) -> str:
    """Equal for equal weights, and for nothing else that one meets: covers the configuration, the names and sizes of
    the weight files, and samples of what is in them. Of a model that isn't a folder here: its name."""
    files = sorted(file for pattern in WEIGHT_PATTERNS for file in model_path.glob(pattern))
    if not files:
        return f"name:{model_path}"
    digest = hashlib.sha256()
    config = model_path / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for index in range(SAMPLES):
                weights.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(weights.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"
