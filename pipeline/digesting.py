"""Digests of the live weights at every save: at once for small models, in the window after it for large.

The optimizer states are hashed as well, for large models as far as window and processor share allow; the
rotating proof looks at them in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from stepwell.pipeline.digest import EAGER_BYTES_MAX, Digest, DigestWindow
from stepwell.pipeline.digester import Digester
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.state_digest import StateDigester
from stepwell.pipeline.workers import become_background

__all__ = ["WeightDigests"]

STATES_SHARE = 0.01  # of a processor


class WeightDigests:
    """Digests all parameters of a live state.

    Parameters
    ----------
    live : LiveState
    chunk_bytes : int
    """

    def __init__(self, live: LiveState, chunk_bytes: int) -> None:
        self._live = live
        self._chunk_bytes = chunk_bytes
        self._version = -1
        self._digester: Digester | None = None
        self._states = StateDigester(live, chunk_bytes)
        self._first = 0
        self._began = time.monotonic()
        self._states_s = 0.0
        self._pool = ThreadPoolExecutor(1, "stepwell-digest", initializer=become_background)

    @property
    def layout(self) -> Layout:
        """Layout of the weights as digested now; planned anew when the parameters changed."""
        return self._current().layout

    def eager(self) -> Digest | None:
        """Digest everything now, on the caller's thread, if the model is small; None if it is not."""
        digester = self._current()
        if digester.layout.size_bytes > EAGER_BYTES_MAX:
            return None
        return replace(_whole(digester), states=self._states.digest())

    def whole(self, layout: Layout, algorithm: str) -> Digest:
        """Digest everything now in terms of a saved layout and algorithm."""
        weights = _whole(Digester(layout, self._tensors(), algorithm=algorithm))
        return replace(weights, states=self._states.digest())

    def submit(
        self, window: DigestWindow, eager: Digest | None, then: Callable[[DigestWindow], None]
    ) -> Future[object]:
        """Digest in the background as far as the window lasts, then go on with `then` in the same thread.

        Returns
        -------
        Future
            Of the digest's JSON, done after `then`.
        """
        digester = self._current()
        first, self._first = self._first, self._first + 1

        def read() -> object:
            digest = eager
            if digest is None:
                digest = window.weights(digester, first=first % max(1, len(digester.layout.chunks)))
                digest = replace(digest, states=self._states_in(window))
            then(window)
            return digest.to_json()

        return self._pool.submit(read)

    def _states_in(self, window: DigestWindow) -> str | None:
        """Hash the optimizer states too, while the window lasts and the share of a processor allows it."""
        began = time.thread_time()
        if not window.open or self._states_s > STATES_SHARE * (time.monotonic() - self._began):
            return None
        try:
            states = self._states.digest()
        except (RuntimeError, KeyError):
            # The next update changes the state's dictionaries under our hands.
            if window.open:
                raise
            return None
        finally:
            self._states_s += time.thread_time() - began
        return states if window.undisturbed else None

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in the digests' thread, after those of earlier saves."""
        self._pool.submit(work)

    def close(self) -> None:
        """Wait for a digest in work and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _current(self) -> Digester:
        if self._digester is None or self._version != self._live.version:
            layout = plan_layout(self._live.parameter_specs, chunk_bytes=self._chunk_bytes)
            self._digester = Digester(layout, self._tensors())
            self._version = self._live.version
        return self._digester

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {ref.name: ref.tensor for ref in self._live.parameters}


def _whole(digester: Digester) -> Digest:
    values = tuple(digester.digest(part) for part in range(len(digester.layout.chunks)))
    return Digest(digester.algorithm, digester.layout.hash, values)
