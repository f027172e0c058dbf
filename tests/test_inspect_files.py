"""`deltic inspect` of headers and configs alone: a hub, kind or hostile, and a directory without weights."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from checkpoint_headers import BLOCK_FP8, DENSE, MIXTURE, MODELOPT, SMALL, Stored, files_of, tensors_of
from gguf_models import BLOCKY
from hub_cases import COMMIT, LocalHub, local_hub
from huggingface_hub import constants
from test_gguf_run import random_file

from deltic.cli import command_parser, main
from deltic.cli.inspect_files import survey_facts
from deltic.errors import DelticError
from deltic.loader import ranges, survey


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.chdir(tmp_path)
    with local_hub(tmp_path / "cache", monkeypatch) as found:
        yield found


def publish(hub: LocalHub, mapping: dict[str, Any], stored: Stored, shards: int = 1, head: bool = True) -> None:
    files, data = files_of(mapping, tensors_of(mapping, stored, head), shards)
    hub.files |= files
    hub.zeros |= data


def save(hub: LocalHub, directory: Path) -> Path:
    """Writes the repository's files without the data of tensors."""
    directory.mkdir()
    for name, content in hub.files.items():
        (directory / name).write_bytes(content)
    return directory


@dataclass
class Report:
    code: int
    facts: dict[str, Any]
    error: str

    @property
    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(row["kind"], row["stored_as"]): row for row in self.facts["layers"]}

    @property
    def warnings(self) -> str:
        return "\n".join(self.facts["warnings"])


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., Report]:
    def run(*arguments: str) -> Report:
        code = main(["inspect", "--json", *arguments])
        shown = capsys.readouterr()
        return Report(code, json.loads(shown.out) if shown.out else {}, shown.err)

    return run


def mixed(name: str) -> str:
    """NVIDIA's recipe: NVFP4 in feed-forwards and lm_head, FP8 elsewhere."""
    if name.startswith("mtp.") or name.endswith((".in_proj_a.weight", ".in_proj_b.weight")):
        return "BF16"
    return "NVFP4" if ".mlp." in name or name == "lm_head.weight" else "FP8"


MIXED = {**DENSE, "quantization_config": MODELOPT}


def test_layers_by_kind_and_bits(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, MIXED, mixed, shards=5)
    report = inspect("org/name")
    assert report.code == 0, report.error
    rows = report.rows
    assert rows["MLP", "NVFP4"]["layers"] == 64 and rows["MLP", "NVFP4"]["bits"] == 4.5
    assert rows["MLP", "NVFP4"]["parameters"] == 64 * 3 * 5120 * 17408
    assert rows["MLP", "NVFP4"]["weights"] == ["gate_proj", "up_proj", "down_proj"]
    assert rows["GDN", "F8_E4M3"]["layers"] == 48 and rows["GDN", "F8_E4M3"]["bits"] == 8.0
    assert {*rows["GDN", "BF16"]["weights"][:2]} == {"in_proj_a", "in_proj_b"}
    assert rows["attention", "F8_E4M3"]["layers"] == 16 and rows["head", "NVFP4"]["layers"] is None
    assert rows["MTP head", "BF16"]["bits"] == 16.0 and rows["embeddings", "BF16"]["parameters"] == 248320 * 5120
    assert report.facts["warnings"] == []
    config = report.facts["config"]
    assert config["pattern"] == "16 x (3 linear_attention + 1 full_attention)" and config["context"] == 262144
    listed = sum(hub.size(name) for name in hub.files)
    assert hub.bytes_delivered() < 6 * (1 << 20) < listed / 1000
    assert not (hub_cache := Path(constants.HF_HUB_CACHE)).exists() or not [*hub_cache.rglob("*.safetensors")]


def test_a_directory_of_headers_shows_the_same(hub: LocalHub, inspect: Callable[..., Report], tmp_path: Path) -> None:
    publish(hub, MIXED, mixed, shards=3)
    remote, local = inspect("org/name"), inspect(str(save(hub, tmp_path / "headers")))
    assert local.code == remote.code == 0, local.error
    assert "model-00001-of-00003.safetensors has its header alone, and no weights" in local.warnings
    for facts in (remote.facts, local.facts):
        for key in ("model", "path", "warnings", "memory"):
            del facts[key]
    assert remote.facts == local.facts


def test_memory_and_what_serves_it(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, {**SMALL, "quantization_config": BLOCK_FP8}, lambda name: "BF16" if "_a." in name else "FP8")
    plain = inspect("org/name", "--memory", "64MiB")
    assert plain.code == 0 and plain.facts["memory"]["device"] == "cpu"
    assert plain.rows["MLP", "F8_E4M3"]["on_cpu"] == "bfloat16"
    parameters = plain.facts["weights"]["parameters"]
    assert plain.facts["memory"]["weights_mib"] == pytest.approx(2 * parameters / (1 << 20), rel=0.01)
    assert 0 < plain.facts["memory"]["max_context"] <= 262144 and plain.facts["ops"]["gdn_mixer"]
    smaller = inspect("org/name", "--memory", "64MiB", "--quant", "q4_k")
    assert smaller.rows["MLP", "F8_E4M3"]["on_cpu"] == "q4_k"
    assert smaller.facts["memory"]["weights_mib"] < plain.facts["memory"]["weights_mib"] / 2
    card = inspect("org/name", "--device", "cuda", "--gpu-memory", "24GiB")
    assert card.rows["MLP", "F8_E4M3"]["on_cuda"] == "packed"
    assert card.facts["memory"]["max_context"] == 262144


def test_experts_one_by_one(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, {**MIXTURE, "quantization_config": MODELOPT},
            lambda name: "NVFP4" if ".experts." in name and not name.startswith("mtp.") else "BF16")
    report = inspect("org/name", "--memory", "64MiB")
    assert report.code == 0, report.error
    rows = report.rows
    assert rows["experts", "NVFP4"]["layers"] == 8 and rows["experts", "NVFP4"]["bits"] == pytest.approx(4.5, abs=0.01)
    assert rows["experts", "NVFP4"]["parameters"] == 8 * 4 * 3 * 128 * 256
    assert rows["shared experts", "BF16"]["parameters"] == 8 * 3 * 128 * 256
    assert "gate" in rows["norms and routers", "BF16"]["weights"] and report.facts["warnings"] == []


def test_a_gguf_file_and_a_revision(hub: LocalHub, inspect: Callable[..., Report], tmp_path: Path) -> None:
    path = random_file(tmp_path / "m-Q8_0.gguf", "Q8_0")
    hub.files |= {"q/m-Q8_0.gguf": path.read_bytes(), "m-Q4_K_M.gguf": b"GGUF"}
    for name in ("org/name@main:q/m-Q8_0.gguf", f"org/name@{COMMIT}:Q8_0"):
        report = inspect(name, "--memory", "64MiB")
        assert report.code == 0, report.error
        assert report.rows["attention", "Q8_0"]["bits"] == 8.5 and report.facts["model"] == "org/name/q/m-Q8_0.gguf"
        assert report.facts["config"]["hidden_size"] == BLOCKY.hidden_size
    local = inspect(str(path), "--memory", "64MiB")
    assert local.facts["layers"] == report.facts["layers"]
    header = path.read_bytes()[:len(path.read_bytes()) // 2]
    (tmp_path / "half.gguf").write_bytes(header)
    half = inspect(str(tmp_path / "half.gguf"))
    assert half.code == 2 and "is truncated or corrupt" in half.error and half.facts["layers"] == local.facts["layers"]
    assert "give one" in inspect("org/name@main:Q8_0", "--revision", "v1").error


# Warnings


def test_warnings_about_quantized_parts(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, {**SMALL, "quantization_config": MODELOPT}, lambda name: "NVFP4")
    report = inspect("org/name")
    assert report.code == 0, report.error
    assert "self_attn.q_proj has 4 bits in 2 layers (NVFP4)" in report.warnings
    assert "perplexity 2 to 6 times worse" in report.warnings
    assert "in_proj_a or in_proj_b is quantized in 6 layers (NVFP4)" in report.warnings
    assert "the MTP head is quantized (NVFP4)" in report.warnings
    publish(hub, {**SMALL, "quantization_config": MODELOPT},
            lambda name: "NVFP4" if ".mlp." in name and name.startswith("model.") else "BF16")
    assert inspect("org/name").facts["warnings"] == []


def test_warnings_about_missing_files(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, SMALL, lambda name: "BF16", shards=3, head=False)
    for name in ("tokenizer.json", "chat_template.jinja", "model-00002-of-00003.safetensors"):
        del hub.files[name]
    report = inspect("org/name")
    assert report.code == 2 and "names the shard 'model-00002-of-00003.safetensors', which is absent" in report.error
    for warning in ("1 of 3 shards are absent: 'model-00002-of-00003.safetensors'", "tokenizer.json is absent",
                    "there is no chat template", "announces a multi-token-prediction head, and no file has one"):
        assert warning in report.warnings
    assert report.facts["layers"] and "absent" in report.facts["refused"]


def test_missing_scales_are_named(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    tensors = tensors_of(SMALL, lambda name: "FP8" if ".mlp." in name else "BF16")
    del tensors["model.language_model.layers.0.mlp.up_proj.weight_scale_inv"]
    del tensors["model.language_model.layers.5.mlp.up_proj.weight_scale_inv"]
    files, data = files_of({**SMALL, "quantization_config": BLOCK_FP8}, tensors)
    hub.files |= files
    hub.zeros |= data
    report = inspect("org/name")
    assert report.code == 2 and "layers.0.mlp.up_proj.weight" in report.error
    assert "2 weights cannot be read" in report.warnings and report.rows["MLP", "F8_E4M3"]["layers"] == 8


def test_unknown_quantizations_are_described(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, {**SMALL, "quantization_config": {"quant_method": "quip"}}, lambda name: "BF16")
    report = inspect("org/name")
    assert report.code == 2 and "quant_method 'quip' is not supported" in report.error
    assert report.rows["GDN", "BF16"]["layers"] == 6 and "memory" not in report.facts
    assert "quip" in report.facts["refused"]
    hub.files["config.json"] = json.dumps({**SMALL, "architectures": ["MambaForCausalLM"], "model_type": "mamba",
                                           "text_config": {}}).encode()
    report = inspect("org/name")
    assert report.code == 2 and report.rows["GDN", "BF16"]["layers"] == 6 and "config" not in report.facts


def test_tables_for_people(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    publish(hub, {**SMALL, "quantization_config": MODELOPT}, lambda name: "NVFP4")
    assert main(["inspect", "org/name"]) == 0
    shown = capsys.readouterr().out
    assert "MLP                     8  NVFP4       4.5" in shown and "\nwarning: self_attn.q_proj has 4 bits" in shown


# Hostile hubs


def test_a_giant_header_is_not_fetched(hub: LocalHub, inspect: Callable[..., Report]) -> None:
    publish(hub, SMALL, lambda name: "BF16")
    hub.files["model.safetensors"] = (2 << 30).to_bytes(8, "little") + b"{"
    hub.zeros["model.safetensors"] = 4 << 30
    report = inspect("org/name")
    assert report.code == 2 and f"announces a header of {2 << 30} bytes" in report.error
    assert hub.bytes_delivered() < 1 << 20


def test_a_hub_that_ignores_ranges(hub: LocalHub, inspect: Callable[..., Report],
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    hub.ranges = False
    publish(hub, MIXED, mixed, shards=2)
    assert inspect("org/name").code == 0
    assert hub.bytes_delivered() < 40 << 20  # what was on its way when the connection was closed
    monkeypatch.setattr(ranges, "_MAX_SKIPPED", 1000)
    monkeypatch.setattr(ranges, "_FIRST", 1024)
    report = inspect("org/name")
    assert report.code == 2 and "the hub ignores byte ranges" in report.error and "deltic pull" in report.error


def answers(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(key.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def loops(handler: BaseHTTPRequestHandler) -> None:
    answers(302, b"", Location=handler.path)(handler)


def waits(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.6)
    handler.close_connection = True


def drips(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.close_connection = True
    with suppress(OSError):  # the client has given up
        for _ in range(20):
            handler.wfile.write(b"{")
            time.sleep(0.05)


LISTING = "/api/models/org/name"
WRONG_RANGE = answers(206, b"xx", Content_Range="bytes 5-6/7")


@pytest.mark.parametrize(("place", "answer", "hint"), [
    (LISTING, answers(200, b"[" * 100_000), "list of the files of org/name is not readable"),
    (LISTING, answers(200, b'{"sha": "main", "siblings": []}'), "is not readable; set HF_ENDPOINT"),
    (LISTING, answers(200, b'{"sha": "%s", "siblings": [{"rfilename": 5}]}' % COMMIT.encode()), "is not readable"),
    (LISTING, answers(200, b"{}", Content_Encoding="gzip"), "compresses"),
    (LISTING, answers(401, b"no"), "set HF_TOKEN"), (LISTING, answers(404, b"<html>"), "check the spelling"),
    (LISTING, loops, "cannot be reached (Exceeded maximum allowed redirects"),
    (LISTING, waits, "cannot be reached (timed out"), (LISTING, drips, "the hub sends too slowly"),
    ("config.json", answers(206, b"{", Content_Range="bytes 0-0/1"), "which has"),
    ("config.json", WRONG_RANGE, "the hub sends 'bytes 5-6/7' of org/name/'config.json'"),
    ("config.json", answers(200, b"<html>" * 999), "does not hold valid JSON"),
    ("config.json", answers(200, b"{"), "ended after 1 bytes while it was read"),
    ("config.json", answers(403, b""), "set HF_TOKEN"), ("model.safetensors", loops, "Exceeded maximum allowed"),
    ("model.safetensors", answers(404, b"", X_Error_Code="EntryNotFound"), "check the spelling, and HF_ENDPOINT"),
    ("model.safetensors", waits, "cannot be reached (timed out"), ("model.safetensors", drips, "sends too slowly"),
    ("model.safetensors", answers(200, bytes(1 << 20)), "model.safetensors does not hold valid JSON"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_errors_of_a_hub_say_what_to_do(hub: LocalHub, inspect: Callable[..., Report], place: str, hint: str,
                                        answer: Callable[[BaseHTTPRequestHandler], None],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, SMALL, lambda name: "BF16")
    hub.instead[place] = answer
    monkeypatch.setattr(ranges, "_TIMEOUT", 0.3)
    monkeypatch.setattr(ranges, "_PATIENCE", 0.2)
    monkeypatch.setattr(ranges, "_SLOWEST", 1 << 60)
    started = time.monotonic()
    report = inspect("org/name")
    assert report.code == 2 and hint in report.error, report.error
    assert time.monotonic() - started < 5 and len(report.error) < 1500


def test_token_and_offline_mode(hub: LocalHub, inspect: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, SMALL, lambda name: "BF16")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert inspect("org/name").code == 0
    assert {headers.get("authorization") for headers in hub.headers} == {"Bearer hf_secret"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    report = inspect("org/name")
    assert report.code == 2 and "is not downloaded" in report.error and "unset HF_HUB_OFFLINE" in report.error
    hub.headers.clear()


def test_tokens_do_not_follow_to_other_hosts(hub: LocalHub, inspect: Callable[..., Report], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, SMALL, lambda name: "BF16")
    hub.instead["config.json"] = answers(302, b"", Location=f"{hub.url.replace('127.0.0.1', 'localhost')}/elsewhere")
    hub.instead["/elsewhere"] = lambda handler: answers(200, hub.files["config.json"])(handler)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert inspect("org/name").code == 0
    assert [headers for headers in hub.headers if "authorization" not in headers]


def test_names_from_files_cannot_control_the_terminal(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {**tensors_of(SMALL, lambda name: "BF16"), "a.\x1b[2Jb\n.weight": ("BF16", (1,))}
    files, data = files_of(SMALL, tensors)
    hub.files |= files
    hub.zeros |= data
    assert main(["inspect", "org/name"]) == 2
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and "\\x1b[2Jb" in shown.out


def test_the_number_of_headers_is_limited(hub: LocalHub, inspect: Callable[..., Report],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, SMALL, lambda name: "BF16", shards=3)
    monkeypatch.setattr(survey, "MAX_SHARDS", 2)
    report = inspect("org/name")
    assert report.code == 2 and "has 3 safetensors files, more than any model" in report.error


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A copy with a byte changed, some left out, or some doubled."""
    found, place = bytearray(content), rng.randrange(len(content))
    size = rng.randrange(1, 40)
    match rng.randrange(4):
        case 0:
            found[place] = rng.randrange(256)
        case 1:
            found[place] = rng.choice(b'09[]{}",:-')
        case 2:
            del found[place:place + size]
        case 3:
            found[place:place] = found[place:place + size]
    return bytes(found) or b"x"


def test_mutated_files_raise_errors_alone(hub: LocalHub, tmp_path: Path) -> None:
    publish(hub, {**SMALL, "quantization_config": MODELOPT}, mixed, shards=2)
    directory, rng, outcomes = save(hub, tmp_path / "headers"), random.Random(5), set[str]()
    args = command_parser("inspect").parse_args(["x", "--memory", "32MiB"])
    for name in [name for name in hub.files if name.startswith(("config", "model"))] * 10:
        (directory / name).write_bytes(mutated(hub.files[name], rng))
        try:
            found = survey.survey(str(directory))
            assert found
            survey_facts(found, args)
            outcomes.add("refused" if found.refusal else "described")
        except DelticError as error:
            assert str(directory) in str(error), error
            outcomes.add("error")
        (directory / name).write_bytes(hub.files[name])
    assert outcomes == {"error", "refused", "described"}
