"""Names that evaluations still import from here."""

from stop_mim.data.augment import STORED_TO_USED
from stop_mim.data.batches import resident_budget
from stop_mim.data.image_source import common_size
from stop_mim.data.stored import Progress

__all__ = ["STORED_TO_USED", "Progress", "common_size", "resident_budget"]
