"""Data sets of a hub that may be out of reach: found out in seconds, said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that the hub has to answer.
_PATIENCE = 5
# Whose errors say that something is out of reach; builtins have types of their own.
_CLIENTS = {"aiohttp", "fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3"}


@contextmanager
def hub_or_cache(needed: bool) -> Iterator[None]:
    """Read cached data only, and at once, where the hub does not answer: left alone, its client asks for 24 s a task.

    Args:
        needed: whether any data are the hub's.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if needed and not before and not answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def answers(address: str) -> bool:
    """Whether something at an address answers within seconds, if only to refuse; through the shell's proxies."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(address, method="HEAD"), timeout=_PATIENCE):
            return True
    except HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """Turn whatever stops the reading of a task's data into one line with the task's name.

    Raises:
        ValueError: in place of any error.
    """
    try:
        yield
    except Exception as error:  # Libraries have many kinds for a data set that does not come.
        reason = " ".join(str(error).split()) or type(error).__name__
        said = "reached" if out_of_reach(error) else "read"
        raise ValueError(f"tasks: the data of {name!r} cannot be {said} ({reason:.200})") from error


def out_of_reach(error: BaseException) -> bool:
    """Whether an error, or one that led to it, comes from a network.

    >>> out_of_reach(ConnectionError("no route")), out_of_reach(KeyError("question"))
    (True, False)
    """
    found: BaseException | None = error
    while found is not None:
        package = type(found).__module__.partition(".")[0]
        if isinstance(found, (ConnectionError, TimeoutError)) or package in _CLIENTS:
            return True
        found = found.__cause__ or found.__context__
    return False
