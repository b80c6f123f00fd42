"""Compiled updates of a decode batch's forecast: adding a request, recomputing peaks (native.c).

decode_forecast.py defines the same computation with numpy. Both give the same result to the last
bit (tests/conductor/load/test_compiled_forecast.py). Arrays are passed as addresses.
"""

from __future__ import annotations

import ctypes
import struct

from mooncake_store.native.library import NativeFunction, quick_function

REQUEST, WORKER = struct.Struct("=3q2q2q5d"), struct.Struct("=5q5d")  # structs of native.c


class CompiledForecast:
    """The arguments of native.c's `forecast_count` and `forecast_settle`."""

    @classmethod
    def of(cls, grid_address: int, edges_address: int, edges_count: int) -> CompiledForecast | None:
        """None without compiled code."""
        names = ("forecast_count", "forecast_settle")
        count, settle = (quick_function(name, None, [ctypes.c_void_p]) for name in names)
        if count is None or settle is None:
            return None
        return cls(count, settle, (grid_address, edges_address), edges_count)

    def __init__(
        self, count: NativeFunction, settle: NativeFunction, grid: tuple[int, int], edges_count: int
    ) -> None:
        self._count, self._settle = count, settle
        self._grid, self._edges_count = grid, edges_count
        self._request = ctypes.create_string_buffer(REQUEST.size)
        self._worker = ctypes.create_string_buffer(WORKER.size)
        self._request_address = ctypes.c_void_p(ctypes.addressof(self._request))
        self._worker_address = ctypes.c_void_p(ctypes.addressof(self._worker))

    def count(
        self,
        curve_address: int,
        is_joined: bool,
        sums_addresses: tuple[int, int],
        since_s: float,
        step_s: float,
        context_tokens: float,
        pages: float,
        tokens_max: float,
    ) -> None:
        """Compute the sums of a request, and add them to the sums of all joined (or all coming)
        requests at `sums_addresses`. `since_s`: start of the grid - start of the answer."""
        REQUEST.pack_into(
            self._request,
            0,
            *self._grid,
            curve_address,
            self._edges_count,
            is_joined,
            *sums_addresses,
            since_s,
            step_s,
            context_tokens,
            pages,
            tokens_max,
        )
        self._count(self._request_address)

    def settle(
        self,
        addresses: tuple[int, int, int, int],
        peaks_address: int,
        sigma: float,
        share: float,
        unattributed: tuple[float, float, float],
    ) -> None:
        """Recompute the peaks. `addresses`: those of the sums of coming requests, the sums of
        joined requests, the sums' upper bound, and the alive share of unattributed requests."""
        WORKER.pack_into(self._worker, 0, *addresses, peaks_address, sigma, share, *unattributed)
        self._settle(self._worker_address)
