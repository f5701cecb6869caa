"""The books of the paged KV cache: which sequence holds which page, and which pages are kept for their prefix.

Knows page numbers, token ids and counts. Knows no tensors (see ``pool.py``), no models and no scheduling. Everything
here runs on the engine's thread, between forward passes.

The life of a page:

                 grow                 commit fills it
         free ──────────▶ private ───────────────────▶ hashed       held by leases
           ▲               │  ▲ ▲                       │ │ ▲
           └───────────────┘  │ └───────────────────────┘ │ │
             close, trim      │   grow: its only holder   │ │
                              │   is about to write it    │ │
                              │                     close │ │ open
                              │                           ▼ │
                              └────────────────────────── cached     held by nobody
                                grow, none free: evicted

A lease's logical slots:

         0             num_committed             len(pages) * page_size
         ├── committed ──┼────── look-ahead ───────┼── nothing
           in place;       this lease alone
           may be shared   writes here; never
           and hashed      shared, never hashed

The page in which committed tokens end may hold slots of both kinds. It is the only one that can be shared when it is
about to be written, and is then copied: after a fork, or when the cache held a whole prompt, whose last token has to
be computed once more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from struct import pack

from verifier.errors import OutOfPages


def _root_key(namespace: bytes, salt: bytes) -> bytes:
    return sha256(pack("<q", len(namespace)) + namespace + salt).digest()


def _page_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """Names a page by everything its KV depends on: its own ids, and through ``parent`` all ids before it."""
    return sha256(parent + pack(f"<{len(ids)}q", *ids)).digest()


@dataclass(slots=True, eq=False)
class PageLease:
    """One sequence's hold on its pages. To be read by anybody, changed by the ``PageTable`` only."""

    chain: bytes  # key of the last page that committed tokens fill, at first the root's; empty once closed
    pages: list[int] = field(default_factory=list)  # in order of logical slots
    tail: tuple[int, ...] = ()  # ids of the committed tokens after those full pages
    num_committed: int = 0  # tokens whose KV is in place
    num_cached: int = 0  # tokens that were in place when the lease was opened


class PageTable:
    """Lends pages to sequences and remembers which prefixes they hold.

    Args:
        namespace: whatever else the KV depends on: the fingerprint of the model, its weights and precision.
        prefix_cache: off, no page is ever hashed, so none outlives its lease.

    Attributes:
        num_evicted: pages that were kept for their prefix and given to another sequence, since the start.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True, namespace: bytes = b"") -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.namespace = namespace
        self.num_evicted = 0
        self._free = list(reversed(range(num_pages)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # held by nobody, least recently used first
        self._holders = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that ``grow`` can hand out, those kept for their prefix included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages held by at least one lease."""
        return self.num_pages - self.num_free

    @property
    def num_cached_pages(self) -> int:
        """Those of ``num_free`` that are kept for their prefix."""
        return len(self._cached)

    def open(self, ids: Sequence[int], salt: bytes = b"") -> PageLease:
        """Takes the longest prefix of ``ids`` that lies in whole cached pages under the same namespace and salt.

        At most all tokens but the last count as committed: the last must be computed for its logits.
        """
        lease = PageLease(chain=_root_key(self.namespace, salt))
        for start in range(0, len(ids) - 1, self.page_size):
            end = start + self.page_size
            key = _page_key(lease.chain, ids[start:end])
            page = self._index.get(key)
            if page is None:
                break
            self._hold(page)
            lease.pages.append(page)
            if end < len(ids):
                lease.chain = key
                lease.num_committed = end
            else:
                lease.tail = tuple(ids[start:-1])
                lease.num_committed = len(ids) - 1
        lease.num_cached = lease.num_committed
        return lease

    def can_grow(self, lease: PageLease, num_tokens: int) -> bool:
        return self._num_wanted(lease, num_tokens) <= self.num_free

    def grow(self, lease: PageLease, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Makes logical slots ``0..num_tokens-1`` exist; those from ``num_committed`` on are this lease's to write.

        They are until it is forked. A hashed page that is about to be written is copied if others hold it too;
        otherwise it only leaves the index, until it is filled again.

        Returns:
            Pages to copy, as (source, target), before the next forward pass writes anything.

        Raises:
            OutOfPages: and nothing has changed.
        """
        assert lease.chain, "a closed lease was grown"
        wanted = self._num_wanted(lease, num_tokens)
        if wanted > self.num_free:
            raise OutOfPages(f"{num_tokens} tokens need {wanted} pages more, but {self.num_free} are free.")
        copies: list[tuple[int, int]] = []
        boundary = self._boundary(lease, num_tokens)
        if boundary is not None:
            source = lease.pages[boundary]
            if self._is_shared(source):
                lease.pages[boundary] = self._take()
                self._release(source)
                copies.append((source, lease.pages[boundary]))
            else:
                self._withdraw(source)
        while len(lease.pages) < self._num_pages_of(num_tokens):
            lease.pages.append(self._take())
        return tuple(copies)

    def commit(self, lease: PageLease, ids: Sequence[int]) -> None:
        """The KV of ``ids`` now lies in place, in the slots after ``num_committed``, for good.

        Pages that this fills can be found by ``open`` from now on; of pages with equal content the first one is.
        """
        first_page = lease.num_committed // self.page_size
        lease.num_committed += len(ids)
        assert lease.num_committed <= len(lease.pages) * self.page_size, "more tokens committed than there are slots"
        pages = lease.pages[first_page : self._num_pages_of(lease.num_committed)]
        assert all(map(self._is_private, pages)), f"tokens committed to {pages} without growing first"
        tail = (*lease.tail, *ids)
        num_full = len(tail) // self.page_size
        for number, page in enumerate(pages[:num_full]):
            start = number * self.page_size
            lease.chain = _page_key(lease.chain, tail[start : start + self.page_size])
            if self.prefix_cache and lease.chain not in self._index:
                self._keys[page] = lease.chain
                self._index[lease.chain] = page
        lease.tail = tail[num_full * self.page_size :]

    def trim(self, lease: PageLease) -> None:
        """Gives back the pages that hold look-ahead only."""
        while len(lease.pages) > self._num_pages_of(lease.num_committed):
            self._release(lease.pages.pop())

    def fork(self, lease: PageLease) -> PageLease:
        """A second lease on the same committed tokens. Both must grow before either writes."""
        pages = lease.pages[: self._num_pages_of(lease.num_committed)]
        for page in pages:
            self._hold(page)
        return replace(lease, pages=pages)

    def close(self, lease: PageLease) -> None:
        """Gives everything back. Hashed pages are kept, the deepest to be evicted first, so that prefixes survive."""
        lease.chain, lease.tail, lease.num_committed = b"", (), 0
        while lease.pages:
            self._release(lease.pages.pop())

    def change_namespace(self, namespace: bytes) -> None:
        """Something else is kept with the KV from now on: what was committed before is found by ``open`` no more.

        Leases that are open go on; nobody finds what they commit.
        """
        self.namespace = namespace
        while self._cached:
            page, _ = self._cached.popitem(last=False)
            self._withdraw(page)
            self._free.append(page)

    def slot(self, lease: PageLease, logical: int) -> int:
        """The physical slot of a logical one."""
        page, offset = divmod(logical, self.page_size)
        return lease.pages[page] * self.page_size + offset

    def check_integrity(self, leases: Sequence[PageLease]) -> None:
        """Proves the books, given all open leases. For tests and idle moments: it looks at every page.

        Raises:
            AssertionError: saying what is wrong.
        """
        held = Counter(page for lease in leases for page in lease.pages)
        free = Counter(self._free)
        for page in range(self.num_pages):
            places = ["free"] * free[page] + ["cached"] * (page in self._cached) + ["held"] * (held[page] > 0)
            assert len(places) == 1, f"page {page} must be in one place, but is {' and '.join(places) or 'lost'}"
            holders = self._holders[page]
            assert holders == held[page], f"page {page} counts {holders} holders, but {held[page]} leases hold it"
            key = self._keys[page]
            assert key is None or self._index.get(key) == page, f"page {page} is hashed, but the index has another"
            assert page not in self._cached or key is not None, f"page {page} is cached without a hash"
            assert not free[page] or key is None, f"page {page} is free, but still hashed"
        for key, page in self._index.items():
            assert self._keys[page] == key, f"the index has page {page} under a hash that is not its own"
        for number, lease in enumerate(leases):
            num_slots = len(lease.pages) * self.page_size
            assert num_slots >= lease.num_committed, f"lease {number}: {lease.num_committed} tokens, {num_slots} slots"
            assert len(lease.tail) == lease.num_committed % self.page_size, f"lease {number}: tail of the wrong length"
            for page in lease.pages[self._num_pages_of(lease.num_committed) :]:
                assert self._is_private(page), f"lease {number}: look-ahead page {page} is shared or hashed"

    def _num_pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _boundary(self, lease: PageLease, num_tokens: int) -> int | None:
        """Index of the page that ends in look-ahead once there is any, if the lease has that page already."""
        boundary = lease.num_committed // self.page_size
        return boundary if lease.num_committed < num_tokens and boundary < len(lease.pages) else None

    def _num_wanted(self, lease: PageLease, num_tokens: int) -> int:
        boundary = self._boundary(lease, num_tokens)
        num_copies = boundary is not None and self._is_shared(lease.pages[boundary])
        return num_copies + max(0, self._num_pages_of(num_tokens) - len(lease.pages))

    def _is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def _is_private(self, page: int) -> bool:
        return self._holders[page] == 1 and self._keys[page] is None

    def _take(self) -> int:
        """A page with nothing of value in it, held once."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._withdraw(page)
            self.num_evicted += 1
        self._holders[page] = 1
        return page

    def _hold(self, page: int) -> None:
        self._cached.pop(page, None)
        self._holders[page] += 1

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] > 0:
            return
        if self._keys[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None

    def _withdraw(self, page: int) -> None:
        """Takes a page out of the index, since its content is about to change."""
        key = self._keys[page]
        if key is not None:
            del self._index[key]
            self._keys[page] = None
