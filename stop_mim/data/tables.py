"""Images in Arrow columns, as Hugging Face lays them out: a struct of bytes and path, or the plain bytes."""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stop_mim.data.image_source import EncodedSource, class_labels
from stop_mim.data.images import BadImage
from stop_mim.errors import InputError

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label", "labels")


class TableSource(EncodedSource):
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
