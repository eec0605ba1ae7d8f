"""Keep advertisements and other libraries' bookkeeping off the screen."""

from __future__ import annotations

import logging
import warnings


def quieten() -> None:
    """Silence what other libraries say that is of no use to a user; imports none of them."""
    tips = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    tips.addFilter(lambda record: "litlogger" not in record.getMessage())
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=category)
