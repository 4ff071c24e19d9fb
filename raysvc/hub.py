"""The Hugging Face hub, asked only where it answers.

Its clients ask for each of several files up to six times, over a minute, before they say that there is no connection.

Always true:
- a hub that does not answer within seconds is not asked: what was downloaded before is used, everything else is missing;
- outside of `answering` no setting is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

ANSWERS_WITHIN_S = 5.0


@contextmanager
def answering() -> Iterator[None]:
    """Within it the clients of the hub are offline when it does not answer."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or _answers(constants.ENDPOINT):
        yield
        return
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = False, before


def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=ANSWERS_WITHIN_S)
    except Exception:  # noqa: BLE001 - whatever the client's library raises, there was no answer
        return False
    return True
