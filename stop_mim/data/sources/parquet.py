"""Images in Arrow columns, as Hugging Face lays them out, and parquet files of them.

Parquet files are held in memory when small, otherwise converted once to a memory-mapped Arrow file in the cache.
"""

import glob
import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stop_mim.data.cache import cached_file
from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import ImageSource, class_labels, digest
from stop_mim.data.sources import SOURCES, SourceKind
from stop_mim.data.splits import SPLIT_NAMES, choose_split
from stop_mim.errors import InputError

MEMORY_LIMIT = 2 * 2**30
"""Sets of files below this many bytes are held in memory."""

# Small batches: Arrow cannot read 2 GiB of nested bytes into one array.
_ROWS_A_BATCH = 256
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label", "labels")


@SOURCES.register("parquet")
class ParquetKind(SourceKind):
    """Parquet files by path or glob; for a folder of them see `folder`."""

    help = "a parquet file (or a glob or folder of them)"

    @classmethod
    def matches(cls, name: str) -> bool:
        """Whether this kind opens the name."""
        return name.lower().endswith(".parquet") and bool(_paths(name))

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        """Open the files, one after the other."""
        return ParquetSource(_paths(name), name)


def _paths(name: str) -> list[Path]:
    path = Path(name).expanduser()
    return [path] if path.is_file() else [Path(found) for found in sorted(glob.glob(str(path)))]


class TableSource(ImageSource):
    """A source over one Arrow column; the column itself never travels to another process, which opens its own."""

    _cells: "ImageCells | None" = None

    @abstractmethod
    def load_column(self) -> pa.ChunkedArray:
        """The column of images, from memory or a memory-mapped file."""

    def open_cells(self) -> "ImageCells":
        """The cells of the column; opened before the workers fork, they share one copy of it."""
        if self._cells is None:
            self._cells = ImageCells(self.load_column())
        return self._cells

    def encoded(self, index: int) -> bytes:
        """The bytes in the row, or those of the file that it names; raises BadImage."""
        cells = self.open_cells()
        try:
            return cells.read(index)
        except OSError as error:
            raise BadImage(self.describe(index), error.strerror or str(error)) from error

    def image_name(self, index: int) -> str:
        """The path in the row, or its number where it has none."""
        return self.open_cells().path(index) or f"row-{index}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_cells"}


class ImageCells:
    """The cells of an image column by row; chunks stay apart, since one Arrow binary array ends at 2 GiB."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._ends = np.cumsum([len(chunk) for chunk in column.chunks])
        self._bytes: list[pa.Array] = []
        self._paths: list[pa.Array | None] = []
        for chunk in column.chunks:
            fields = _struct_fields(chunk)
            self._bytes.append(fields.get("bytes"))
            self._paths.append(fields.get("path"))

    def read(self, row: int) -> bytes:
        """The bytes of the row's image."""
        chunk, place = self._place(row)
        encoded = self._bytes[chunk][place]
        if encoded.is_valid:
            return encoded.as_py()
        path = self.path(row)
        if path is None:
            raise OSError("the row holds no image")
        return Path(path).read_bytes()

    def path(self, row: int) -> str | None:
        """The path in the row, where the column has one."""
        chunk, place = self._place(row)
        paths = self._paths[chunk]
        return None if paths is None else paths[place].as_py()

    def _place(self, row: int) -> tuple[int, int]:
        chunk = int(np.searchsorted(self._ends, row, side="right"))
        return chunk, row - (int(self._ends[chunk - 1]) if chunk else 0)


def image_column(schema: pa.Schema, name: str) -> str:
    """The column that holds the images: 'image', 'img', or else the only one that can."""
    possible = [field.name for field in schema if _can_hold_images(field.type)]
    for column in _IMAGE_COLUMNS:
        if column in possible:
            return column
    if len(possible) == 1:
        return possible[0]
    raise InputError(
        f"{name} has {'no' if not possible else 'more than one'} column of images: name one 'image' (a struct with "
        f"bytes, or binary) among its columns {', '.join(schema.names) or '(none)'}."
    )


def label_column(schema: pa.Schema) -> str | None:
    """The column of class labels (integers or strings), if there is one."""
    for column in _LABEL_COLUMNS:
        if column in schema.names and _is_class_type(schema.field(column).type):
            return column
    return None


def read_classes(labels: pa.ChunkedArray, schema: pa.Schema) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The labels and, where they are known, the names of the classes; strings are numbered in sorted order."""
    if pa.types.is_integer(labels.type):
        names = _class_names(schema, label_column(schema))
        return class_labels(pc.fill_null(labels.cast(pa.int64()), -1).to_numpy()), names
    names = tuple(sorted(label for label in pc.unique(labels).to_pylist() if label is not None))
    positions = pc.index_in(labels, value_set=pa.array(names, labels.type), skip_nulls=True)
    return class_labels(pc.fill_null(positions, -1).cast(pa.int64()).to_numpy()), names


def _struct_fields(chunk: pa.Array) -> dict[str, pa.Array]:
    if not pa.types.is_struct(chunk.type):
        return {"bytes": chunk}
    return dict(zip([field.name for field in chunk.type], chunk.flatten(), strict=True))


def _can_hold_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_class_type(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _class_names(schema: pa.Schema, column: str | None) -> tuple[str, ...]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


class ParquetSource(TableSource):
    """The rows of parquet files, one file after the other."""

    def __init__(self, paths: list[Path], name: str) -> None:
        footers = [_read_footer(path) for path in paths]
        self._ends = np.cumsum([rows for rows, _ in footers])
        if not self._ends[-1]:
            raise InputError(f"{name} has no rows: give parquet files with at least one image.")
        schema = footers[0][1]
        self.column = image_column(schema, str(paths[0]))
        for path, (_, other) in zip(paths, footers, strict=True):
            _check_same_column(path, other, paths[0], schema.field(self.column))
        super().__init__(name, *_read_labels(paths, schema))
        self.paths = paths
        self.open_cells()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def describe(self, index: int) -> str:
        """The file and the row within it."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return f"{self.paths[file]}#{index - (int(self._ends[file - 1]) if file else 0)}"

    def fingerprint(self) -> str:
        """Depends on the names and sizes of the files and on their footers, which tell of every piece of a column."""
        return digest(part for path in self.paths for part in (path.name, path.stat().st_size, _footer_bytes(path)))

    def load_column(self) -> pa.ChunkedArray:
        """The images, from memory or from the memory-mapped file that is written when there is none yet."""
        if sum(path.stat().st_size for path in self.paths) < MEMORY_LIMIT:
            return pa.Table.from_batches(self._batches()).column(0)
        # Hundreds of gigabytes would take longer to check than to read.
        converted = cached_file(f"arrow/{self.fingerprint()}.arrow", self._convert, checked=False)
        return pa.ipc.open_file(pa.memory_map(str(converted.path))).read_all().column(0)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self.paths:
            try:
                for batch in pq.ParquetFile(path).iter_batches(_ROWS_A_BATCH, columns=[self.column]):
                    # The files' own metadata may differ, and batches of one table must not.
                    yield batch.replace_schema_metadata(None)
            except (OSError, pa.ArrowException) as error:
                raise _unreadable(path, error) from error

    def _convert(self, draft: Path) -> None:
        batches = self._batches()
        first = next(batches)
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)


def parquet_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a folder (or its 'data' sub-folder) for a split, when their names begin with split names."""
    paths = sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))
    splits = {path: _leading_word(path) for path in paths}
    present = {split for split in splits.values() if split in SPLIT_NAMES}
    if not present:
        return paths
    chosen = choose_split(split, present, str(folder))
    return [path for path in paths if splits[path] == chosen]


def _leading_word(path: Path) -> str:
    match = re.match(r"[a-z]+", path.name.lower())
    return match.group() if match else ""


def _read_footer(path: Path) -> tuple[int, pa.Schema]:
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata.num_rows, file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = str(error).splitlines()[0].rstrip(".")
    return InputError(f"{path} cannot be read as parquet ({reason}): give a whole parquet file.")


def _check_same_column(path: Path, schema: pa.Schema, first_path: Path, column: pa.Field) -> None:
    if column.name not in schema.names or schema.field(column.name).type != column.type:
        raise InputError(f"{path} has no column '{column.name}' like that of {first_path}: give files of one layout.")


def _footer_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-8, 2)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, 2)
        return file.read(length)


def _read_labels(paths: list[Path], schema: pa.Schema) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    column = label_column(schema)
    if column is None:
        return {}, ()
    try:
        chunks = [pq.read_table(path, columns=[column], partitioning=None).column(0) for path in paths]
        return read_classes(pa.chunked_array([piece for chunk in chunks for piece in chunk.chunks]), schema)
    except (pa.ArrowException, KeyError, IndexError) as error:
        raise InputError(
            f"The column '{column}' is not the same in {paths[0]} and the files beside it: give files of one layout."
        ) from error
