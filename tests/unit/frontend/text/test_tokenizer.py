"""Model folders: what is read from them, and what is wrong with them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders

from meshift.schemas.errors import InvalidRequest
from meshift.services.frontend.text.tokenizer import ChatTokenizer, TokenizerError
from tests.unit.frontend.text.tiny_model import TEMPLATE, write_tiny_model

REAL_MODEL = Path(os.environ.get("MESHIFT_TEST_MODEL", ".models/smollm2"))

HELLO = ({"role": "user", "content": "hello <好> 😀"},)


def test_a_chat_becomes_tokens(tiny: ChatTokenizer) -> None:
    rendered = tiny.render(HELLO)
    assert rendered == "<|start|>user\nhello <好> 😀<|end|>\n<|start|>assistant\n"
    tokens = tiny.apply_chat_template(HELLO)
    assert tokens == tiny.encode(rendered)
    assert tokens[0] == 1  # <|start|>, once and as itself
    assert tokens.count(1) == 2
    assert tiny.decode(tokens) == "user\nhello <好> 😀\nassistant\n"


def test_encode_and_decode_are_inverse(tiny: ChatTokenizer) -> None:
    text = " Zwölf 你好 👩‍👩‍👧\n\n\ttabs"
    assert tiny.decode(tiny.encode(text)) == text


def test_end_tokens_come_from_every_file(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ChatTokenizer.load(folder).eos_ids == {0, 2, 5}
    (folder / "config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert ChatTokenizer.load(folder).eos_ids == {2}
    (folder / "generation_config.json").unlink()
    assert ChatTokenizer.load(folder).eos_ids == {2}


def test_a_template_in_the_configuration_is_found(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    assert ChatTokenizer.load(folder).render(HELLO).startswith("<|start|>user")


def test_whether_the_template_knows_developers(tmp_path: Path, tiny: ChatTokenizer) -> None:
    assert not tiny.knows_developer
    knowing = TEMPLATE + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert ChatTokenizer.load(write_tiny_model(tmp_path, template=knowing)).knows_developer


def test_a_folder_without_a_template_refuses_chats(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(write_tiny_model(tmp_path, template=None))
    assert not tokenizer.knows_developer
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.render(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can't render"),
        ("{{ messages[7].content }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_what_a_template_refuses_is_the_caller_s_error(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = ChatTokenizer.load(write_tiny_model(tmp_path, template=template))
    with pytest.raises(InvalidRequest, match=message) as caught:
        tokenizer.render(HELLO)
    assert caught.value.param == "messages"


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def broken_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[")


def unsupported_decoder(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.CTC()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_tokenizer, "has no tokenizer.json"),
        (broken_tokenizer, "can't be read"),
        (broken_config, "can't be read"),
        (unsupported_decoder, "not supported: decoder step 'CTC'"),
    ],
)
def test_unusable_folders_say_why(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    folder = write_tiny_model(tmp_path)
    spoil(folder)
    with pytest.raises(TokenizerError, match=message):
        ChatTokenizer.load(folder)


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is no folder"):
        ChatTokenizer.load(tmp_path / "absent")


def test_threads_may_share_a_tokenizer(tiny: ChatTokenizer) -> None:
    chats = [({"role": "user", "content": f"{'hello world ' * 200}{index}"},) for index in range(16)]
    expected = [tiny.apply_chat_template(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tiny.apply_chat_template, chats)) == expected


TORCH_FREE = """
import sys
{prelude}
from pathlib import Path
from meshift.services.frontend.http import HttpSettings, create_app
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.services.frontend.text.tokenizer import ChatTokenizer
tokenizer = ChatTokenizer.load(Path({folder!r}))
tokens = tokenizer.apply_chat_template([{{"role": "user", "content": "hello"}}])
detokenizer = tokenizer.detokenizer()
assert detokenizer.push(tokens) + detokenizer.flush() == tokenizer.decode(tokens)
loaded = [name for name in sys.modules if name.partition(".")[0] in ("torch", "sglang") and sys.modules[name]]
assert not loaded, loaded
"""


@pytest.mark.slow
@pytest.mark.parametrize("prelude", ["", "sys.modules['torch'] = None"], ids=["torch as it is", "torch absent"])
def test_torch_is_neither_needed_nor_loaded(tiny_folder: Path, prelude: str) -> None:
    code = TORCH_FREE.format(prelude=prelude, folder=str(tiny_folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not (REAL_MODEL / "tokenizer.json").is_file(), reason=f"no real model in {REAL_MODEL}")
def test_the_real_model_s_tokenizer() -> None:
    tokenizer = ChatTokenizer.load(REAL_MODEL)
    rendered = tokenizer.render([{"role": "user", "content": "What is the capital of France?"}])
    assert rendered.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    tokens = tokenizer.encode(rendered)
    assert tokens[0] == tokenizer.encode("<|im_start|>")[0]
    assert tokenizer.encode("<|im_end|>")[0] in tokenizer.eos_ids
    text = "naïve café 😀 你好\n    code()"
    detokenizer = tokenizer.detokenizer()
    pushed = "".join(detokenizer.push((token,)) for token in tokenizer.encode(text))
    assert pushed + detokenizer.flush() == text
