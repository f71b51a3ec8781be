"""`report.html`: a run on one page that needs no network. `python -m hsray.report URL`, and at the end of every run.

`facts` gathers, `sites` and `timeline` add up, `plots` and `page` draw. Loads neither Ray, SGLang nor torch.
"""

import copy
from collections.abc import Mapping
from typing import Any

from hsray.report.facts import gather
from hsray.report.page import make_page
from hsray.schema import REPORT_KEY
from hsray.store import Store

# A report is worth waiting for the store, but not for half an hour.
RETRY_SECONDS = 120.0


def write_report(
    store: Store, storage_options: Mapping[str, Any] | None, now: float, *, finishing: bool = False
) -> int:
    """Make the page from what is stored and put it beside the data. Returns its size in bytes.

    Args:
        storage_options: those that `store` was opened with.
        now: Unix seconds.
        finishing: the caller is the run's driver and about to mark it complete.

    Raises:
        ConfigError: there is no run.
        HsrayError: a record cannot be understood.
        StoreError: the store refuses or does not answer for two minutes.
    """
    store = copy.copy(store)
    store.retry_seconds = min(store.retry_seconds, RETRY_SECONDS)
    page = make_page(gather(store, dict(storage_options or {}), now, finishing=finishing)).encode()
    store.put(REPORT_KEY, page)
    return len(page)
