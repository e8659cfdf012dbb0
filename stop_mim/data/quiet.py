"""Warnings of Pillow, which are ignored: what they tell becomes a BadImage or does not matter."""

import re
import warnings

_PILLOW_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


def quieten_pillow() -> None:
    """Ignores the warnings of Pillow from now on."""
    # A lasting filter, since catch_warnings leaves the filters in disorder when several threads decode.
    if _PILLOW_FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", module=_PILLOW_FILTER[3].pattern)
