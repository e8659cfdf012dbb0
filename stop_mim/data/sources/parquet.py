"""Images in Arrow columns, as Hugging Face lays them out, and parquet files of them.

Small parquet files are read into memory. Large ones, and files at URLs, are each converted once to a memory-mapped Arrow file
in the cache.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stop_mim.data.cache import damage_named
from stop_mim.data.data_files import DataFile, FilesSource, attempted, find_files, found_file, is_url, matching_paths
from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import ImageSource, Labels, class_labels
from stop_mim.data.order import BLOCKS_TOGETHER
from stop_mim.data.sources import SPLIT_NAMES, choose_split, source
from stop_mim.errors import InputError, first_line

MEMORY_LIMIT = 2 * 2**30
"""Sets of files below this many bytes are held in memory."""

# The most bytes that a file may unpack to: a multiple of its size plus a constant. Images hardly compress.
UNPACKED_TIMES, UNPACKED_BYTES = 100, 2**24
# Rows that are unpacked before they are counted. Arrow cannot read 2 GiB of nested bytes into one array.
_ROWS_AT_ONCE = 16
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label", "labels")


def _are_parquet_files(name: str) -> bool:
    return name.lower().endswith(".parquet") and (is_url(name) or bool(matching_paths(name)))


@source(
    "parquet", help="a parquet file (or a URL, a glob or a folder of them)", matches=_are_parquet_files, is_path=True
)
def open_parquet(name: str, split: str) -> ImageSource:
    """Open parquet files by path, URL or glob; for a folder of them see `folder`."""
    return ParquetSource(find_files([name]), name)


class TableSource(ImageSource):
    """A source over Arrow columns; they are not pickled, and another process opens them again."""

    folders: Sequence[Path] = ()
    """A row without bytes may name a file in these folders, and no other."""
    most_open: int | None = None
    """Columns that are open at a time; None for all."""

    def __init__(self, name: str, labels: Labels, class_names: tuple[str, ...]) -> None:
        super().__init__(name, labels, class_names)
        self._opened: dict[int, pa.ChunkedArray] = {}

    @abstractmethod
    def load_column(self, file: int) -> pa.ChunkedArray:
        """The column of images of a file, from memory or a memory-mapped file."""

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the file that holds an image, and its row there."""
        return 0, index

    def fetch(self, block: int) -> pa.ChunkedArray:
        """The column of a file; opened before the workers fork, they share one copy of it."""
        column = self._opened.get(block)
        if column is None:
            column = self._opened[block] = self.load_column(block)
            # A removed file takes disk space until it is unmapped.
            for oldest in list(self._opened)[: -self.most_open] if self.most_open else ():
                self._opened.pop(oldest, None)
        return column

    def encoded(self, index: int) -> bytes:
        file, row = self.locate(index)
        cell = self.fetch(file)[row]
        is_struct = isinstance(cell, pa.StructScalar)
        try:
            found = (cell["bytes"] if is_struct else cell).as_py()
            if found is not None:
                return found
            path = cell["path"].as_py() if is_struct and "path" in cell else None
            named = Path(path or "").resolve()
            if not any(named.is_relative_to(folder) for folder in self.folders) or not named.is_file():
                raise OSError("the row has no image bytes")
            return named.read_bytes()
        # A path may also contain a null byte, not be UTF-8, or be a loop of links.
        except (OSError, ValueError, RuntimeError) as error:
            raise BadImage(self.describe(index), getattr(error, "strerror", None) or str(error)) from error

    def image_name(self, index: int) -> str:
        file, row = self.locate(index)
        cell = self.fetch(file)[row]
        named = isinstance(cell, pa.StructScalar) and "path" in cell
        return (cell["path"].as_py() if named else None) or f"row-{index}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


def image_column(schema: pa.Schema, name: str) -> str:
    """The column that holds the images: 'image', 'img', or else the only one that can."""
    possible = [field.name for field in schema if _can_hold_images(field.type)]
    # A name that two columns have names neither.
    usable = [column for column in possible if schema.names.count(column) == 1]
    for column in _IMAGE_COLUMNS:
        if column in usable:
            return column
    if len(usable) == len(possible) == 1:
        return usable[0]
    raise InputError(
        f"{name} has {'no' if not possible else 'more than one'} column of images: rename one to 'image' (binary, or a "
        f"struct with bytes); its columns are {', '.join(schema.names) or '(none)'}."
    )


def label_column(schema: pa.Schema) -> str | None:
    """The column of class labels (integers or strings), if there is one."""
    for column in _LABEL_COLUMNS:
        kind = schema.field(column).type if schema.names.count(column) == 1 else pa.null()
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return column
    return None


def read_classes(schema: pa.Schema, read: Callable[[str], pa.ChunkedArray]) -> tuple[Labels, tuple[str, ...]]:
    """Labels and, if known, the names of the classes, of a table whose columns `read` returns.

    Strings are numbered in sorted order.
    """
    column = label_column(schema)
    if column is None:
        return {}, ()
    labels = read(column)
    if pa.types.is_dictionary(labels.type):
        labels = labels.cast(labels.type.value_type)
    if pa.types.is_integer(labels.type):
        try:
            integers = pc.fill_null(labels.cast(pa.int64()), -1).to_numpy()
        except pa.ArrowInvalid as error:
            raise InputError(
                f"The labels '{column}' do not fit into 64 bits ({first_line(error)}): renumber them."
            ) from error
        return class_labels(integers), _class_names(schema, column)
    names = tuple(sorted(label for label in pc.unique(labels).to_pylist() if label is not None))
    positions = pc.index_in(labels, value_set=pa.array(names, labels.type), skip_nulls=True)
    return class_labels(pc.fill_null(positions, -1).cast(pa.int64()).to_numpy()), names


def _can_hold_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        kind = next((field.type for field in kind if field.name == "bytes"), pa.null())
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _class_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


class ParquetSource(FilesSource, TableSource):
    """The rows of parquet files, one file after the other."""

    def __init__(self, files: Sequence[DataFile], name: str) -> None:
        footers = [attempted(file.name, partial(_read_footer, file)) for file in files]
        schema = footers[0][1]
        self.column, labels = image_column(schema, str(files[0])), label_column(schema)
        for file, (_, other) in zip(files, footers, strict=True):
            for column in filter(None, (self.column, labels)):
                if column not in other.names or other.field(column).type != schema.field(column).type:
                    raise InputError(
                        f"{file} has no column '{column}' like that of {files[0]}: give files of one layout."
                    )
        files = [file for file, (rows, _) in zip(files, footers, strict=True) if rows]
        if not files:
            raise InputError(f"{name} has no rows: give parquet files with at least one image.")
        self.is_small = not files[0].is_remote and sum(file.size or 0 for file in files) < MEMORY_LIMIT
        self.most_open = 2 * BLOCKS_TOGETHER if files[0].is_remote else None
        classes = read_classes(
            schema, lambda column: pa.chunked_array([chunk for file in files for chunk in _read(file, column).chunks])
        )
        super().__init__(name, files, [rows for rows, _ in footers if rows], *classes)
        for number in range(0 if files[0].is_remote else len(files)):
            self.fetch(number)

    def describe(self, index: int) -> str:
        file, row = self.locate(index)
        return f"{self.files[file]}#{row}"

    def load_column(self, file: int) -> pa.ChunkedArray:
        if self.is_small:
            return _read(self.files[file], self.column)
        arrow = self.files[file].converted(".arrow", partial(_convert, self.files[file], self.column))
        with damage_named(arrow):
            return pa.ipc.open_file(pa.memory_map(str(arrow))).read_all().column(0)


def _read_footer(file: DataFile) -> tuple[int, pa.Schema]:
    with file.open() as stream, pq.ParquetFile(stream) as table:
        return table.metadata.num_rows, table.schema_arrow


def _read(file: DataFile, column: str) -> pa.ChunkedArray:
    found = attempted(file.name, lambda: pa.Table.from_batches(_batches(file, column)).column(0))
    if not file.is_remote:
        file.require_unchanged()
    return found


def _convert(file: DataFile, column: str, draft: Path) -> None:
    batches = _batches(file, column)
    first = next(batches)
    with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _batches(file: DataFile, column: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a column; refuse a file that unpacks to far more bytes than images of its size could."""
    limit = UNPACKED_TIMES * (file.size or 0) + UNPACKED_BYTES
    with file.open() as stream, pq.ParquetFile(stream) as table:
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        stated = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] == column)
        found = 0
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[column]) if stated <= limit else ():
            # Rows that repeat one value are more than the file states.
            found += batch.nbytes
            if found > limit:
                break
            batch.validate(full=True)
            yield batch
        if max(stated, found) > limit:
            raise InputError(
                f"{file} unpacks to more than {UNPACKED_TIMES} times its size, {limit / 2**20:,.0f} MiB: give a file of images."
            )


def parquet_files(folder: Path, split: str) -> list[DataFile]:
    """The parquet files of a folder (or its 'data' sub-folder) for a split, when their names begin with split names."""
    paths = sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))
    splits = {path: re.split("[^a-z]", path.name.lower())[0] for path in paths}
    if present := SPLIT_NAMES.intersection(splits.values()):
        chosen = choose_split(split, present, str(folder))
        paths = [path for path in paths if splits[path] == chosen]
    return [found_file(str(path)) for path in paths]
