"""Encoders beside sentence-transformers and onnxruntime: texts per second, alternating, in one process.

    python bench/embeddings.py MODEL                 # a directory of all-MiniLM-L6-v2; 1,000 texts of 5 to 250 tokens
    python bench/embeddings.py --shape bge-m3        # random weights of that shape; 100 texts
    python bench/embeddings.py --shape bge-m3 --device cuda --texts 256 --tokens 512   # beside the arithmetic limit

Peers get their texts sorted by length, and the batch size at which they are fastest. They are measured where they are
installed: sentence-transformers; onnxruntime with onnx, in 8 bits; llama-cpp-python, on the file of --llama.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltic import Encoder
from deltic.embeddings.types import Item

Run = Callable[[list[str]], Any]
_BATCHES = (4, 16, 32)


def texts_of(tokenizer: Any, count: int, low: int, high: int) -> list[str]:
    """Texts of low to high tokens, special ones included."""
    draw, words = random.Random(0), [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda it: it[1])
                                     if piece.strip("▁").isalpha() and piece.isascii()][:4000]
    found = []
    for _ in range(count):
        wanted = draw.randint(low, high)
        text = " ".join(draw.choices(words, k=wanted)).replace("▁", "")
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:wanted - 2]
        found.append(tokenizer.decode(ids))
    return found


def random_model(place: Path) -> Path:
    """The shape of bge-m3 with random weights and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import XLMRobertaConfig, XLMRobertaModel

    torch.manual_seed(0)
    config = XLMRobertaConfig(vocab_size=8002, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                              num_attention_heads=16, max_position_embeddings=8194, type_vocab_size=1,
                              layer_norm_eps=1e-5)
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(place)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"{a}{b}{c}" for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou"
                                               for c in "bcdfghjklmnpqrstvwxz")]
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names[:8002])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)])
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>",
        "model_max_length": 8192}))
    return place


def deltic(model: Path, **options: Any) -> Run:
    return Encoder(model, **options).encode


class Peer:
    """transformers' model in sentence-transformers, whose own loop sorts by length."""

    def __init__(self, model: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self.model, self.batch = SentenceTransformer(str(model), device="cpu"), 32

    def __call__(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=self.batch, normalize_embeddings=True)


class Traceable(torch.nn.Module):
    """States of ids, with a mask that needs no decisions."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        hidden = (1.0 - mask[:, None, None, :].float()) * -1e9
        return self.model(input_ids=ids, attention_mask=hidden).last_hidden_state


class Onnx:
    """The same model in onnxruntime, its matrices in 8 bits (dynamic, per channel)."""

    def __init__(self, model: Path, threads: int) -> None:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from tokenizers import Tokenizer
        from transformers import AutoModel

        self.tokenizer, self.batch = Tokenizer.from_file(str(model / "tokenizer.json")), 32
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(256)
        plain = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
        self._directory = tempfile.TemporaryDirectory()
        place = Path(self._directory.name)
        ids = torch.ones(2, 7, dtype=torch.int64)
        axes = {0: "batch", 1: "tokens"}
        torch.onnx.export(Traceable(plain), (ids, ids), str(place / "plain.onnx"), input_names=["ids", "mask"],
                          output_names=["states"], dynamic_axes=dict.fromkeys(("ids", "mask", "states"), axes),
                          dynamo=False)
        quantize_dynamic(place / "plain.onnx", place / "int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(place / "int8.onnx"), options)

    def __call__(self, texts: list[str]) -> Any:
        encoded = self.tokenizer.encode_batch_fast(texts)
        order, found = sorted(range(len(texts)), key=lambda index: -len(encoded[index])), [None] * len(texts)
        for start in range(0, len(texts), self.batch):
            part = order[start:start + self.batch]
            longest = len(encoded[part[0]])
            ids, mask = np.zeros((len(part), longest), np.int64), np.zeros((len(part), longest), np.int64)
            for row, index in enumerate(part):
                ids[row, :len(encoded[index])], mask[row, :len(encoded[index])] = encoded[index].ids, 1
            states = self.session.run(None, {"ids": ids, "mask": mask})[0]
            pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            for row, index in enumerate(part):
                found[index] = pooled[row] / np.linalg.norm(pooled[row])
        return np.stack(found)  # type: ignore[arg-type]


ARITHMETIC = 790e12
"""Operations a second that cuBLAS reaches on large bfloat16 products of an H200."""


def on_a_gpu(model: Path, args: argparse.Namespace) -> None:
    """Items of so many tokens each, from ids to vectors on the host, beside what the card's arithmetic allows."""
    with Encoder(model, device=args.device, dtype="bfloat16", token_budget=args.budget) as encoder:
        config, draw, limit = encoder.model.config, random.Random(0), ARITHMETIC  # type: ignore[attr-defined]
        items = [Item([0, *(draw.randrange(4, config.vocab_size) for _ in range(args.tokens - 2)), 2])
                 for _ in range(args.texts)]
        matrices = 2 * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)
        operations = args.texts * args.tokens * config.layers * (matrices + 4 * args.tokens * config.hidden_size)
        times = []
        for _ in range(args.rounds + 2):
            started = time.perf_counter()
            encoder.submit(items).future.result()
            times.append(time.perf_counter() - started)
        middle = statistics.median(times[2:])
        print(json.dumps({
            "task": "embed", "device": torch.cuda.get_device_name(), "texts": args.texts, "tokens": args.tokens,
            "token_budget": args.budget, "seconds": [round(each, 4) for each in times[2:]],
            "tokens_per_second": round(args.texts * args.tokens / middle), "tflops": round(operations / middle / 1e12),
            "share_of_arithmetic_limit": round(operations / middle / limit, 3)}))
        if args.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA,
                                                    torch.profiler.ProfilerActivity.CPU]) as found:
                encoder.submit(items).future.result()
            print(found.key_averages().table(sort_by="cuda_time_total", row_limit=25))


def seconds(run: Run, texts: list[str], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run(texts)
    return clock() - started


class Llama:
    """llama.cpp's embeddings of a GGUF file, through llama-cpp-python; normalised, as its example does it."""

    def __init__(self, model: Path, threads: int) -> None:
        from llama_cpp import Llama as Model  # type: ignore[import-not-found]

        self.model, self.batch = Model(str(model), embedding=True, n_threads=threads, n_threads_batch=threads,
                                       n_ctx=8192, n_batch=2048, n_ubatch=2048, n_seq_max=64, verbose=False), 32

    def __call__(self, texts: list[str]) -> Any:
        order, found = sorted(range(len(texts)), key=lambda index: -len(texts[index])), [None] * len(texts)
        for start in range(0, len(order), self.batch):
            part = order[start:start + self.batch]
            for index, vector in zip(part, self.model.embed([texts[index] for index in part], normalize=True),
                                     strict=True):
                found[index] = vector
        return np.array(found)


def tune(peer: Any, texts: list[str]) -> None:
    """The batch size at which it is fastest, on some of the texts."""
    some, times = texts[:: max(1, len(texts) // 50)], {}
    for batch in _BATCHES:
        peer.batch = batch
        times[batch] = seconds(peer, some)
    peer.batch = min(times, key=lambda batch: times[batch])


def contestants(model: Path, threads: int, only: list[str], file: Path | None) -> dict[str, Run]:
    makers: dict[str, Callable[[], Run]] = {
        "deltic fp32": lambda: deltic(model, threads=threads), "sentence-transformers fp32": lambda: Peer(model),
        "deltic q8_0": lambda: deltic(model, threads=threads, quant="q8_0"),
        "onnxruntime int8": lambda: Onnx(model, threads), "deltic bf16": lambda: deltic(
            model, threads=threads, dtype="bfloat16")}
    if file is not None:
        makers |= {"deltic GGUF": lambda: deltic(file, threads=threads), "llama.cpp GGUF": lambda: Llama(file, threads)}
    found = {}
    for name, make in makers.items():
        if only and name not in only:
            continue
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name}: left out ({error})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--shape", choices=["bge-m3"])
    parser.add_argument("--texts", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true",
                        help="count the process's seconds, not the clock's: with --threads 1, on a busy machine")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--device", default="cpu", help="cuda: deltic alone, texts of --tokens tokens each")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a batch on a GPU")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel on a GPU")
    parser.add_argument("--llama", type=Path, help="a GGUF file of the model, for llama.cpp, and for deltic beside it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or random_model(Path(directory))
        if args.device != "cpu":
            return on_a_gpu(model, args)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_truncation()
        texts = texts_of(tokenizer, args.texts or (1000 if args.model else 100), 5, 250)
        runs = contestants(model, args.threads, args.only, args.llama)
        for name, run in runs.items():
            torch.set_num_threads(args.threads if not name.startswith("deltic") else 1)
            run(texts[:20])
            if not name.startswith("deltic"):
                tune(run, texts)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                torch.set_num_threads(args.threads if not name.startswith("deltic") else 1)
                times[name].append(seconds(run, texts, time.process_time if args.cpu_time else time.perf_counter))
                print(f"  {name}: {times[name][-1]:.2f} s", flush=True)
    for name, found in times.items():
        middle = statistics.median(found)
        batch = getattr(runs[name], "batch", None)
        print(f"{name:28} {len(texts) / middle:8.1f} texts/s  {middle:7.2f} s"
              + (f"  batch {batch}" if batch else "") + "  (" + ", ".join(f"{each:.2f}" for each in found) + ")")


if __name__ == "__main__":
    main()
