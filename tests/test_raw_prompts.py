"""A raw prompt begins and ends as its tokenizer wants it, on every way in, and evaluations get what they ask for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_models import lm_eval_wheel
from test_server_harness import Served, serving
from tokenizers import Tokenizer as Backend
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as Steps
from transformers import PreTrainedTokenizerFast

from deltic import LLM, SamplingParams
from deltic.chat.tokenizer import Tokenizer
from deltic.cli import main
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
BOS_TEXT, EOS_TEXT = "<|endoftext|>", "<|im_end|>"
PLAIN = Tokenizer.from_directory(TINY)
BOS, EOS = (PLAIN.token_to_id(text) or -1 for text in (BOS_TEXT, EOS_TEXT))
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def directory(path: Path, post_processor: Any = None, **config: Any) -> Path:
    """The embedded model with another rule for raw prompts."""
    shutil.copytree(TINY, path, dirs_exist_ok=True)
    given = json.loads((TINY / "tokenizer_config.json").read_text()) | {"bos_token": BOS_TEXT} | config
    (path / "tokenizer_config.json").write_text(json.dumps(given))
    if post_processor is not None:
        backend = Backend.from_file(str(TINY / "tokenizer.json"))
        backend.post_processor = post_processor
        backend.save(str(path / "tokenizer.json"))
    return path


AROUND = TemplateProcessing(single=f"{BOS_TEXT} $A {EOS_TEXT}", special_tokens=[(BOS_TEXT, BOS), (EOS_TEXT, EOS)])
BEGUN = Steps([ByteLevel(trim_offsets=False), TemplateProcessing(single=f"{BOS_TEXT} $A", pair=f"{BOS_TEXT} $A $B",
                                                                 special_tokens=[(BOS_TEXT, BOS)])])


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("bos"), BEGUN)


@pytest.fixture(scope="module")
def llm(with_bos: Path) -> Iterator[LLM]:
    with LLM(with_bos, dtype="float32", memory="64MiB", max_context=512, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm) as found:
        yield found


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("post_processor", [None, AROUND, BEGUN])
def test_raw_prompts_equal_transformers(tmp_path: Path, config: dict[str, Any], post_processor: Any) -> None:
    path = directory(tmp_path, post_processor, **config)
    ours, theirs = Tokenizer.from_directory(path), PreTrainedTokenizerFast.from_pretrained(path)
    for text in ("Hello", " two words\n", "漢", "<|im_start|>x", "a" * 300):
        assert ours.encode(text, add_special=True) == theirs.encode(text)
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_existing_bos_token_is_not_doubled(with_bos: Path) -> None:
    tokenizer = Tokenizer.from_directory(with_bos)
    assert tokenizer.encode(f"{BOS_TEXT}Hello", add_special=True) == tokenizer.encode("Hello", add_special=True)
    assert tokenizer.encode("", add_special=True) == [BOS]
    assert tokenizer.encode(f"x{BOS_TEXT}", add_special=True, parse_special=False).count(BOS) == 1


def test_python_and_command_line(llm: LLM, with_bos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hello = PLAIN.encode("Hello")
    ids = [BOS, *hello]
    text, explicit, bare = llm.generate(["Hello"], GREEDY) + llm.generate([ids, hello], GREEDY)
    assert text.choices[0].usage.prompt_tokens == len(ids) and text.text == explicit.text
    assert bare.choices[0].usage.prompt_tokens == len(hello)
    options = ["--dtype", "float32", "--memory", "64MiB", "--max-context", "512", "--threads", "1"]
    assert main(["run", str(with_bos), "Hello", "--raw", "--json", "--temperature", "0", "--max-tokens", "4",
                 *options]) == 0
    assert json.loads(capfd.readouterr().out)["usage"]["prompt_tokens"] == len(ids)
    chat = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    assert chat.choices[0].usage.prompt_tokens == len(LLM_PROMPT)


LLM_PROMPT = PLAIN.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_server(served: Served) -> None:
    ids = [BOS, *PLAIN.encode("Hello you")]
    for fields, wanted in (({}, ids), ({"add_special_tokens": True}, ids), ({"add_special_tokens": False}, ids[1:])):
        assert served.post("/tokenize", prompt="Hello you", **fields).json()["tokens"] == wanted
        answer = served.post("/v1/completions", prompt="Hello you", max_tokens=1, echo=True, logprobs=1, temperature=0,
                             **fields).json()
        assert answer["usage"]["prompt_tokens"] == len(wanted)
        choice = answer["choices"][0]
        scores = choice["logprobs"]
        assert choice["text"].startswith("Hello you") and len(scores["tokens"]) == len(wanted) + 1
        shown = [(place, token) for place, token in zip(scores["text_offset"], scores["tokens"]) if token != BOS_TEXT]
        assert all(choice["text"].startswith(token, place) for place, token in shown)
        same = served.post("/v1/completions", prompt=wanted, max_tokens=1, echo=True, logprobs=1, temperature=0).json()
        assert same["choices"][0]["logprobs"]["token_logprobs"] == scores["token_logprobs"]
    chat = served.post("/tokenize", messages=[{"role": "user", "content": "Hello"}], add_special_tokens=False)
    assert chat.json()["tokens"] == LLM_PROMPT and "x-deltic-ignored" not in chat.headers
    named = served.post("/tokenize", messages=[{"role": "user", "content": "Hello"}], add_special_tokens=True)
    assert named.json()["tokens"] == LLM_PROMPT and named.headers["x-deltic-ignored"] == "add_special_tokens"


def test_tokenizer_info(served: Served) -> None:
    found = served.http.get("/tokenizer_info").json()
    assert found["bos_token"] == BOS_TEXT and found["eos_token"] == EOS_TEXT and found["add_bos_token"] is True
    assert found["add_eos_token"] is False and found["chat_template"] == PLAIN.chat_template
    assert found["model_max_length"] == 512 and found["vocab_size"] == PLAIN.vocab_size
    name = served.http.get("/v1/models").json()["data"][0]["id"]
    assert served.http.get("/tokenizer_info", params={"model": name}).json() == found
    assert served.http.get("/tokenizer_info", params={"model": "x"}).status_code == 404


def test_gguf_keeps_the_rule_of_raw_prompts(with_bos: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert main(["convert", str(with_bos), str(path)]) == 0
    metadata = GgufFile.open(path).metadata
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    del metadata["tokenizer.huggingface.json"]  # as files of other converters are
    texts = tokenizer_from_gguf(metadata)
    again = Tokenizer(Backend.from_str(texts.tokenizer), texts.special_tokens)
    assert again.around == ([BOS], []) and again.encode("Hello", add_special=True) == [BOS, *PLAIN.encode("Hello")]


def test_lone_surrogate_in_the_tokenizer_config(tmp_path: Path) -> None:
    from deltic.errors import ModelError
    for changes in ({"eos_token": "\ud800"}, {"chat_template": "\udfff"}, {"added_tokens_decoder": {"\ud800": {}}}):
        path = directory(tmp_path, **changes)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json has a lone surrogate"):
            Tokenizer.from_directory(path)


SCRIPT = """
import sys
import requests
from deltic.lm_eval_plugin import DelticLM
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.utils import RemoteTokenizer

def asked(*args):
    return Instance("", {}, args, 0)

def model(more=""):
    return get_model("deltic").create_from_arg_string(
        f"model={directory},dtype=float32,memory=64MiB,max_context=512,threads=1" + more)

def remote_score(context, continuation):  # as local-completions asks, and reads what comes
    choice = requests.post(url + "/v1/completions", json={
        "model": "default", "prompt": context + continuation, "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True}).json()["choices"][0]["logprobs"]
    scores, tops = (choice[name][len(context):-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(scores), all(score == max(top.values()) for score, top in zip(scores, tops))

url, directory = sys.argv[1:]
local, bare, words = model(), model(",add_bos_token=False"), RemoteTokenizer(url + "/v1/completions")
assert "local-completions" in __import__("lm_eval.models").models.MODEL_MAPPING
assert words.bos_token_id == local.prefix_token_id and words.eos_token_id == local.eot_token_id
hello = "Hello <|im_end|>"
assert words.encode(hello) == bare.tok_encode(hello) == local.tok_encode(hello)[1:]
assert words.decode(words.encode("Hello you")) == "Hello you"
pairs = [("Hello there", " my friend"), ("", "Once upon a time"), ("a b ", "c")]
for lm in (local, bare):
    found = lm.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found):
        ids = lm._encode_pair(context, continuation) if context else (
            [words.bos_token_id], words.encode(continuation))
        other, same = remote_score(*ids)
        assert abs(logprob - other) < 1e-3 and greedy == same, (context, logprob, other)
first = [lm.loglikelihood([asked(*pairs[0])], disable_tqdm=True)[0][0] for lm in (local, bare)]
assert first[0] != first[1]
text = "The quick brown fox jumps over the lazy dog. " * 50
rolled, ids = bare.loglikelihood_rolling([asked(text)])[0], bare.tok_encode(text)
assert 510 < len(ids) < 1020, len(ids)
whole = remote_score([words.bos_token_id], ids[:510])[0] + remote_score(ids[len(ids) - 511:510], ids[510:])[0]
assert abs(rolled - whole) < 0.01, (rolled, whole)
got, = bare.generate_until([asked("Once", {"until": ["\\n"], "max_gen_toks": 6})])
other = requests.post(url + "/v1/completions", json={"prompt": words.encode("Once"), "max_tokens": 6, "temperature": 0,
                                                      "stop": ["\\n"]}).json()["choices"][0]["text"]
assert got == other, (got, other)
chat = [{"role": "user", "content": "Hi"}]
assert local.apply_chat_template(chat) == words.apply_chat_template(chat, tools=None)
print("agreed")
"""


@pytest.mark.slow
def test_lm_evaluation_harness(served: Served, with_bos: Path) -> None:
    wheel = lm_eval_wheel()
    done = subprocess.run([sys.executable, "-c", SCRIPT, served.url, str(with_bos)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(wheel)}, timeout=300)
    assert "agreed" in done.stdout, done.stderr[-3000:]
