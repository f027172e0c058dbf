"""Finding a model: directories, the embedded one, and a hub that answers, refuses or is away."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from support import load_directory
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from deltic.errors import ModelError
from deltic.loader.catalog import select
from deltic.loader.hub import resolve
from deltic.loader.model_files import open_model

TEXT = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
            "linear_key_head_dim": 4, "linear_value_head_dim": 4, "eos_token_id": 3}


@pytest.fixture
def model_directory(tmp_path):
    path = tmp_path / "model"
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT)).save_pretrained(path)
    return path


def rewrite(path, **changes):
    mapping = json.loads(path.read_text()) if path.exists() else {}
    mapping = {key: value for key, value in {**mapping, **changes}.items() if value is not ...}
    path.write_text(json.dumps(mapping))


# Local names.


def test_directory_is_itself(model_directory, monkeypatch):
    assert resolve(model_directory) == model_directory
    assert resolve(str(model_directory)) == model_directory
    monkeypatch.setenv("HOME", str(model_directory.parent))
    assert resolve("~/model") == model_directory
    monkeypatch.chdir(model_directory.parent)
    assert resolve("model") == Path("model")


def test_local_models_have_no_revision(model_directory):
    for name in (None, "tiny", model_directory, str(model_directory)):
        with pytest.raises(ModelError, match=r"leave out the revision \(main\), which is for models of the"):
            resolve(name, "main")


def test_embedded_model_loads():
    for name in (None, "tiny"):
        files = open_model(name)
        assert files.config.eos_token_ids and files.generation.eos_token_ids
    assert len(load_directory(files.path, files.config)) > 10


def test_embedded_model_that_was_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("deltic.loader.hub.files", lambda _: tmp_path)
    with pytest.raises(ModelError, match="reinstall"):
        resolve("tiny")


@pytest.mark.parametrize("name", [
    "", "nothing-here", "./org/name", "/absent/path", "a/b/c", "org/", "a b/c", "x" * 5000, "~nobody-of-this-name/x",
    "a\0b", "https://other.example/org/name", "-a/b"])
def test_wrong_names_list_accepted_forms(name):
    with pytest.raises(ModelError, match=r"a directory with config.json.*Hugging Face name.*tiny") as caught:
        resolve(name)
    assert len(str(caught.value)) < 700


def test_absent_path_object_is_never_looked_up_on_the_hub():
    with pytest.raises(ModelError, match="no directory"):
        resolve(Path("org/name"))


def test_file_is_refused_with_what_is_accepted(model_directory):
    with pytest.raises(ModelError, match=r"is a file.*a directory with"):
        resolve(model_directory / "config.json")


# Reading a directory.


def test_open_model_joins_config_and_generation(model_directory):
    (model_directory / "generation_config.json").unlink(missing_ok=True)
    assert open_model(model_directory).generation.eos_token_ids == (3,)
    rewrite(model_directory / "generation_config.json", temperature=0.5, eos_token_id=[5, 3])
    files = open_model(model_directory)
    assert files.path == model_directory and files.config.hidden_size == 8
    assert files.generation.eos_token_ids == (5, 3) and files.generation.temperature == 0.5


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 99999, '{"a": ' + "9" * 9999 + "}", "\xff"])
def test_broken_json_names_its_file(model_directory, name, text):
    (model_directory / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=f"/{name}"):
        open_model(model_directory)


def test_bad_values_name_file_and_key(model_directory):
    rewrite(model_directory / "generation_config.json", top_k=-1)
    with pytest.raises(ModelError, match=r"generation_config.json: top_k"):
        open_model(model_directory)
    rewrite(model_directory / "config.json", hidden_size=0)
    with pytest.raises(ModelError, match=r"config.json: hidden_size"):
        open_model(model_directory)


def test_absent_or_giant_config_is_refused(model_directory):
    path = model_directory / "config.json"
    path.write_text(" " * (5 << 20))
    with pytest.raises(ModelError, match=r"config.json is larger"):
        open_model(model_directory)
    path.unlink()
    with pytest.raises(ModelError, match=r"config.json is absent"):
        open_model(model_directory)
    path.mkdir()
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        open_model(model_directory)


def test_checkpoint_without_a_head_is_tied_unless_the_config_denies_it(model_directory):
    weights = model_directory / "model.safetensors"
    rewrite(model_directory / "config.json", tie_word_embeddings=...)
    assert not open_model(model_directory).config.tie_word_embeddings
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    save_file(tensors, weights)
    files = open_model(model_directory)
    assert files.config.tie_word_embeddings
    assert "lm_head.weight" not in load_directory(files.path, files.config)
    rewrite(model_directory / "config.json", tie_word_embeddings=False)
    assert not open_model(model_directory).config.tie_word_embeddings


def test_nested_config_opens(model_directory):
    text = Qwen3_5TextConfig(**TEXT).to_dict()
    Qwen3_5Config(text_config=text).save_pretrained(model_directory)
    assert open_model(model_directory).config.num_hidden_layers == 4


# The hub.


class Hub:
    """Stands for the hub: what it lists, what is cached, and what it raises."""

    def __init__(self, directory):
        self.directory, self.calls, self.cached = directory, [], set()
        self.sizes = {"model.safetensors": 1000, "config.json": 10, "pytorch_model.bin": 1 << 60}
        self.listing_error = self.download_error = self.local_error = None

    def model_info(self, repository, **options):
        self.calls.append(("info", repository, options))
        if self.listing_error:
            raise self.listing_error
        siblings = [SimpleNamespace(rfilename=name, size=size, lfs=None, blob_id=None)
                    for name, size in self.sizes.items()]
        return SimpleNamespace(sha=self.directory.name, siblings=siblings)

    def snapshot_download(self, repository, **options):
        self.calls.append(("download", repository, options))
        error = self.local_error if options.get("local_files_only") else self.download_error
        if error:
            raise error
        return str(self.directory)

    def verify_repo_checksums(self, repository, revision, token):
        return SimpleNamespace(mismatches=[])

    def try_to_load_from_cache(self, repository, filename, revision):
        return f"/cache/{filename}" if filename in self.cached else None


@pytest.fixture
def hub(monkeypatch, model_directory, tmp_path):
    fake = Hub(model_directory)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", fake.try_to_load_from_cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1500))
    monkeypatch.chdir(tmp_path)
    return fake


def refusal(kind, status):
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://hub"))
    return kind("the hub says no", response=response)


def test_download_asks_for_what_loading_needs(hub, model_directory):
    files = open_model("org/name", revision="v1", token="secret")
    assert files.path == model_directory
    (_, repository, listing), (_, same, download) = hub.calls
    assert repository == same == "org/name"
    assert listing == {"revision": "v1", "files_metadata": True, "token": "secret"}
    assert (download["revision"], download["token"], download["tqdm_class"]) == ("v1", "secret", None)
    assert download["allow_patterns"][:4] == ["*.safetensors", "*.json", "*.jinja", "*.txt"]
    assert "checkpoint-*/*" in download["ignore_patterns"]


def test_progress_can_be_silenced(hub, capsys):
    resolve("org/name", progress=False)
    bar = hub.calls[-1][2]["tqdm_class"]
    with bar(total=3, desc="x") as quiet:
        quiet.update(3)
    assert quiet.disable and capsys.readouterr().err == ""


def test_room_is_checked_before_the_download(hub):
    hub.sizes["model.safetensors"] = 2_000_000_000
    with pytest.raises(ModelError, match=r"org/name needs 2\.00 GB, but .*yet has 0\.00 MB free.*HF_HOME"):
        resolve("org/name")
    assert [call[0] for call in hub.calls] == ["info"]
    hub.cached = {"model.safetensors"}
    assert resolve("org/name") == hub.directory


TYPES = ("BF16", "Q8_0", "Q4_K_M", "UD-Q4_K_M", "Q4_K_S")
FILES = {
    "safetensors first": (["model.safetensors", "m-Q4_K_M.gguf", "pytorch_model.bin", "sparse_linear.pt", "README.md",
                           "config.json", "onnx/model.onnx", "training_args.bin"], "",
                          ["config.json", "model.safetensors", "sparse_linear.pt"]),
    "what torch has saved": (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "x.bin",
                              "pytorch_model.bin.index.json", "colbert_linear.pt", "m.gguf",
                              "2_Dense/pytorch_model.bin", "mtp.safetensors"], "",
                             ["2_Dense/pytorch_model.bin", "colbert_linear.pt", "mtp.safetensors",
                              "pytorch_model-00001-of-00002.bin",
                              "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]),
    "the only one": (["m.gguf", "README.md", "imatrix.gguf", "mtp/weights.safetensors"], "",
                     ["m.gguf", "mtp/weights.safetensors"]),
    "a common type": ([f"m-{kind}.gguf" for kind in TYPES], "", ["m-Q4_K_M.gguf"]),
    "a type": ([f"m-{kind}.gguf" for kind in TYPES], ":q8_0", ["m-Q8_0.gguf"]),
    "a longer type": ([f"m-{kind}.gguf" for kind in TYPES], ":UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
    "a name": ([f"m.{kind}.gguf" for kind in TYPES], ":m.Q4_K_S.gguf", ["m.Q4_K_S.gguf"]),
    "beside safetensors": (["model.safetensors", "m[1]-Q4_K_M.gguf"], ":Q4_K_M", ["m[1]-Q4_K_M.gguf"]),
    "parts": ([f"{kind}/m-{kind}-0000{n}-of-00002.gguf" for kind in TYPES for n in (1, 2)], ":BF16",
              ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
    "states of a training": (["config.json", "model.safetensors", "checkpoint-200/model.safetensors", "optimizer.json",
                              "runs/x.json", "checkpoint-200/optimizer.pt", "1_Pooling/config.json"], "",
                             ["1_Pooling/config.json", "config.json", "model.safetensors"]),
    "one of two forms": (["consolidated.safetensors", "model-00001-of-00002.safetensors", "onnx/config.json",
                          "model-00002-of-00002.safetensors", "original/consolidated.safetensors",
                          "model.safetensors.index.json", "params.json"], "",
                         ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json", "params.json"]),
    "a tower at the top": (["mmproj-F16.gguf", "mmproj-BF16.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf",
                            "Q8_0/m-Q8_0-00002-of-00002.gguf", "a/b/m-Q4_K_M.gguf"], ":Q8_0",
                           ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf", "mmproj-BF16.gguf"]),
    "a tower": (["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf", "other/mmproj-BF16.gguf"], "",
                ["m-Q4_K_M.gguf", "mmproj-F16.gguf"])}


@pytest.mark.parametrize("case", FILES)
def test_selected_files(case):
    names, wanted, expected = FILES[case]
    chosen = select("org/name", reversed(names), wanted[1:] or None)
    assert sorted(filter(chosen.has, names)) == expected
    assert (chosen.file or "").endswith(".gguf") == expected[0].endswith(".gguf")
    assert chosen.file in (None, expected[0])


@pytest.mark.parametrize("names, wanted, said", [
    (["adapter_config.json", "adapter_model.safetensors"], None, "org/name is an adapter .LoRA. and no model: merge"),
    (["consolidated.safetensors", "params.json"], None, "no weights that can be read"),
    (["model.onnx"], None, "org/name has no weights that can be read"),
    (["model.safetensors"], "Q8_0", "has no GGUF files: leave out :Q8_0"),
    (["a-Q2_K.gguf", "b-Q3_K.gguf"], None, "several GGUF files; name one, as org/name:NAME, of 'a-Q2_K.gguf', 'b-Q3_K"),
    (["a-Q2_K.gguf"], "Q3_K", "not one GGUF file of this type or name: 'Q3_K'; .* 'a-Q2_K.gguf'"),
    (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "not one GGUF file"),
    ([f"{n:02}-Q9.gguf" for n in range(40)], None, "and 28 others")])
def test_repositories_without_a_model(names, wanted, said):
    with pytest.raises(ModelError, match=said):
        select("org/name", names, wanted)


@pytest.mark.parametrize("error,hint", [
    (refusal(errors.GatedRepoError, 403), "gated: accept its terms at https://huggingface.co/org/name.*HF_TOKEN"),
    (refusal(errors.RepositoryNotFoundError, 404), "neither a directory here nor.*spelling.*HF_TOKEN"),
    (refusal(errors.RevisionNotFoundError, 404), "no revision 'v9'"),
    (refusal(errors.HfHubHTTPError, 401), "refuses access.*HF_TOKEN"),
    (refusal(errors.HfHubHTTPError, 403), "refuses access.*HF_TOKEN"),
    (refusal(errors.HfHubHTTPError, 429), "cannot be downloaded.*the hub says no"),
    (errors.HFValidationError("bad id"), "cannot be downloaded.*bad id"),
    (RuntimeError("transfer broke"), "cannot be downloaded.*transfer broke"),
    (OSError(28, "No space left on device"), "cannot write to .*yet: No space left.*HF_HOME"),
    (PermissionError(13, "Permission denied"), "cannot write to .*Permission denied"),
])
@pytest.mark.parametrize("step", ["listing_error", "download_error"])
def test_refusals_name_a_remedy(hub, step, error, hint):
    setattr(hub, step, error)
    with pytest.raises(ModelError, match=hint):
        resolve("org/name", revision="v9")


@pytest.mark.parametrize("error", [httpx2.ConnectError("no route"), httpx2.ReadTimeout("slow"),
                                   errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), ConnectionResetError(104, "reset"),
                                   refusal(errors.HfHubHTTPError, 503)])
@pytest.mark.parametrize("step", ["listing_error", "download_error"])
def test_offline_uses_the_copy_or_raises(hub, step, error, caplog):
    setattr(hub, step, error)
    with caplog.at_level(logging.WARNING):
        assert resolve("org/name") == hub.directory
    assert hub.calls[-1][2]["local_files_only"] and "cannot be reached" in caplog.text
    hub.local_error = errors.LocalEntryNotFoundError("not cached")
    with pytest.raises(ModelError, match=r"not downloaded.*cannot be reached.*HF_HUB_OFFLINE.*tiny"):
        resolve("org/name")


def test_real_client_offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot be reached.*HF_HUB_OFFLINE"):
        resolve("org/name")
