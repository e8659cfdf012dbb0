"""Features: the encoder's own, extracted once, in chunks, by one process or by several."""

import io
import os
import shutil
from functools import partial
from itertools import combinations

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_trainings import ALONE, CPU
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from stop_mim.data.augment import TestView, normalise, resize_batch
from stop_mim.data.sources import open_source, parquet
from stop_mim.data.stored import store_images
from stop_mim.errors import InputError
from stop_mim.evaluation import features as stored
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.features import extract_features, features_folder
from stop_mim.evaluation.subject import Subject
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.encoder import TOKENS_ONLY, Dimensions, Encoder, create_encoder
from stop_mim.models.encoder_file import save_encoder
from stop_mim.models.fingerprint import encoder_fingerprint
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import Ranks

VIEW = TestView((32, 32))


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return create_encoder(Dimensions(24, 2, 2), image_size=32, patch_size=8).eval()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(stored, "CHUNK_IMAGES", 10)


def a_subject(encoder, ranks=ALONE, layers=2, progress=lambda done, total: None):
    config = evaluate_config()(speed=DeviceConfig(workers=0, batch_size_per_device=7))
    subject = Subject("toy", encoder, None, config, ranks, lambda name: progress)
    subject.need_layers(layers)
    return subject


def extract(encoder, source, images=None, **options):
    return extract_features(a_subject(encoder, **options), source, VIEW, images)


def chunk_file(encoder, source, chunk):
    return features_folder(a_subject(encoder), source, VIEW) / f"chunk-{chunk:06d}.safetensors"


def test_chunks_hold_the_features_of_every_image_in_order(encoder, colours, small_chunks, monkeypatch):
    source = open_source(str(colours))
    features = extract(encoder, source)
    assert len(features.chunks) == 5
    assert features.indices.tolist() == list(range(48))
    pixels = torch.cat([resize_batch(source.read(index)[None], (32, 32)) for index in range(48)])
    expected = encoder.embed(normalise(pixels, encoder.mean, encoder.std), 2).detach()
    torch.testing.assert_close(features.on(CPU), expected, atol=0.02, rtol=0.01)
    torch.testing.assert_close(features.last(1).on(CPU), features.on(CPU)[:, 24:])
    some = torch.tensor([3, 47, 11, 10, 9])
    assert torch.equal(features.rows(some), features.on(CPU)[some])
    for spare, chunks in ((0, 1), (-1, 5)):
        monkeypatch.setattr(stored, "resident_budget", lambda *_, spare=spare: features.on(CPU).nbytes + spare)
        assert len(features.chunks_for(ALONE)) == chunks, "one chunk on the device where all of them fit"
    part = features.of_images(np.array([40, 2]))
    assert part.indices.tolist() == [2, 40]
    assert torch.equal(part.on(CPU), features.on(CPU)[[2, 40]])
    assert features.of_images(np.arange(60)) is features


def test_what_is_there_is_not_computed_again(encoder, colours, small_chunks):
    source, seen = open_source(str(colours)), []
    first = extract(encoder, source).on(CPU)
    chunk_file(encoder, source, 2).unlink()
    again = extract(encoder, source, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (10, 10)
    assert torch.equal(again.on(CPU), first)


def test_several_processes_share_the_chunks(encoder, colours, small_chunks, monkeypatch):
    monkeypatch.setattr(stored, "wait_for_all", lambda ranks: None)
    source = open_source(str(colours))
    with pytest.raises(InputError, match=r"chunk-000000.safetensors"):
        extract(encoder, source, ranks=Ranks(1, 2, 2, CPU))  # the other one has not done its part yet
    folder = chunk_file(encoder, source, 0).parent
    chunks = sorted(path.name for path in folder.glob("*.safetensors"))
    assert chunks == [f"chunk-{n:06d}.safetensors" for n in (1, 3)]
    shared = extract(encoder, source, ranks=Ranks(0, 2, 2, CPU)).on(CPU).clone()
    shutil.rmtree(folder)
    torch.testing.assert_close(shared, extract(encoder, source).on(CPU))


def test_images_that_cannot_be_read_are_left_out(encoder, colours, small_chunks, monkeypatch):
    whole = extract(encoder, open_source(str(colours)))
    bad = sorted((colours / "train" / "green").iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:40])
    source = open_source(str(colours))
    with pytest.raises(InputError, match="1 of the 48 images"):
        extract(encoder, source)
    monkeypatch.setattr("stop_mim.data.image_source.MAX_BAD_FRACTION", 0.5)
    features = extract(encoder, source)
    assert features.indices.tolist() == [index for index in range(48) if index != 12]
    torch.testing.assert_close(features.on(CPU), whole.on(CPU)[torch.arange(48) != 12])


def test_some_images_alone_have_the_features_that_they_have_among_all(encoder, colours, small_chunks):
    source, some = open_source(str(colours)), np.array([0, 3, *range(9, 30), 47])
    whole, seen = extract(encoder, source), []
    part = extract(encoder, source, some, progress=lambda *step: seen.append(step))
    assert (len(part.chunks), seen[-1]) == (3, (24, 24))
    assert part.indices.tolist() == some.tolist()
    torch.testing.assert_close(part.on(CPU), whole.on(CPU)[torch.from_numpy(some)], atol=2e-3, rtol=0)


def test_no_cache_mixes_up_a_file_and_its_shuffled_copy(encoder, tmp_path, monkeypatch):
    """Of the same name, size and time: neither the converted file, nor decoded images, nor features are taken for it."""
    monkeypatch.setattr(parquet, "MEMORY_LIMIT", 1)
    monkeypatch.setattr("stop_mim.data.stored.LEAST_CACHED_BYTES", 1)
    noise = np.random.default_rng(0).integers(0, 256, (40, 24, 24, 3), dtype=np.uint8)

    def features_of(pixels):
        table = pa.table({"image": [bitmap(one) for one in pixels]})
        pq.write_table(table, tmp_path / "a.parquet", compression="none", write_statistics=False)
        os.utime(tmp_path / "a.parquet", (1000, 1000))
        source = open_source(str(tmp_path / "a.parquet"))
        assert torch.equal(
            store_images(source, np.arange(40), (24, 24)).pixels, torch.tensor(pixels.copy()).permute(0, 3, 1, 2)
        )
        return (tmp_path / "a.parquet").stat().st_size, extract(encoder, source).on(CPU)

    (size, first), (other_size, shuffled) = features_of(noise), features_of(noise[::-1])
    assert size == other_size
    torch.testing.assert_close(shuffled, first.flip(0), atol=2e-3, rtol=0)
    assert not torch.allclose(first, first.flip(0), atol=0.05)
    kept = {folder: len([*(tmp_path / "cache" / folder).glob("[!.]*")]) for folder in ("arrow", "decoded", "features")}
    assert min(kept.values()) >= 2, kept


def bitmap(pixels):
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "BMP")
    return buffer.getvalue()


def test_the_folder_depends_on_all_that_decides_the_features(encoder, colours):
    source, subject = open_source(str(colours)), a_subject(encoder)
    assert subject.fingerprint == encoder_fingerprint(encoder)
    names = {
        features_folder(subject, source, VIEW).name,
        features_folder(a_subject(encoder, layers=1), source, VIEW).name,
        features_folder(subject, source, VIEW, np.arange(3)).name,
        features_folder(subject, source, VIEW, np.arange(4)).name,
        features_folder(subject, source, TestView((32, 32), 37)).name,
        features_folder(subject, open_source(str(colours), "test"), VIEW).name,
        features_folder(a_subject(encoder, Ranks(0, 1, 1, torch.device("cuda"))), source, VIEW).name,
    }
    with torch.no_grad():
        encoder.vit.blocks[0].mlp.fc1.bias[3] += 1
    names.add(features_folder(a_subject(encoder), source, VIEW).name)
    assert len(names) == 8


def test_the_fingerprint_changes_with_whatever_changes_the_features(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    plain = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, **TOKENS_ONLY}

    def variant(pool="mean", mean=0.5, **changes):
        vit = VisionTransformer(**{**plain, **changes}).eval()
        vit.load_state_dict(weights)
        encoder = Encoder(vit, (mean,) * 3, (0.5,) * 3)
        encoder.pool = pool
        return encoder

    weights = VisionTransformer(**plain).state_dict()
    found = [
        variant(),
        variant(num_heads=4),
        variant(norm_layer=partial(nn.LayerNorm, eps=0.1)),
        variant(act_layer=partial(nn.GELU, approximate="tanh")),
        variant(act_layer=nn.ReLU),
        variant(pool="cls"),
    ]
    prints = [encoder_fingerprint(encoder) for encoder in found]
    assert len({*prints}) == len(prints)
    features = [encoder.embed(images).detach() for encoder in found]
    assert not any(torch.equal(one, two) for one, two in combinations(features, 2)), "each changes the features"
    assert encoder_fingerprint(variant(mean=0.4)) not in prints
    # The same encoder has the same name from a file, at another size, and in training.
    save_encoder(found[0], tmp_path / "encoder.safetensors")
    again = load_encoder(tmp_path / "encoder.safetensors")
    again.image_size = (64, 64)
    assert encoder_fingerprint(again.train()) == prints[0]


def test_features_that_are_not_finite_are_refused(encoder, colours):
    with torch.no_grad():
        encoder.vit.norm.weight[0] = np.inf
    source = open_source(str(colours))
    with pytest.raises(InputError, match="not finite"):
        extract(encoder, source)
    assert not chunk_file(encoder, source, 0).exists()


def test_a_damaged_file_is_named(encoder, colours):
    source = open_source(str(colours))
    extract(encoder, source)
    file = chunk_file(encoder, source, 0)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"chunk-000000.*delete it"):
        extract(encoder, source)
