"""Slots behind the committed tokens: every round writes there, and overlap scheduling reserves two rounds ahead."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode


def row_headroom(headroom: int) -> int:
    """Slots that a request's row of the token table has beyond the context length, at least what is reserved there.

    With pages of one token SGLang adds room for one round, but reserves two: at the end of the context the second
    would be written into the row of another request. A block of 8 comes to 4 slots too many, a budget of 64 to 61.
    """
    return max(headroom, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)
