"""Shows that llama.cpp loads what `deltic convert` writes, and that it computes with it what deltic computes.

    python bench/llama_cpp_agrees.py --llama-server PATH --llama-quantize PATH

Small random models with the embedded model's tokenizer are written as GGUF files.

- llama-server and deltic continue the same token ids greedily and report the log probabilities of the best tokens at
  each position. deltic computes in float32. So does llama.cpp with F32 files; with others it rounds activations too,
  hence the wider bounds. Tokens must agree wherever the best two are further apart than the bounds allow. Texts must
  give the same tokens.
- llama-quantize turns files of every type into F32: the weights must be, to the bit, those that deltic reads. It also
  makes each type from the F32 file: it must choose the same type for every tensor.

Exit code 1 where anything disagrees.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from random_gguf import random_gguf

from deltic import LLM, RandomModel, SamplingParams
from deltic.chat.tokenizer import Tokenizer
from deltic.config import ExpertsConfig, LinearConfig, ModelConfig, RopeConfig, Yarn
from deltic.loader.gguf.convert import FILE_TYPES
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import read_file
from deltic.loader.hub import resolve

EQUAL = ModelConfig(
    architecture="qwen3_5", vocab_size=3072, hidden_size=128, intermediate_size=192, num_hidden_layers=8,
    layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, attention_output_gate=True, rope=RopeConfig(1e5, 16, (3, 3, 2)),
    linear=LinearConfig(4, 4, 32, 32, 4), rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=1024,
    dtype="float32")
SHAPES = {
    "qwen3_5": EQUAL,
    "qwen3_5, two value heads a key head": replace(EQUAL, linear=LinearConfig(2, 4, 32, 32, 4)),
    "qwen3_5, three value heads, tied": replace(EQUAL, linear=LinearConfig(2, 6, 32, 32, 4), tie_word_embeddings=True),
    "qwen3": replace(EQUAL, architecture="qwen3", num_hidden_layers=3, layer_types=("full_attention",) * 3,
                     attention_output_gate=False, rope=RopeConfig(1e5, 64, ()), linear=None),
}
_EXPERTS = ExpertsConfig(8, 3, 64, 96)
SHAPES |= {
    "qwen3_5_moe": replace(EQUAL, architecture="qwen3_5_moe", intermediate_size=0, experts=_EXPERTS),
    "qwen3_moe": replace(SHAPES["qwen3"], architecture="qwen3_moe", intermediate_size=0,
                         experts=replace(_EXPERTS, shared_size=0)),
    "qwen3_next": replace(EQUAL, architecture="qwen3_next", intermediate_size=0, experts=_EXPERTS,
                          rope=RopeConfig(1e5, 16, ()), linear=LinearConfig(2, 4, 32, 32, 4)),
    "qwen3_5, YaRN": replace(EQUAL, rope=EQUAL.rope.with_yarn(Yarn(4.0, 64, 1.3))),
    "qwen3, YaRN": SHAPES["qwen3"].with_rope_scaling("yarn:4:64"),
}
_BARE = replace(SHAPES["qwen3"], qk_norm=False)
SHAPES |= {
    "qwen2": replace(_BARE, architecture="qwen2", qkv_bias=True),
    "llama": replace(_BARE, architecture="llama"),
    "llama, scaled frequencies, tied": replace(
        _BARE, architecture="llama", tie_word_embeddings=True,
        rope=RopeConfig(1e5, 64, (), tuple(1 + index / 8 for index in range(32)))),
}
WIDE = replace(EQUAL, hidden_size=256, intermediate_size=512, linear=LinearConfig(2, 4, 64, 64, 4))
WEIGHTS = {"rows of whole blocks": WIDE, "tied": replace(WIDE, tie_word_embeddings=True), "shorter rows": EQUAL}
"""Models for the comparison of weights: blocks have up to 256."""
SPREAD = 0.1
"""The standard deviation of weights: large enough that answers do not repeat themselves."""
BOUNDS = {"F32": 3e-4, "BF16": 0.5, "Q8_0": 1.5}
"""The largest difference of log probabilities, by the file's type. Random models amplify what is rounded."""
PROMPTS = (1, 2, 3, 7, 16, 33, 64, 65, 130, 200)
"""Tokens of the prompts."""
NEW_TOKENS = 24
TOP = 20
TEXTS = ("The capital of France is Paris.", "Sätze, 漢字 and 1234567 e\u0301!", "  two  spaces\n\n\tand it's\r\n",
         "<|im_start|>user\nHi<|im_end|>\n")
_START_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="PATH", type=Path)
    parser.add_argument("--llama-quantize", metavar="PATH", type=Path)
    parser.add_argument("--types", nargs="+", choices=BOUNDS, default=list(BOUNDS), help="files for llama-server")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if not (args.llama_server or args.llama_quantize):
        parser.error("give --llama-server, --llama-quantize or both")
    complaints: list[str] = []
    for name, shape in WEIGHTS.items() if args.llama_quantize else ():
        complaints += _check_weights(args.llama_quantize, name, shape)
    for name, shape in SHAPES.items() if args.llama_server else ():
        complaints += _check_answers(args, name, shape)
    print("\n".join(["", *complaints]) if complaints else "\nllama.cpp and deltic agree")
    sys.exit(1 if complaints else 0)


def _check_answers(args: argparse.Namespace, name: str, shape: ModelConfig) -> Iterator[str]:
    """What is wrong with answers from a model's files; prints a line for each."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{type}.gguf" for type in args.types]
        random_gguf(shape, paths, args.types, "float32", initializer_range=SPREAD)
        for type, path in zip(args.types, paths, strict=True):
            with _server(args.llama_server, path, args.threads) as port:
                found = _compare(_model(type, path, shape, args.threads), port, BOUNDS[type])
            print(f"{name:36} {type:5} {found.tokens} tokens, log probabilities differ by up to {found.largest:.1e} "
                  f"(bound {BOUNDS[type]:g}), {found.undecided} answers left at an undecided token", flush=True)
            yield from (f"{name}, {type}: {complaint}" for complaint in found.complaints)


def _model(type: str, path: Path, shape: ModelConfig, threads: int) -> LLM:
    """For F32 the model before it was converted: a converter's error would not show if our reader had it too."""
    source = RandomModel(shape=shape, initializer_range=SPREAD) if type == "F32" else str(path)
    return LLM(source, dtype="float32", threads=threads)


def _check_weights(program: Path, name: str, shape: ModelConfig) -> Iterator[str]:
    """What is wrong with the weights and the types of tensors in files of every type; prints a line for each."""
    with tempfile.TemporaryDirectory() as directory:
        paths = {type: Path(directory) / f"{type}.gguf" for type in FILE_TYPES}
        random_gguf(shape, list(paths.values()), list(paths), "float32", initializer_range=SPREAD)
        for type, path in paths.items():
            ours = dict(read_file(path, shape))
            theirs = dict(read_file(_quantized(program, path, "F32"), shape))
            wrong = [tensor for tensor in ours if not torch.equal(ours[tensor], theirs[tensor])]
            mine, chosen = _types(path), _types(_quantized(program, paths["F32"], type))
            moved = [f"{tensor} is {mine[tensor]}, llama.cpp chooses {chosen[tensor]}"
                     for tensor in mine if mine[tensor] != chosen[tensor]]
            print(f"{name:21} {type:7} {len(ours) - len(wrong)} of {len(ours)} tensors have the same weights, "
                  f"{len(mine) - len(moved)} of {len(mine)} the same type", flush=True)
            if wrong:
                yield f"{name}, {type}: llama.cpp reads other weights in {len(wrong)} tensors, such as {wrong[0]}"
            if moved:
                yield f"{name}, {type}: {len(moved)} tensors have another type: {moved[0]}"


def _quantized(program: Path, source: Path, type: str) -> Path:
    """What llama-quantize makes of a file."""
    target = source.with_name(f"{source.stem}-to-{type}.gguf")
    done = subprocess.run([program, "--allow-requantize", source, target, type], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"llama-quantize does not make {type} of {source.stem}:\n{(done.stdout + done.stderr)[-3000:]}")
    return target


def _types(path: Path) -> dict[str, str]:
    return {name: tensor.type.name for name, tensor in GgufFile.open(path).tensors.items()}


# The comparison of answers


@dataclass(slots=True)
class Found:
    """tokens: positions compared. undecided: answers that parted where either token could come first."""

    tokens: int
    largest: float
    undecided: int
    complaints: list[str]


@dataclass(frozen=True, slots=True)
class Position:
    """A token of an answer, and the log probabilities of the best ones, best first."""

    token: int
    best: dict[int, float]

    @property
    def margin(self) -> float:
        first, second, *_ = self.best.values()
        return first - second


def _compare(llm: LLM, port: int, bound: float) -> Found:
    draw, found = random.Random(0), Found(0, 0.0, 0, [])
    for length in PROMPTS:
        prompt = [draw.randrange(3000) for _ in range(length)]
        _compare_answers(_ours(llm, prompt), _theirs(port, prompt), bound, found)
    if found.largest > bound:
        found.complaints.append(f"log probabilities differ by {found.largest:.3g}, more than {bound:g}")
    tokenizer = Tokenizer.from_directory(resolve(None))
    for text in TEXTS:
        ours, theirs = tokenizer.encode(text), _ask(port, "tokenize", content=text, parse_special=True)
        if list(ours) != theirs["tokens"]:
            found.complaints.append(f"{text!r} is {list(ours)} to deltic and {theirs['tokens']} to llama.cpp")
    return found


def _compare_answers(ours: list[Position], theirs: list[Position], bound: float, found: Found) -> None:
    """Up to the first token that differs, which must be one that the bound allows to differ."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        both = our.best.keys() & their.best.keys()
        if their.best and len(both) < TOP // 2:
            found.complaints.append(f"only {len(both)} of the {TOP} best tokens are the same at token {index}")
            return
        found.tokens += 1
        found.largest = max([found.largest, *(abs(our.best[token] - their.best[token]) for token in both)])
        if our.token != their.token:
            found.undecided += 1
            if our.margin > 2 * bound:
                found.complaints.append(f"token {index} is {our.token} to deltic and {their.token} to llama.cpp, "
                                        f"by a margin of {our.margin:.3g}")
            return
    if len(ours) != len(theirs):
        found.complaints.append(f"the answer has {len(ours)} tokens from deltic and {len(theirs)} from llama.cpp")


def _ours(llm: LLM, prompt: list[int]) -> list[Position]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=TOP)
    choice = llm.generate([prompt], sampling)[0].choices[0]
    return [Position(token, dict(logprobs.top)) for token, logprobs in zip(choice.tokens, choice.logprobs, strict=True)]


def _theirs(port: int, prompt: list[int]) -> list[Position]:
    """llama-server says nothing of tokens after which the text ends inside of a character."""
    answer = _ask(port, "completion", prompt=prompt, n_predict=NEW_TOKENS, temperature=-1, n_probs=TOP,
                  return_tokens=True, cache_prompt=False)
    told, positions = answer["completion_probabilities"], []
    for token in answer["tokens"]:
        known = told.pop(0)["top_logprobs"] if told and told[0]["id"] == token else []
        positions.append(Position(token, {one["id"]: one["logprob"] for one in known}))
    return positions


# llama-server


@contextmanager
def _server(program: Path, model: Path, threads: int) -> Iterator[int]:
    """Runs llama-server on a file, with attention and K/V in float32 as deltic has them; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", str(threads),
               "-c", "1024", "-np", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--no-webui", "--offline"]
    log = model.with_suffix(".log")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            _wait(process, port, log)
            yield port
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"llama-server does not load the file:\n{log.read_text(errors='replace')[-3000:]}")


def _ask(port: int, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
