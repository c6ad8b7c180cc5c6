"""The ``replicate`` stage: bring objects into a tier, and get them back from the nearest one.

What is worth another try is tried again here, with a doubled pause and a stated end; nothing else
in the pipeline retries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from stepwell.errors import (
    IntegrityError,
    MissingObjectError,
    ObjectExistsError,
    StoreError,
    TransientStoreError,
)
from stepwell.pipeline.tier import OnError, Tier
from stepwell.stores.base import BytesLike, WriteItem

__all__ = ["Replicate"]

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.05
PAUSE_S_MAX = 5.0


class Replicate:
    """Puts with retries; gets that fall through the tiers.

    Parameters
    ----------
    retry_for_s : float
        How long a tier with policy ``retry`` is tried again after any store error. Transient
        errors are tried again ``Tier.retries`` times under every policy.
    """

    name = "replicate"

    def __init__(self, retry_for_s: float = 60.0) -> None:
        self.retry_for_s = retry_for_s

    async def save(self, tier: Tier, key: str, parts: Sequence[BytesLike]) -> None:
        """Put one object into one tier."""
        await self.attempt(tier, lambda: tier.store.put(key, parts))

    async def save_batch(self, tier: Tier, items: Callable[[], list[WriteItem]]) -> None:
        """Put many objects into one tier, all durable on return."""
        await self.attempt(tier, lambda: tier.store.put_batch(items()))

    async def attempt(self, tier: Tier, operation: Callable[[], Awaitable[Result]]) -> Result:
        """Run `operation`, again while its errors and the tier's policy say so.

        Raises
        ------
        StoreError
            The last error, when tries or time ran out.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.retry_for_s
        tries = 0
        while True:
            try:
                return await operation()
            except StoreError as error:
                tries += 1
                transient = isinstance(error, TransientStoreError) and tries <= tier.retries
                # That an object is there, or is not, is an answer and no fault to outwait.
                answered = isinstance(error, MissingObjectError | ObjectExistsError)
                patient = tier.on_error is OnError.RETRY and not answered and clock() < deadline
                if not (transient or patient):
                    raise
            pause_s = min(PAUSE_S_MAX, FIRST_PAUSE_S * 2 ** (tries - 1))
            # Jitter, so that many ranks do not come back to a recovering store at one moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def recover(self, tiers: Sequence[Tier], key: str) -> tuple[Tier, memoryview]:
        """Fetch one whole object from the first tier that has it.

        Raises
        ------
        MissingObjectError
            No tier has it.
        """
        failure: StoreError | IntegrityError | None = None
        for tier in tiers:
            try:
                view = await self.attempt(tier, lambda tier=tier: tier.store.fetch(key))  # type: ignore[misc]
            except MissingObjectError as error:
                failure = failure or error
            except (StoreError, IntegrityError) as error:
                failure = error
            else:
                return tier, view
        raise failure or MissingObjectError(f"{key}: there is no tier to fetch it from")
