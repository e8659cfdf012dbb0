"""Images in Arrow columns, as Hugging Face lays them out, and parquet files of them.

Parquet files are held in memory when small, otherwise converted once to a memory-mapped Arrow file in the cache. Files at
URLs are converted one at a time, when they are needed.
"""

import glob
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int

from stop_mim.data.cache import cached_file
from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import (
    SAMPLES_A_FILE,
    ImageSource,
    changed,
    class_labels,
    digest,
    file_identity,
    file_state,
    locate,
)
from stop_mim.data.order import BLOCKS_TOGETHER
from stop_mim.data.remote import RemoteFile, attempted, find_files, is_url
from stop_mim.data.sources import SOURCES, SourceKind
from stop_mim.data.splits import SPLIT_NAMES, choose_split
from stop_mim.errors import InputError, first_line

MEMORY_LIMIT = 2 * 2**30
"""Sets of files below this many bytes are held in memory."""

# Small batches: Arrow cannot read 2 GiB of nested bytes into one array.
_ROWS_A_BATCH, _BYTES_A_BATCH = 256, 2**26
# A file may unpack to so many times its size and so many bytes more: images hardly compress.
UNPACKED_TIMES, UNPACKED_BYTES = 100, 2**24
# Rows that are unpacked before they are counted.
_ROWS_AT_ONCE = 16
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label", "labels")


@SOURCES.register("parquet")
class ParquetKind(SourceKind):
    """Parquet files by path, URL or glob; for a folder of them see `folder`."""

    help = "a parquet file (or a URL, a glob or a folder of them)"
    is_path = True

    @classmethod
    def matches(cls, name: str) -> bool:
        return name.lower().endswith(".parquet") and (is_url(name) or bool(_paths(name)))

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        return ParquetSource(find_files([name]) if is_url(name) else _paths(name), name)


def _paths(name: str) -> list[Path]:
    path = Path(name).expanduser()
    return [path] if path.is_file() else [Path(found) for found in sorted(glob.glob(str(path)))]


class TableSource(ImageSource):
    """A source over one Arrow column; the column itself never travels to another process, which opens its own."""

    _cells: "ImageCells | None" = None

    @abstractmethod
    def load_column(self) -> pa.ChunkedArray:
        """The column of images, from memory or a memory-mapped file."""

    def locate_file(self, index: int, path: str) -> Path:
        """The file that a row without bytes names; raises OSError if it must not be read."""
        return Path(path)

    def open_cells(self) -> "ImageCells":
        """The cells of the column; opened before the workers fork, they share one copy of it."""
        if self._cells is None:
            self._cells = ImageCells(self.load_column())
        return self._cells

    def cells_of(self, index: int) -> tuple["ImageCells", int]:
        """The cells that hold an image, and its row there."""
        return self.open_cells(), index

    def encoded(self, index: int) -> bytes:
        cells, row = self.cells_of(index)
        try:
            found, path = cells.read(row)
            if found is not None:
                return found
            if path is None:
                raise OSError("the row holds no image")
            return self.locate_file(index, path).read_bytes()
        # A path may also hold a null byte, be no UTF-8 or be a loop of links.
        except (OSError, ValueError, RuntimeError) as error:
            raise BadImage(self.describe(index), getattr(error, "strerror", None) or str(error)) from error

    def image_name(self, index: int) -> str:
        cells, row = self.cells_of(index)
        return cells.path(row) or f"row-{index}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_cells"}


class ImageCells:
    """The cells of an image column by row; chunks stay apart, since one Arrow binary array ends at 2 GiB."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._ends = np.cumsum([len(chunk) for chunk in column.chunks])
        self._fields = [_struct_fields(chunk) for chunk in column.chunks]

    def read(self, row: int) -> tuple[bytes | None, str | None]:
        """The bytes of the row's image, and its path if there are none."""
        chunk, place = locate(self._ends, row)
        encoded = self._fields[chunk]["bytes"][place].as_py()
        return encoded, self.path(row) if encoded is None else None

    def path(self, row: int) -> str | None:
        """The path in the row, where the column has one."""
        chunk, place = locate(self._ends, row)
        paths = self._fields[chunk].get("path")
        return None if paths is None else paths[place].as_py()


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

    def __init__(self, paths: Sequence[Path | RemoteFile], name: str) -> None:
        self._states = [file_state(path) if isinstance(path, Path) else None for path in paths]
        footers = [_read_footer(path) for path in paths]
        self._ends = np.cumsum([rows for rows, _ in footers])
        if not self._ends[-1]:
            raise InputError(f"{name} has no rows: give parquet files with at least one image.")
        schema = footers[0][1]
        self.column, labels = image_column(schema, str(paths[0])), label_column(schema)
        for path, (_, other) in zip(paths, footers, strict=True):
            for column in filter(None, (self.column, labels)):
                if column not in other.names or other.field(column).type != schema.field(column).type:
                    raise InputError(
                        f"{path} has no column '{column}' like that of {paths[0]}: give files of one layout."
                    )
        self.paths = paths
        super().__init__(name, *(({}, ()) if labels is None else read_classes(self._read(labels), schema)))
        self._fetched: dict[int, ImageCells] = {}
        if isinstance(paths[0], RemoteFile):
            self.blocks = self._ends
        else:
            self.open_cells()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def describe(self, index: int) -> str:
        file, row = locate(self._ends, index)
        return f"{self.paths[file]}#{row}"

    def fetch(self, indices: Int[np.ndarray, " n"]) -> None:
        for file in np.unique(np.searchsorted(self._ends, indices, side="right")).tolist():
            self._fetch(file)

    def cells_of(self, index: int) -> tuple[ImageCells, int]:
        if self.blocks is None:
            return super().cells_of(index)
        file, row = locate(self._ends, index)
        return self._fetch(file), row

    def _fetch(self, file: int) -> ImageCells:
        """Return the cells of a file at a URL, converted to an Arrow file in the cache."""
        path = self.paths[file]
        if file not in self._fetched and isinstance(path, RemoteFile):
            arrow = path.fetched(".arrow", partial(self._convert, [path]))
            self._fetched[file] = ImageCells(pa.ipc.open_file(pa.memory_map(str(arrow))).read_all().column(0))
            # A file that is still mapped takes space even after it was removed.
            for oldest in list(self._fetched)[: -2 * BLOCKS_TOGETHER]:
                del self._fetched[oldest]
        return self._fetched[file]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fetched": {}}

    def locate_file(self, index: int, path: str) -> Path:
        file_or_url = self.paths[locate(self._ends, index)[0]]
        if isinstance(file_or_url, RemoteFile):
            raise OSError(f"it names the file {path}, and files beside a URL are not read")
        folder = file_or_url.parent.resolve()
        file = (folder / path).resolve()
        if not file.is_relative_to(folder):
            raise OSError(f"it names {path}, which is outside the folder {folder}")
        return file

    def fingerprint(self) -> str:
        return self._digest(times=True)

    def contents(self) -> str:
        return self._digest(times=False)

    def _digest(self, times: bool) -> str:
        return digest(
            part
            for path in self.paths
            for part in (
                path.identity() if isinstance(path, RemoteFile) else file_identity(path, SAMPLES_A_FILE, times)
            )
        )

    def load_column(self) -> pa.ChunkedArray:
        if sum(path.stat().st_size for path in self.paths if isinstance(path, Path)) < MEMORY_LIMIT:
            return self._read(self.column)
        # Hundreds of gigabytes would take longer to check than to read.
        convert = partial(self._convert, self.paths)
        converted = cached_file(f"arrow/{self.fingerprint()}.arrow", convert, checked=False)
        return pa.ipc.open_file(pa.memory_map(str(converted.path))).read_all().column(0)

    def _read(self, column: str) -> pa.ChunkedArray:
        parts = [attempted(str(path), partial(_all_batches, path, column)) for path in self.paths]
        self._require_unchanged()
        return pa.Table.from_batches(chain.from_iterable(parts)).column(0)

    def _convert(self, paths: Sequence[Path | RemoteFile], draft: Path) -> None:
        batches = _batches(paths, self.column)
        first = next(batches)
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        """Raise InputError if a file was changed while it was read; later ones do not matter."""
        for path, state in zip(self.paths, self._states, strict=True):
            if isinstance(path, Path) and file_state(path) != state:
                raise changed(path)


def _batches(paths: Sequence[Path | RemoteFile], column: str) -> Iterator[pa.RecordBatch]:
    for path in paths:
        size = path.size if isinstance(path, RemoteFile) else path.stat().st_size
        with _opened(path) as file:
            part: list[pa.RecordBatch] = []
            for batch in _bounded(file, column, size or 0):
                batch.validate(full=True)
                # The files' own metadata may differ, and batches of one table must not.
                part.append(batch.replace_schema_metadata(None))
                if len(part) * _ROWS_AT_ONCE >= _ROWS_A_BATCH or sum(one.nbytes for one in part) > _BYTES_A_BATCH:
                    yield from pa.Table.from_batches(part).combine_chunks().to_batches()
                    part = []
            if part:
                yield from pa.Table.from_batches(part).combine_chunks().to_batches()


def _bounded(file: pq.ParquetFile, column: str, size: int) -> Iterator[pa.RecordBatch]:
    """Yield few rows at a time, until they are far more bytes than a file of this size can hold of images."""
    limit = UNPACKED_TIMES * size + UNPACKED_BYTES
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    stated = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] == column)
    found, refusal = 0, InputError(f"it unpacks to more than {UNPACKED_TIMES} times its size, {limit / 2**20:,.0f} MiB")
    if stated > limit:
        raise refusal
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
        # Rows that repeat one value are more than the file states.
        found += batch.nbytes
        if found > limit:
            raise refusal
        yield batch


def _all_batches(path: Path | RemoteFile, column: str) -> list[pa.RecordBatch]:
    return list(_batches([path], column))


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


def _read_footer(path: Path | RemoteFile) -> tuple[int, pa.Schema]:
    def read() -> tuple[int, pa.Schema]:
        with _opened(path) as file:
            return file.metadata.num_rows, file.schema_arrow

    return attempted(str(path), read)


@contextmanager
def _opened(path: Path | RemoteFile) -> Iterator[pq.ParquetFile]:
    if isinstance(path, RemoteFile):
        with path.open() as stream, pq.ParquetFile(stream) as file:
            yield file
    else:
        with _reading(path), pq.ParquetFile(path) as file:
            yield file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    # Damaged files raise OSError, ArrowException, UnicodeDecodeError, OverflowError and others.
    except Exception as error:
        reason = first_line(error).rstrip(".")
        raise InputError(f"{path} cannot be read as parquet ({reason}): give a whole parquet file.") from error
