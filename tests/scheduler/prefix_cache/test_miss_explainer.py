"""`miss_explainer.py` and `miss_explainer.py`, through `RadixCache.explain`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.prefix_cache.miss_explainer import MAX_CHILDREN, MAX_NAMESPACES
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from engine.scheduler.records.verdict import CacheMiss, MissKind
from tests.scheduler.prefix_cache.cached_pool import CachedPool, ids
from tests.selection import examples


def explain(pool, prompt, extra_key=""):
    """Look a prompt up as the scheduler does, and ask."""
    cache, token_ids = pool.cache, ids(*prompt)
    match = cache.match(extra_key, token_ids, (len(prompt) - 1) // pool.page_size)
    return cache.explain(extra_key, token_ids, match, "r")


def why(pool, prompt, extra_key=""):
    """(kind, prefix_len, differs_at)."""
    miss = explain(pool, prompt, extra_key)
    assert (miss.rid, miss.prompt_len) == ("r", len(prompt))
    return miss.kind, miss.prefix_len, miss.differs_at


@pytest.fixture
def pool():
    """Pages of four tokens; 1..12 cached, and 1..4 with another end."""
    pool = CachedPool(64, page_size=4)
    pool.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    pool.serve([1, 2, 3, 4, 25, 26, 27, 28])
    return pool


def test_all_that_can_be_cached_was(pool):
    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]) == (MissKind.NONE, 12, 12)
    assert why(pool, [1, 2, 3, 4, 5]) == (MissKind.NONE, 4, 4)
    assert why(pool, [1]) == (MissKind.NONE, 0, 0)


def test_the_rest_fills_no_page(pool):
    assert why(pool, [1, 2, 3, 4, 5, 6, 7]) == (MissKind.ROUNDING, 4, 4)
    assert why(pool, [1, 2, 3]) == (MissKind.ROUNDING, 0, 0)
    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 8]) == (MissKind.ROUNDING, 4, 4)  # the last token is computed


def test_nothing_begins_like_this(pool):
    assert why(pool, [9, 9, 9, 9, 9]) == (MissKind.NO_PREFIX, 0, 0)
    assert why(CachedPool(8), [1, 2, 3]) == (MissKind.NO_PREFIX, 0, 0)
    assert why(pool, [1, 2, 3, 4, 5], "unheard of")[0] is MissKind.OTHER_NAMESPACE


def test_the_first_token_that_differs_inside_a_node(pool):
    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99, 12, 13]) == (MissKind.DIFFERS, 8, 10)
    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 99, 9, 10, 11, 12, 13]) == (MissKind.DIFFERS, 4, 7)


def test_the_first_token_that_differs_from_the_best_child(pool):
    assert why(pool, [1, 2, 3, 4, 5, 6, 99, 8, 9]) == (MissKind.DIFFERS, 4, 6)  # 5 6 7 8, not 25 26 27 28
    assert why(pool, [1, 2, 3, 4, 25, 99, 27, 28, 9]) == (MissKind.DIFFERS, 4, 5)
    assert why(pool, [1, 2, 3, 4, 77, 6, 7, 8, 9]) == (MissKind.DIFFERS, 4, 4)
    assert why(pool, [1, 2, 99, 4, 5]) == (MissKind.DIFFERS, 0, 2)


def test_the_best_of_the_newest_children(pool):
    for token in range(100, 100 + MAX_CHILDREN):
        pool.serve([1, 2, 3, 4, token, 0, 0, 0])

    assert why(pool, [1, 2, 3, 4, 107, 0, 9, 0, 9]) == (MissKind.DIFFERS, 4, 6)
    assert why(pool, [1, 2, 3, 4, 5, 6, 99, 8, 9]) == (MissKind.DIFFERS, 4, 4)  # 5 6 7 8 was not looked at


def test_a_conversation_goes_on(pool):
    assert why(pool, [*range(1, 13), 50, 51, 52, 53, 54]) == (MissKind.PROMPT_LONGER, 12, 12)


def test_the_rest_was_evicted(pool):
    prompt = list(range(1, 14))
    pool.cache.evict(1)

    assert explain(pool, prompt) == CacheMiss("r", 13, 8, MissKind.EVICTED, 8, evicted_at=1)

    pool.cache.evict(2)
    assert explain(pool, prompt) == CacheMiss("r", 13, 4, MissKind.EVICTED, 4, evicted_at=2)
    assert explain(pool, [1, 2, 3, 4, 25, 26, 27, 28, 29]).evicted_at == 2

    pool.cache.evict(1)
    assert explain(pool, prompt) == CacheMiss(
        "r", 13, 0, MissKind.EVICTED, 0, evicted_at=3
    )  # root is gone, too
    assert why(pool, [9, 9, 9, 9, 9]) == (MissKind.NO_PREFIX, 0, 0)


def test_only_the_page_that_went_counts_as_evicted(pool):
    pool.cache.evict(1)  # 9 10 11 12

    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99, 13])[0] is MissKind.PROMPT_LONGER
    assert why(pool, [1, 2, 3, 4, 9, 10, 11, 12, 13])[0] is MissKind.DIFFERS


def test_what_stood_behind_the_old_end_did_not_stand_behind_the_new_one(pool):
    pool.cache.evict(1)  # 9 10 11 12 from behind 5 6 7 8
    pool.serve([1, 2, 3, 4, 25, 26, 27, 28])  # so that the next one is 5 6 7 8
    pool.cache.evict(1)

    assert why(pool, [1, 2, 3, 4, 9, 10, 11, 12, 13])[0] is MissKind.DIFFERS
    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])[0] is MissKind.EVICTED


def test_what_came_back_and_was_forgotten_was_not_evicted(pool):
    prompt = list(range(1, 14))
    pool.cache.evict(1)
    _, lease = pool.begin(prompt[:12])
    pool.cache.forget(lease)

    assert why(pool, prompt)[0] is not MissKind.EVICTED


def test_a_tombstone_survives_a_split():
    pool = CachedPool(64, page_size=1)
    pool.serve([1, 2, 3, 4])
    pool.cache.evict(1)
    pool.serve([1, 9])  # cuts 1 2 3

    assert why(pool, [1, 2, 3, 4, 5]) == (MissKind.EVICTED, 3, 3)
    assert why(pool, [1, 4, 5]) == (MissKind.DIFFERS, 1, 1)


def test_another_namespace_has_it(pool):
    pool.serve([1, 2, 3, 4], "bob")

    assert why(pool, list(range(1, 14)), "bob") == (MissKind.OTHER_NAMESPACE, 4, 4)
    assert why(pool, list(range(1, 14)), "eve") == (MissKind.OTHER_NAMESPACE, 0, 0)
    assert why(pool, [1, 2, 3, 4, 5, 6, 7, 99, 9], "bob") == (MissKind.PROMPT_LONGER, 4, 4)
    assert why(pool, [1, 2, 3, 4, 25, 26, 27, 28, 5, 6, 7, 8, 9], "bob") == (MissKind.OTHER_NAMESPACE, 4, 4)


def test_only_the_common_and_the_newest_namespaces_are_looked_at():
    pool = CachedPool(64)
    pool.serve([1, 2, 3], "old")
    for number in range(MAX_NAMESPACES):
        pool.serve([7], f"new-{number}")

    assert why(pool, [1, 2, 3, 4], "mine")[0] is MissKind.NO_PREFIX
    assert why(pool, [7, 2], "mine")[0] is MissKind.OTHER_NAMESPACE

    pool = CachedPool(64)
    pool.serve([1, 2, 3])
    for number in range(MAX_NAMESPACES):
        pool.serve([7], f"new-{number}")
    assert why(pool, [1, 2, 3, 4], "mine")[0] is MissKind.OTHER_NAMESPACE


def test_the_own_eviction_comes_before_another_namespace():
    pool = CachedPool(64)
    pool.serve([1, 2], "mine")
    pool.cache.evict(1)
    pool.serve([1, 2], "other")

    assert why(pool, [1, 2, 3], "mine") == (MissKind.EVICTED, 1, 1)


def test_tombstones_are_bounded_and_the_oldest_go():
    pool = CachedPool(100)
    pool.cache = RadixCache(1, max_evictions_remembered=10)
    for number in range(100):
        pool.serve([number], f"salt-{number}")
    pool.cache.evict(100)

    assert len(pool.cache._eviction_history) == 10
    assert why(pool, [89, 0], "salt-89")[0] is MissKind.NO_PREFIX
    assert why(pool, [90, 0], "salt-90")[0] is MissKind.EVICTED


def test_cutting_one_leaf_page_by_page_leaves_one_tombstone():
    pool = CachedPool(100)
    pool.serve(list(range(100)))
    for _ in range(60):
        pool.cache.evict(1)

    assert len(pool.cache._eviction_history) == 1
    assert explain(pool, list(range(100))).evicted_at == 60


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=10)


@settings(max_examples=examples(100))
@given(
    st.integers(1, 3),
    st.lists(st.tuples(PROMPTS, st.sampled_from(["", "k", "l"]), st.integers(0, 3)), max_size=8),
    PROMPTS,
    st.sampled_from(["", "k"]),
)
def test_the_reason_is_true(page_size, requests, prompt, key):
    """Whatever happened before: what it says agrees with a plain record of all that was cached and evicted."""
    pool = CachedPool(1000, page_size=page_size)
    paths, gone = {}, set()
    for tokens, namespace, num_evicted in requests:
        _, lease = pool.begin(tokens, namespace)
        for count, page in enumerate(pool.cache.pages_of(lease).tolist(), 1):
            paths[page] = (namespace, tuple(tokens[: count * page_size]))
            gone.discard(paths[page])
        pool.cache.release(lease)
        gone |= {paths.pop(page) for page in pool.cache.evict(num_evicted).tolist()}
    cached = set(paths.values())

    kind, prefix_len, differs_at = why(pool, prompt, key)

    next_page = tuple(prompt[: prefix_len + page_size])
    room = len(next_page) == prefix_len + page_size and prefix_len + page_size < len(prompt)
    assert not prefix_len or (key, tuple(prompt[:prefix_len])) in cached
    assert (kind in (MissKind.NONE, MissKind.ROUNDING)) == (not room)
    if not room:
        return
    mine = [path for namespace, path in cached if namespace == key]
    nearest = [
        path for path in mine if len(path) > prefix_len and path[:prefix_len] == next_page[:prefix_len]
    ]
    common = max((len_common(path, prompt) for path in nearest), default=prefix_len)
    assert (key, next_page) not in cached
    assert (kind is MissKind.EVICTED) <= ((key, next_page) in gone)
    if kind is not MissKind.EVICTED:
        assert (kind is MissKind.OTHER_NAMESPACE) == any(path == next_page for _, path in cached)
    if kind in (MissKind.DIFFERS, MissKind.NO_PREFIX, MissKind.PROMPT_LONGER):
        assert (kind is MissKind.PROMPT_LONGER) == (prefix_len > 0 and not nearest)
        assert (kind is MissKind.NO_PREFIX) == (prefix_len == 0 and common == 0)
        assert differs_at == common


def len_common(path, prompt):
    """Tokens two sequences have in common from their beginning."""
    return next(
        (k for k, (one, other) in enumerate(zip(path, prompt, strict=False)) if one != other), len(path)
    )


def test_what_a_flush_took_was_not_evicted_to_make_room(pool):
    prompt = list(range(1, 14))
    _, lease = pool.begin([1, 2, 3, 4])
    pool.cache.flush()

    assert explain(pool, prompt) == CacheMiss("r", 13, 4, MissKind.FLUSHED, 4)

    pool.cache.release(lease)
    pool.cache.evict(1)
    assert explain(pool, prompt) == CacheMiss("r", 13, 0, MissKind.EVICTED, 0, evicted_at=1)


def test_how_long_ago_and_how_long_after_its_last_use_a_page_was_lost():
    pool, prompt = CachedPool(64, page_size=4), list(range(1, 14))
    cache = pool.cache
    for now_s in (10.0, 12.5):
        cache.expire_pins(now_s)
        pool.serve(prompt[:12])
    cache.expire_pins(20.0)
    cache.evict(1)
    cache.expire_pins(23.25)

    miss = explain(pool, prompt)
    assert (miss.kind, miss.lost_s, miss.idle_s) == (MissKind.EVICTED, 3.25, 7.5)
    cache.flush()
    cache.expire_pins(24.0)
    miss = explain(pool, prompt)
    assert (miss.kind, miss.lost_s, miss.idle_s) == (MissKind.FLUSHED, 0.75, 10.75)
    assert miss.for_clients() == miss


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=12)


@settings(max_examples=examples(100))
@given(
    history=st.lists(st.tuples(st.sampled_from(["mine", "theirs", "", "others"]), TOKENS), max_size=12),
    prompt=TOKENS,
    num_evicted=st.integers(0, 2),
)
def test_what_a_client_is_told_does_not_depend_on_other_namespaces(history, prompt, num_evicted):
    alone, among_others = CachedPool(512, page_size=2), CachedPool(512, page_size=2)
    for extra_key, tokens in history:
        if extra_key != "mine":
            among_others.serve(tokens, extra_key)
            among_others.cache.evict(num_evicted)  # more evictions, all of them theirs
    for extra_key, tokens in history:
        if extra_key == "mine":
            alone.serve(tokens, extra_key)
            among_others.serve(tokens, extra_key)

    told = explain(among_others, prompt, "mine").for_clients()

    assert told == explain(alone, prompt, "mine").for_clients()
    assert told.kind is not MissKind.OTHER_NAMESPACE


def test_a_client_is_not_told_how_many_evictions_there_were(pool):
    pool.cache.evict(1)

    miss = explain(pool, list(range(1, 14)))

    assert miss.evicted_at == 1
    assert miss.for_clients() == CacheMiss("r", 13, 8, MissKind.EVICTED, 8)


def test_another_namespace_does_not_hide_where_the_own_one_differs(pool):
    pool.serve([1, 2, 3, 4, 5, 6, 9, 9], "mine")

    miss = explain(pool, list(range(1, 14)), "mine")

    assert (miss.kind, miss.own_kind, miss.differs_at) == (MissKind.OTHER_NAMESPACE, MissKind.DIFFERS, 6)
