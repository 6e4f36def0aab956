"""Experts on an S3 endpoint (moto's), through every reader that can reach it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import TOP_K, make_engine, make_model
from tiny_models import tiny_hf_config

from flashmoe_jax.errors import CheckpointError, ConfigError, DamagedRecordError
from flashmoe_jax.experts.shard import ARRAY_NAME, shard_key
from flashmoe_jax.experts.store import ExpertStore

moto_server = pytest.importorskip("moto.server", reason="an S3 endpoint needs moto[server] (extra: dev)")

BUCKET = "models"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return make_model(tmp_path_factory.mktemp("s3"), tiny_hf_config("olmoe", num_experts=8))


@pytest.fixture(scope="module")
def spec(endpoint: str, model) -> dict[str, Any]:
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    for path in (p for p in Path(model.path).rglob("*") if p.is_file()):
        client.upload_file(str(path), BUCKET, f"tiny/{path.relative_to(model.path)}")
    return {"driver": "s3", "bucket": BUCKET, "endpoint": endpoint, "aws_region": "us-east-1", "path": "tiny/"}


def open_store(spec: dict[str, Any], model, **options: Any) -> ExpertStore:
    return ExpertStore.open(spec, model.directory.layout, model.directory.manifest.checksums, **options)


@pytest.mark.parametrize("options", [{"reader": "auto"}, {"reader": "array"}, {"cache_bytes": 1 << 20}])
def test_records_are_the_local_ones(options: dict[str, Any], spec, model):
    layout = model.directory.layout
    out, local = (np.zeros(layout.record_words, layout.word_dtype) for _ in range(2))
    with open_store(spec, model, **options) as store, model.directory.store(reader="range") as files:
        assert store.io_mode == "remote"
        assert store.reader == ("range" if options.get("reader") == "auto" else "array")
        for _ in range(2):  # the second time from the cache, where there is one
            for layer, expert in ((0, 0), (1, 7), (0, 5)):
                store.read_into(layer, expert, out).result()
                files.read_into(layer, expert, local).result()
                np.testing.assert_array_equal(out, local)


def test_generation_is_the_local_one(spec, model):
    prompt = [[3, 4, 5, 6, 7]]
    logits = []
    for store in (open_store(spec, model), None):
        with make_engine(model, slots=TOP_K, store=store, prefetch="on") as engine:
            session = engine.session(1)
            steps = [np.asarray(session.prefill(prompt))]
            steps += [np.asarray(session.decode(np.array([token]))) for token in (9, 8, 11)]
            logits.append(np.stack(steps))
    np.testing.assert_array_equal(*logits)


def test_what_cannot_be_read_is_one_line(endpoint: str, spec, model):
    import boto3

    with pytest.raises(ConfigError, match=r"reader direct reads local files, and s3:tiny/experts.zarr/ is none"):
        open_store(spec, model, reader="direct")
    with pytest.raises(CheckpointError, match=r"zarr\.json is missing"):
        open_store(spec | {"path": "elsewhere/"}, model)
    with open_store(spec, model) as store:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.delete_object(Bucket=BUCKET, Key=f"tiny/{ARRAY_NAME}/{shard_key(1)}")
        out = np.zeros(store.layout.record_words, store.layout.word_dtype)
        with pytest.raises(DamagedRecordError, match=r"layer 1 expert 2 .*missing"):
            store.read_into(1, 2, out).result()
