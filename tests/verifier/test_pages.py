"""The books of the KV cache, alone and against a model of the memory that says what every slot really holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from verifier.errors import OutOfPages
from verifier.pages import PageLease, PageTable

PAGE_SIZES = [1, 4, 16, 32]


def write(table: PageTable, lease: PageLease, ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Grow, (compute,) commit, trim: what one step does to a sequence."""
    copies = table.grow(lease, lease.num_committed + len(ids))
    table.commit(lease, ids)
    table.trim(lease)
    return copies


def open_and_write(table: PageTable, ids: Sequence[int], salt: bytes = b"") -> PageLease:
    lease = table.open(ids, salt)
    write(table, lease, ids[lease.num_committed :])
    return lease


def num_hit(table: PageTable, ids: Sequence[int], salt: bytes = b"") -> int:
    """How many tokens a new sequence would find in place."""
    lease = table.open(ids, salt)
    table.close(lease)
    return lease.num_cached


# --- lending -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_held_are_those_the_tokens_need(page_size: int) -> None:
    """The tail of the last page was stranded elsewhere, where lengths were counted in tokens and lent in pages."""
    table = PageTable(num_pages=400 // page_size, page_size=page_size)
    lease = table.open([])
    committed = 0
    for run in [*range(1, 10)] * 5:
        look_ahead = committed + run + 7
        table.grow(lease, look_ahead)
        assert len(lease.pages) == -(-look_ahead // page_size) == table.num_used
        table.commit(lease, range(run))
        table.trim(lease)
        committed += run
        assert lease.num_committed == committed
        assert len(lease.pages) == -(-committed // page_size) == table.num_used
        table.check_integrity([lease])
    table.close(lease)
    table.check_integrity([])
    assert table.num_free == table.num_pages


def test_slots_go_through_the_pages_in_order() -> None:
    table = PageTable(num_pages=8, page_size=4)
    other, lease = table.open([]), table.open([])
    for num_tokens in (3, 6, 11):
        table.grow(other, num_tokens)
        table.grow(lease, num_tokens)
    slots = [table.slot(lease, logical) for logical in range(11)]
    assert slots == [lease.pages[logical // 4] * 4 + logical % 4 for logical in range(11)]
    assert not set(slots) & {table.slot(other, logical) for logical in range(11)}


def test_growing_less_than_there_is_changes_nothing() -> None:
    table = PageTable(num_pages=8, page_size=4)
    lease = open_and_write(table, range(10))
    pages = list(lease.pages)
    assert table.grow(lease, 3) == table.grow(lease, 10) == table.grow(lease, 12) == ()
    assert lease.pages == pages


def test_out_of_pages_changes_nothing() -> None:
    table = PageTable(num_pages=4, page_size=4)
    lease = open_and_write(table, range(6))
    fork = table.fork(lease)
    assert table.can_grow(fork, 12)  # a copy of the second page and a third one
    assert not table.can_grow(fork, 13)
    pages, num_free = list(fork.pages), table.num_free
    with pytest.raises(OutOfPages, match="13 tokens need 3 pages more, but 2 are free"):
        table.grow(fork, 13)
    assert (fork.pages, table.num_free) == (pages, num_free)
    table.check_integrity([lease, fork])
    assert len(table.grow(fork, 12)) == 1


def test_closing_twice_is_harmless_and_using_a_closed_lease_is_not() -> None:
    table = PageTable(num_pages=4, page_size=4)
    lease = open_and_write(table, range(6))
    table.close(lease)
    table.close(lease)
    table.check_integrity([])
    with pytest.raises(AssertionError, match="closed"):
        table.grow(lease, 1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_nothing_leaks_over_many_requests(page_size: int) -> None:
    """Two pages were lost elsewhere with every speculative request."""
    dice = random.Random(0)
    table = PageTable(num_pages=64, page_size=page_size, prefix_cache=False)
    for _ in range(200):
        lease = table.open([])
        for _ in range(dice.randrange(6)):  # ends after any step
            run = dice.randrange(1, 6)
            table.grow(lease, lease.num_committed + run + 5)
            if dice.random() < 0.2:  # aborted between growing and committing
                break
            table.commit(lease, range(run))
            if dice.random() < 0.5:
                table.trim(lease)
        table.close(lease)
        table.check_integrity([])
        assert table.num_free == 64


# --- prefixes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_finds_its_prefix_but_never_its_last_token(page_size: int, extra: int) -> None:
    table = PageTable(num_pages=16 * 32 // page_size, page_size=page_size)
    ids = [*range(3 * page_size + extra)]
    table.close(open_and_write(table, ids))
    again = table.open(ids)
    full_pages = len(ids) // page_size
    assert again.num_committed == again.num_cached == min(full_pages * page_size, len(ids) - 1)
    assert len(again.pages) == -(-again.num_committed // page_size)  # no page of which no slot is of use
    table.check_integrity([again])


def test_nothing_is_found_for_no_ids_and_one_id() -> None:
    table = PageTable(num_pages=4, page_size=1)
    table.close(open_and_write(table, [5, 6]))
    assert num_hit(table, []) == num_hit(table, [5]) == 0
    assert num_hit(table, [5, 6]) == 1


def test_only_the_same_prefix_is_found() -> None:
    """A page's KV depends on all tokens before it, not on its own alone."""
    table = PageTable(num_pages=16, page_size=2)
    table.close(open_and_write(table, [1, 2, 3, 4, 5, 6]))
    assert num_hit(table, [1, 2, 3, 4, 9, 9, 9]) == 4
    assert num_hit(table, [1, 2, 9, 4, 5, 6, 7]) == 2
    assert num_hit(table, [3, 4, 5, 6, 7]) == 0


def test_salts_namespaces_and_their_border_keep_prefixes_apart() -> None:
    ids = [1, 2, 3, 4, 5]
    table = PageTable(num_pages=16, page_size=2, namespace=b"model")
    first = open_and_write(table, ids, salt=b"key")
    assert num_hit(table, ids, salt=b"key") == 4
    assert num_hit(table, ids) == num_hit(table, ids, salt=b"other") == 0
    roots = {PageTable(1, 1, namespace=name).open([], salt).chain for name, salt in ((b"ab", b"c"), (b"a", b"bc"))}
    assert len(roots) == 2
    assert first.chain != open_and_write(PageTable(16, 2, namespace=b"model 2"), ids, salt=b"key").chain


def test_without_prefix_cache_nothing_is_found_or_kept() -> None:
    table = PageTable(num_pages=8, page_size=2, prefix_cache=False)
    lease = open_and_write(table, range(8))
    assert num_hit(table, range(9)) == 0
    table.close(lease)
    assert (table.num_free, table.num_cached_pages) == (8, 0)


def test_a_page_is_found_while_its_first_holder_still_runs() -> None:
    table = PageTable(num_pages=8, page_size=2)
    first = open_and_write(table, [1, 2, 3, 4, 5])
    second = table.open([1, 2, 3, 4, 9])
    assert second.pages == first.pages[:2]
    assert table.num_used == 3
    table.close(first)
    table.check_integrity([second])
    assert table.num_cached_pages == 0


def test_look_ahead_is_never_found() -> None:
    """Pages hashed before the walk had chosen gave other requests the KV of rejected guesses."""
    table = PageTable(num_pages=8, page_size=2)
    lease = table.open([])
    table.grow(lease, 8)
    table.commit(lease, [1, 2, 3])
    assert num_hit(table, [1, 2, 3, 4, 5]) == 2
    table.commit(lease, [4])
    assert num_hit(table, [1, 2, 3, 4, 5]) == 4


def test_equal_pages_are_registered_once_and_both_kept_private() -> None:
    table = PageTable(num_pages=8, page_size=2)
    first, second = table.open([1, 2, 3]), table.open([1, 2, 3])
    write(table, first, [1, 2, 3])
    write(table, second, [1, 2, 3])
    assert not set(first.pages) & set(second.pages)
    assert table.open([1, 2, 3]).pages == first.pages[:1]
    write(table, second, [4])  # goes on from the same chain, so its next page is found behind the first one's
    third = table.open([1, 2, 3, 4, 5])
    assert third.pages == [first.pages[0], second.pages[1]]
    table.close(second)
    assert table.num_free == 8 - 3


def test_a_second_turn_continues_the_chain_of_a_hit() -> None:
    table = PageTable(num_pages=16, page_size=4)
    turn = [*range(10)]
    for _ in range(5):
        lease = table.open(turn)
        assert lease.num_cached >= len(turn) - 10 - 3
        write(table, lease, turn[lease.num_committed :])
        answer = range(100 + len(turn), 106 + len(turn))
        write(table, lease, answer)
        table.close(lease)
        turn += [*answer, 7, 7, 7, 7]
    assert table.num_evicted == 0


# --- copy on write -------------------------------------------------------------------------------------------------


def test_a_whole_prompt_held_by_another_is_copied_on_write() -> None:
    table = PageTable(num_pages=8, page_size=4)
    ids = [*range(8)]
    first = open_and_write(table, ids)
    second = table.open(ids)
    assert (second.num_committed, second.pages) == (7, first.pages)
    shared = second.pages[1]
    assert table.grow(second, 8) == ((shared, second.pages[1]),)
    assert second.pages[0] == first.pages[0]
    assert first.pages[1] == shared
    table.commit(second, [7])
    table.check_integrity([first, second])
    assert table.open(ids).pages == first.pages


def test_a_whole_prompt_held_by_nobody_is_written_in_place() -> None:
    """A sequence that needs every page of the pool could never run again if its own last page had to be copied."""
    table = PageTable(num_pages=2, page_size=4)
    ids = [*range(8)]
    table.close(open_and_write(table, ids))
    lease = table.open(ids)
    assert lease.num_committed == 7
    assert table.can_grow(lease, 8)
    assert table.grow(lease, 8) == ()
    assert num_hit(table, ids) == 4  # its content is about to change
    table.commit(lease, [7])
    assert num_hit(table, ids) == 7
    table.check_integrity([lease])


def test_forks_copy_only_the_page_they_write() -> None:
    table = PageTable(num_pages=8, page_size=4)
    lease = open_and_write(table, range(6))
    table.grow(lease, 11)
    fork = table.fork(lease)
    assert fork.pages == lease.pages[:2]  # not the look-ahead
    assert fork.num_committed == 6
    shared = lease.pages[1]
    assert write(table, fork, [7, 8]) == ((shared, fork.pages[1]),)
    assert write(table, lease, [7, 9]) == ()  # by now nobody else holds it
    assert lease.pages[0] == fork.pages[0]
    assert lease.pages[1] == shared != fork.pages[1]
    table.check_integrity([lease, fork])


def test_a_fork_at_the_end_of_a_page_needs_no_copy() -> None:
    table = PageTable(num_pages=8, page_size=4)
    lease = open_and_write(table, range(8))
    fork = table.fork(lease)
    assert write(table, fork, [1]) == write(table, lease, [1]) == ()
    assert lease.pages[:2] == fork.pages[:2]
    assert lease.pages[2] != fork.pages[2]


def test_committing_to_a_shared_page_is_noticed() -> None:
    table = PageTable(num_pages=8, page_size=4)
    lease = open_and_write(table, range(6))
    table.grow(lease, 7)
    table.fork(lease)
    with pytest.raises(AssertionError, match="without growing"):
        table.commit(lease, [6])


# --- eviction ------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    table = PageTable(num_pages=6, page_size=2)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    table.close(open_and_write(table, old))
    table.close(open_and_write(table, new))
    assert num_hit(table, [*old, 0]) == 6  # touched: now the more recent one
    hits = []
    for num_pages in range(1, 7):
        lease = table.open([])
        table.grow(lease, 2 * num_pages)
        hits.append((len(table.open([*new, 0]).pages), len(table.open([*old, 0]).pages)))
        assert table.num_evicted == num_pages
        table = PageTable(num_pages=6, page_size=2)
        table.close(open_and_write(table, old))
        table.close(open_and_write(table, new))
        num_hit(table, [*old, 0])
    assert hits == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_held_prefixes_are_never_evicted() -> None:
    table = PageTable(num_pages=4, page_size=2)
    table.close(open_and_write(table, [1, 2, 3, 4]))
    reader = table.open([1, 2, 3, 4, 5])
    writer = table.open([])
    assert not table.can_grow(writer, 5)
    table.grow(writer, 4)
    table.check_integrity([reader, writer])
    assert num_hit(table, [1, 2, 3, 4, 5]) == 4
    assert table.num_evicted == 0


@pytest.mark.parametrize(("num_spare", "num_evicted"), [(2, 0), (1, 1), (0, 2)])
def test_look_ahead_evicts_no_more_than_it_needs_at_once(num_spare: int, num_evicted: int) -> None:
    """A reserve for drafts silently halved the reuse of prefixes elsewhere. Trimmed pages are the next to be lent."""
    table = PageTable(num_pages=4 + num_spare, page_size=4)
    table.close(open_and_write(table, range(16)))
    for _ in range(10):
        lease = table.open([])
        table.grow(lease, 8)
        table.commit(lease, [1])
        table.trim(lease)
        table.close(lease)
    assert table.num_evicted == num_evicted
    assert table.num_cached_pages == 4 - num_evicted
    assert num_hit(table, range(17)) == 16 - 4 * num_evicted


# --- integrity -----------------------------------------------------------------------------------------------------


def test_integrity_says_what_is_wrong() -> None:
    table = PageTable(num_pages=4, page_size=2)
    lease = open_and_write(table, [1, 2, 3])
    with pytest.raises(AssertionError, match="page 0 must be in one place, but is lost"):
        table.check_integrity([])
    with pytest.raises(AssertionError, match="page 0 counts 1 holders, but 2 leases hold it"):
        table.check_integrity([lease, lease])
    lease.num_committed = 5
    with pytest.raises(AssertionError, match="lease 0: 5 tokens, 4 slots"):
        table.check_integrity([lease])
    lease.num_committed = 2
    with pytest.raises(AssertionError, match="lease 0: tail of the wrong length"):
        table.check_integrity([lease])
    lease.num_committed = 3
    table._free.append(0)
    with pytest.raises(AssertionError, match="page 0 must be in one place, but is free and held"):
        table.check_integrity([lease])
    table._free[-1] = 2
    with pytest.raises(AssertionError, match="page 2 must be in one place, but is free and free"):
        table.check_integrity([lease])
    table._free.pop()
    table._index[b"hash"] = 1
    with pytest.raises(AssertionError, match="page 1 under a hash that is not its own"):
        table.check_integrity([lease])
    table._keys[1] = b"hash"
    lease.num_committed, lease.tail = 2, ()
    with pytest.raises(AssertionError, match="look-ahead page 1 is shared or hashed"):
        table.check_integrity([lease])


# --- against a model of the memory ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    lease: PageLease
    salt: bytes
    ids: list[int]  # the prompt, of which some may still have to be computed, and what was committed after it


@dataclass
class Memory:
    """An engine without a model: sequences come, run in batches, fork, are preempted and end, in any order.

    Few ids, few texts, two salts and few pages, so that prefixes meet and pages run out all the time. Every slot
    remembers what was last written to it: the name of an id with all that came before it, or of a guess.
    """

    dice: random.Random
    table: PageTable
    running: list[Running] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=lambda: [[]])
    names: dict[tuple[object, object], int] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.memory = [-1] * (self.table.num_pages * self.table.page_size)

    def name(self, before: object, last: object) -> int:
        return self.names.setdefault((before, last), len(self.names))

    def names_of(self, sequence: Running) -> list[int]:
        """What the sequence must read in its committed slots."""
        names: list[int] = []
        for token in sequence.ids[: sequence.lease.num_committed]:
            names.append(self.name(names[-1] if names else sequence.salt, token))
        return names

    def random_ids(self, most: int) -> list[int]:
        return self.dice.choices((0, 1), k=self.dice.randint(1, most))

    def open(self, ids: list[int], salt: bytes) -> None:
        lease = self.table.open(ids, salt)
        assert lease.num_cached == lease.num_committed < len(ids)
        self.seen["hit"] += lease.num_cached > 0
        self.seen["whole prompt hit"] += len(lease.pages) * self.table.page_size == len(ids)
        self.running.append(Running(lease, salt, ids))

    def arrive(self) -> None:
        text = self.dice.choice(self.texts)
        cut = self.dice.choice((len(text), self.dice.randint(0, len(text))))
        more = self.dice.choice((0, self.table.page_size + 2))
        self.open(text[:cut] + self.random_ids(more) if more else text[:cut] or [0], self.dice.choice((b"", b"key")))

    def end(self, sequence: Running) -> None:
        self.table.close(sequence.lease)
        self.running.remove(sequence)
        self.texts = [*self.texts[-3:], sequence.ids]

    def preempt(self, sequence: Running) -> None:
        self.end(sequence)
        self.open(list(sequence.ids), sequence.salt)

    def fork(self, sequence: Running) -> None:
        self.running.append(Running(self.table.fork(sequence.lease), sequence.salt, list(sequence.ids)))

    def step(self) -> None:
        """Grow, some being preempted at once; copy; write; move what was kept into place; commit."""
        planned: list[tuple[Running, list[int], list[int]]] = []
        copies: list[tuple[int, int]] = []
        for sequence in self.dice.sample(self.running, self.dice.randint(1, min(4, len(self.running)))):
            if sequence not in self.running:  # preempted for the one before
                continue
            left = sequence.ids[sequence.lease.num_committed :]
            ids = left[: self.dice.randint(1, 2 * self.table.page_size)] or self.random_ids(6)
            nodes = len(ids) + self.dice.randint(0, 6)
            if not self.grow(sequence.lease, sequence.lease.num_committed + nodes, copies):
                self.preempt(self.dice.choice(self.running))
                planned = [plan for plan in planned if plan[0] in self.running]
            elif self.dice.random() < 0.1:
                self.preempt(sequence)
            else:
                planned.append((sequence, ids, sorted(self.dice.sample(range(nodes), len(ids)))))
        self.copy_pages(copies)
        for sequence, ids, kept in planned:
            self.write(sequence, ids, kept)
        for sequence, ids, kept in planned:
            start = sequence.lease.num_committed
            self.move(sequence.lease, start, kept)
            self.table.commit(sequence.lease, ids)
            sequence.ids[start : start + len(ids)] = ids
            if self.dice.random() < 0.7:
                self.table.trim(sequence.lease)

    def grow(self, lease: PageLease, num_tokens: int, copies: list[tuple[int, int]]) -> bool:
        fits = self.table.can_grow(lease, num_tokens)
        before = list(lease.pages), self.table.num_free, self.table.num_evicted
        num_spare = self.table.num_free - self.table.num_cached_pages
        try:
            copies.extend(self.table.grow(lease, num_tokens))
        except OutOfPages:
            assert not fits
            assert before == (lease.pages, self.table.num_free, self.table.num_evicted)
            self.seen["out of pages"] += 1
            return False
        assert fits
        num_taken = before[1] - self.table.num_free
        assert self.table.num_evicted == before[2] + max(0, num_taken - num_spare)
        assert len(lease.pages) * self.table.page_size >= num_tokens
        return True

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        size, before = self.table.page_size, list(self.memory)
        self.seen["copy"] += len(pairs)
        for source, target in pairs:
            self.memory[target * size : (target + 1) * size] = before[source * size : (source + 1) * size]

    def write(self, sequence: Running, ids: list[int], kept: list[int]) -> None:
        """Node ``kept[i]`` will turn out to be ``ids[i]``; all other slots hold guesses that nobody may ever read."""
        table, start = self.table, sequence.lease.num_committed
        for logical in range(start, len(sequence.lease.pages) * table.page_size):
            self.memory[table.slot(sequence.lease, logical)] = self.name("guess", len(self.names))
        before = self.names_of(sequence)
        name: object = before[-1] if before else sequence.salt
        for token, node in zip(ids, kept, strict=True):
            name = self.memory[table.slot(sequence.lease, start + node)] = self.name(name, token)

    def move(self, lease: PageLease, start: int, kept: list[int]) -> None:
        moved = [self.memory[self.table.slot(lease, start + node)] for node in kept]
        for logical, name in enumerate(moved, start):
            self.memory[self.table.slot(lease, logical)] = name

    def check(self) -> None:
        leases = [sequence.lease for sequence in self.running]
        self.table.check_integrity(leases)
        assert self.table.num_used == len({page for lease in leases for page in lease.pages})
        for sequence in self.running:
            slots = [self.table.slot(sequence.lease, logical) for logical in range(sequence.lease.num_committed)]
            assert [self.memory[slot] for slot in slots] == self.names_of(sequence)

    def act(self) -> None:
        """One random thing that can happen."""
        if not self.running or (len(self.running) < 5 and self.dice.random() < 0.25):
            self.arrive()
        elif self.dice.random() < 0.6:
            self.step()
        else:
            self.dice.choice((self.fork, self.preempt, self.end, self.end))(self.dice.choice(self.running))


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 40), (4, 14), (16, 7), (32, 6)])
def test_everyone_reads_their_own_tokens_whatever_happens(page_size: int, num_pages: int, prefix_cache: bool) -> None:
    """However the pages went round, a lease reads its own tokens behind its own prefix, and nothing leaks."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        table = PageTable(num_pages, page_size, prefix_cache=prefix_cache)
        world = Memory(random.Random(seed), table)
        for _ in range(100):
            world.act()
            world.check()
        for sequence in list(world.running):
            world.end(sequence)
        table.check_integrity([])
        assert table.num_free == num_pages
        seen += world.seen + Counter(evicted=table.num_evicted)
    bites = {"out of pages", "copy"} if page_size > 1 else {"out of pages"}
    if prefix_cache:
        bites |= {"hit", "evicted"} | ({"whole prompt hit"} if page_size > 1 else set())
    assert bites <= set(+seen), f"too tame to prove anything: {seen}"


# --- namespaces ----------------------------------------------------------------------------------------------------


def test_nothing_of_an_earlier_namespace_is_found() -> None:
    """Not even what leases from that time commit and leave behind later."""
    table = PageTable(num_pages=16, page_size=2, namespace=b"old")
    table.close(open_and_write(table, [7, 7, 7, 7, 7]))
    going_on = open_and_write(table, [1, 2, 3, 4, 5])
    table.change_namespace(b"new")
    assert table.num_cached_pages == 0
    write(table, going_on, [6, 7, 8])
    table.check_integrity([going_on])
    assert num_hit(table, [7, 7, 7, 7, 7]) == num_hit(table, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    table.close(going_on)
    assert num_hit(table, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    table.close(open_and_write(table, [1, 2, 3, 4, 5]))
    assert num_hit(table, [1, 2, 3, 4, 5, 6]) == 4
    table.check_integrity([])
