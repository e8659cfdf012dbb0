"""Datasets at URLs: every image once an epoch, whatever reads them, with bounded space."""

import http.server
import re
import threading
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from written_images import assert_refused, encoded, one_sentence, shades, write_parquet, write_shard

from stop_mim.data import data_files, lookahead, order
from stop_mim.data.augment import AugmentConfig, RandomCrop
from stop_mim.data.batches import Batches, Placement
from stop_mim.data.lookahead import mapped
from stop_mim.data.order import BLOCKS_TOGETHER, ShuffledOrder
from stop_mim.data.sources import open_source, parquet
from stop_mim.errors import InputError

pytestmark = pytest.mark.usefixtures("own_folders")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with ranges, as stores have them; the first requests fail."""

    failures = 0

    def send_head(self):
        if type(self).failures:
            type(self).failures -= 1
            return self.send_error(503)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return super().send_head()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.wfile.write(content[first : last + 1])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The URL of a folder, and the folder."""
    monkeypatch.setattr(data_files.time, "sleep", lambda seconds: None)
    folder = tmp_path / "served"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()


def test_shards_and_parquet_files_over_http(server, monkeypatch):
    url, folder = server
    for number in range(3):
        samples = [(f"{shade}.png", encoded(shade)) for shade in range(4 * number, 4 * number + 4)]
        write_shard(folder / f"s-{number}.tar", [*samples, (f"{4 * number}.cls", b"1")])
        write_parquet(folder / f"p-{number}.parquet", range(4 * number, 4 * number + 4), labels=[number] * 4)
    shards = open_source(f"wds:{url}/s-{{0..2}}.tar")
    assert shades(shards) == list(range(12))
    assert shards.describe(5) == f"{url}/s-1.tar#5.png"
    monkeypatch.setattr(Handler, "failures", 2)
    tables = open_source(f"{url}/p-1.parquet")
    assert shades(tables) == [4, 5, 6, 7]
    assert tables.labels["class"].tolist() == [1] * 4
    assert tables.blocks.tolist() == [4]
    assert Handler.failures == 0
    before, opened = tables.fingerprint(), open_source(f"{url}/p-2.parquet")
    write_parquet(folder / "p-1.parquet", [9, 9, 9])
    write_parquet(folder / "p-2.parquet", [9, 9, 9, 9], labels=[2] * 4)
    with pytest.raises(InputError, match=r"p-2\.parquet has changed since the data were opened"):
        opened.read(0)
    assert shades(open_source(f"{url}/p-1.parquet")) == [9, 9, 9]
    assert open_source(f"{url}/p-1.parquet").fingerprint() != before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wds:{}/none-{{0..2}}.tar", r"There is no file .*none-0\.tar"),
        ("{}/none.parquet", r"There is no file .*none\.parquet"),
        ("{}/text.parquet", r"text\.parquet cannot be read"),
        ("wds:nowhere://a/b.tar", "cannot be opened"),
    ],
)
def test_urls_that_cannot_be_read_are_one_sentence(server, name, words):
    url, folder = server
    (folder / "text.parquet").write_text("no table")
    assert_refused(name.format(url), words)


def test_a_store_that_stops_answering_ends_the_epoch_with_one_sentence(server, monkeypatch):
    url, folder = server
    for number in range(2):
        write_parquet(folder / f"p-{number}.parquet", range(8))
    source = open_source(f"{url}/p-0.parquet")
    monkeypatch.setattr(Handler, "failures", 100)
    with pytest.raises(InputError, match=r"p-0\.parquet cannot be read .*resumed") as error:
        next(batches_of(source, 0).starting_at(0))
    one_sentence(error)


def batches_of(source, workers, rank=0, world_size=1):
    shuffled = ShuffledOrder(len(source), 4, 0, rank, world_size, blocks=source.blocks)
    view = RandomCrop(AugmentConfig(), (4, 4), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return Batches(source, shuffled, view, Placement("auto", "cpu", workers), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_batches_are_the_same_for_any_ranks_and_workers_and_from_any_batch(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("STOP_MIM_REMOTE_GIB", "0")
    # A quarter of what is read together, so that as few files are more than are kept.
    monkeypatch.setattr(order, "BLOCKS_TOGETHER", 4)
    monkeypatch.setattr(parquet, "BLOCKS_TOGETHER", 4)
    monkeypatch.setattr(lookahead, "BLOCKS_AHEAD", 8)
    monkeypatch.setattr(data_files, "BLOCKS_KEPT", 16)
    for number in range(24):
        images = [number]
        if kind == "tar":
            write_shard(tmp_path / f"s-{number:02}.tar", [(f"{shade}.png", encoded(shade)) for shade in images])
        else:
            write_parquet(tmp_path / f"s-{number:02}.parquet", images)
    source = open_source(("wds:" if kind == "tar" else "") + f"file://{tmp_path}/s-*.{kind}")
    assert len(source) == 24

    def epoch(workers, rank=0, world_size=1, first=0):
        images = batches_of(source, workers, rank, world_size)
        found, running = [], images.starting_at(first)
        for _ in range(images.order.batches_per_epoch - first):
            batch = next(running)
            # An image of one shade has that shade in every crop.
            assert torch.equal((batch.images[:, 0, 0, 0] * 255).round().long(), batch.indices)
            found.append(batch.indices.tolist())
        running.close()
        return found

    whole = epoch(0)
    assert sorted(chain.from_iterable(whole)) == list(range(len(source)))
    assert epoch(2, first=2) == whole[2:]
    parts = [epoch(1, rank, 2) for rank in range(2)]
    assert [first + second for first, second in zip(*parts, strict=True)] == [
        whole[at] + whole[at + 1] for at in range(0, len(whole), 2)
    ]
    kept = list((tmp_path / ".cache" / "remote").glob(f"*.{'tar' if kind == 'tar' else 'arrow'}"))
    assert len(kept) <= data_files.BLOCKS_KEPT < 24


def read(source, indices):
    return [int(source.encoded(index)) for index in indices]


@pytest.mark.parametrize(("n_records", "shards"), [(2000, 20), pytest.param(100_000, 100, marks=pytest.mark.slow)])
def test_every_record_is_read_once_an_epoch_and_memory_does_not_grow(tmp_path, n_records, shards):
    """At 1, 3 and 8 ranks times workers, with a resume in the middle; a record holds its number."""
    per_shard = n_records // shards
    for shard in range(shards):
        numbers = range(shard * per_shard, (shard + 1) * per_shard)
        write_shard(tmp_path / f"s-{shard:03}.tar", [(f"{number}.png", b"%d" % number) for number in numbers])
    source = open_source(f"wds:file://{tmp_path}/s-*.tar")
    assert len(source) == n_records
    for ranks, workers in ((1, 0), (3, 1), (4, 2)):
        seen, memory = [], []
        for rank in range(ranks):
            shuffled = ShuffledOrder(n_records, 500, 0, rank, ranks, drop_last=False, blocks=source.blocks)
            middle = shuffled.batches_per_epoch // 2
            # A first session ends in the middle, a second one goes on there.
            for numbers in (range(middle), range(middle, shuffled.batches_per_epoch)):
                requests = (shuffled.indices(number).tolist() for number in numbers)
                for found in mapped(partial(read, source), requests, workers, 2 * workers):
                    seen += found
                    memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        assert np.array_equal(np.sort(seen), np.arange(n_records))
        assert memory[-1] - memory[len(memory) // 4] < 64 * 2**20


def test_blocks_are_read_about_sixteen_at_a_time_in_another_order_each_epoch():
    blocks = np.arange(1, 101) * 50
    shuffled = ShuffledOrder(5000, 100, blocks=blocks)
    epochs = [torch.cat([shuffled.indices(50 * epoch + number) for number in range(50)]) for epoch in range(2)]
    assert not torch.equal(*epochs)
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, torch.arange(5000))
        used = [len(set((part // 50).tolist())) for part in epoch.split(100)]
        assert max(used) <= BLOCKS_TOGETHER + 5
        assert np.median(used) > BLOCKS_TOGETHER - 4
