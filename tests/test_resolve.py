import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from flashmoe_jax import resolve
from flashmoe_jax.errors import CheckpointError, ConfigError
from flashmoe_jax.resolve import default_cache_dir, resolve_model


def hf_dir(path: Path, weights: bytes = b"12345678") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


class FakeConverter:
    """Counts its calls and makes what looks like a model directory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, Path]] = []
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.has_started = threading.Event()

    def __call__(self, source: Path, target: Path) -> None:
        self.calls.append((source, target))
        self.has_started.set()
        assert self.may_finish.wait(30)
        target.mkdir()
        (target / "manifest.json").write_text("{}")


def test_a_model_directory_is_taken_as_it_is(tmp_path: Path):
    (tmp_path / "manifest.json").write_text("{}")
    convert = FakeConverter()
    assert resolve_model(tmp_path, tmp_path / "cache", convert=convert) == tmp_path
    assert not convert.calls
    assert not (tmp_path / "cache").exists()


def test_a_hugging_face_directory_is_converted_once(tmp_path: Path):
    source, cache, convert, said = hf_dir(tmp_path / "my model"), tmp_path / "cache", FakeConverter(), []
    first = resolve_model(source, cache, convert=convert, say=said.append)
    assert resolve_model(str(source), cache, convert=convert, say=said.append) == first
    assert convert.calls == [(source, first)]
    assert first.parent == cache / "models"
    assert first.name.startswith("my_model-")
    assert said == [f"first use of {source}: converting 0.0 MB into {first}"]


def test_a_changed_source_is_converted_again(tmp_path: Path):
    source, convert, said = hf_dir(tmp_path / "m"), FakeConverter(), []
    paths = [resolve_model(source, tmp_path / "c", convert=convert, say=said.append)]
    hf_dir(source, b"123456789")
    paths.append(resolve_model(source, tmp_path / "c", convert=convert, say=said.append))
    os.utime(source / "model.safetensors", ns=(1, 1))
    paths.append(resolve_model(source, tmp_path / "c", convert=convert, say=said.append))
    (source / "config.json").write_text("[]")
    paths.append(resolve_model(source, tmp_path / "c", convert=convert, say=said.append))
    assert len(set(paths)) == 4
    assert f"{paths[0]} is of an earlier state of this model and may be deleted" in said
    (source / "README.md").write_text("no part of the model")
    assert resolve_model(source, tmp_path / "c", convert=convert) == paths[-1]


def test_the_second_of_two_first_uses_waits_for_the_first(tmp_path: Path):
    source, convert, said, found = hf_dir(tmp_path / "m"), FakeConverter(), [], []
    convert.may_finish.clear()

    def use() -> None:
        found.append(resolve_model(source, tmp_path / "c", convert=convert, say=said.append))

    threads = [threading.Thread(target=use) for _ in range(2)]
    threads[0].start()
    assert convert.has_started.wait(30)
    threads[1].start()
    while f"another process is converting {source}; waiting for it" not in said:
        threads[1].join(0.01)
        assert threads[1].is_alive()
    convert.may_finish.set()
    for thread in threads:
        thread.join(30)
    assert len(convert.calls) == 1
    assert found[0] == found[1]


def test_a_failed_conversion_frees_the_lock(tmp_path: Path):
    source, convert = hf_dir(tmp_path / "m"), FakeConverter()

    def fail(source: Path, target: Path) -> None:
        raise CheckpointError("wrong shape")

    with pytest.raises(CheckpointError, match="wrong shape"):
        resolve_model(source, tmp_path / "c", convert=fail)
    assert resolve_model(source, tmp_path / "c", convert=convert).is_dir()


def test_names_that_are_no_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist; --model takes a directory, or a hub name"):
        resolve_model(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match=r"holds neither manifest\.json .* nor config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; --model takes a directory"):
        resolve_model(tmp_path / "file")


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path):
    source = hf_dir(tmp_path / "m")
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"cache directory .* cannot be written .*--cache-dir"):
        resolve_model(source, tmp_path / "cache", convert=FakeConverter())


def test_the_cache_directory_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(resolve.CACHE_VARIABLE, str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv(resolve.CACHE_VARIABLE)
    assert default_cache_dir().name == "flashmoe_jax"


def test_hub_names_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    asked = {}

    def snapshot_download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(hf_dir(tmp_path / "snapshot"))

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    said: list[str] = []
    path = resolve_model("org/some-model@v1.0", tmp_path / "c", convert=FakeConverter(), say=said.append)
    assert path.name.startswith("snapshot-")
    assert asked["repository"] == "org/some-model"
    assert asked["revision"] == "v1.0"
    assert "*.safetensors" in asked["allow_patterns"]
    assert said[0] == "org/some-model is no directory here; asking the Hugging Face hub for it"

    def offline(repository: str, **options: object) -> str:
        raise ConnectionError("no route to host\nmore")

    hub.snapshot_download = offline
    with pytest.raises(CheckpointError, match=r"\(ConnectionError: no route to host\); .*hf download org/m"):
        resolve_model("org/m", tmp_path / "c", say=said.append)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'flashmoe-jax\[hub\]'"):
        resolve_model("org/m", tmp_path / "c")


def test_the_hub_library_offline_says_what_to_do(tmp_path: Path):
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub is not installed")
    code = (
        "from flashmoe_jax.resolve import resolve_model\n"
        "from flashmoe_jax.errors import CheckpointError\n"
        "try: resolve_model('org/no-such-model')\n"
        "except CheckpointError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "give --model DIR" in done.stdout
    assert done.stdout.count("\n") == 1


def test_the_format_is_that_of_the_model_directory():
    from flashmoe_jax.model_dir import FORMAT_VERSION

    assert resolve.FORMAT_VERSION == FORMAT_VERSION


def test_resolving_needs_no_jax(tmp_path: Path):
    (tmp_path / "manifest.json").write_text(json.dumps({}))
    code = (
        "import sys; from flashmoe_jax.resolve import resolve_model; "
        f"resolve_model({str(tmp_path)!r}); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
