"""Images of one shade each, written as files, tables and shards."""

import io
import json
import tarfile

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stop_mim.data.sources import open_source
from stop_mim.errors import InputError


def encoded(shade, kind="PNG", size=(6, 4)):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, (shade, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


def shades(source):
    return [int(source.read(index)[0, 0, 0]) for index in range(len(source))]


def write(path, shade, kind="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(shade, kind))


def write_parquet(path, image_shades, labels=None, names=None, column="image", plain=False):
    cells = [encoded(shade) for shade in image_shades]
    kind = pa.binary() if plain else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {column: pa.array(cells if plain else [{"bytes": cell, "path": "x.png"} for cell in cells], kind)}
    if labels is not None:
        columns["label"] = pa.array(labels)
    table = pa.table(columns)
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


def add_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_shard(path, samples):
    with tarfile.open(path, "w") as archive:
        for name, content in samples:
            add_member(archive, name, content)


def one_sentence(error):
    message = str(error.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    return message


def assert_refused(name, words=None, split="train"):
    """The dataset is refused with one sentence that matches `words`, which is returned."""
    with pytest.raises(InputError, match=words) as error:
        open_source(str(name), split)
    return one_sentence(error)
