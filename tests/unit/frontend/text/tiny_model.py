"""A small byte-level model folder for tests: trained in milliseconds, with special tokens and a chat template."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{{ raise_exception('tool messages are not supported') }}{%- endif -%}"
    "<|start|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}"
    "{{ '\\n' + message.content }}<|end|>{{ '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{{ '\\n' }}{%- endif -%}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Tokens arrive one by one, and the text grows.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "system user assistant hello world, what is the capital of France? Paris is the capital of France.",
)

SPECIAL = ("<|endoftext|>", "<|start|>", "<|end|>")


@cache
def tiny_tokenizer_json() -> str:
    """The tokeniser: characters beyond the corpus, such as emoji and CJK, take several byte tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<好>", special=False, normalized=False)])
    return tokenizer.to_str()


def tiny_tokenizer() -> Tokenizer:
    """A fresh one."""
    return Tokenizer.from_str(tiny_tokenizer_json())


def write_tiny_model(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write the folder's files and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
