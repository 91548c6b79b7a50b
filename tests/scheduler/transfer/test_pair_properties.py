"""Random runs of a `Pair`: late, lost and repeated messages, aborts, memory that is too small, engines that are lost.

Whatever happens, each request is answered once, with the tokens that it gets alone, and every page returns.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.transport.kv_transfer import PeerLost
from tests.selection import examples

from ..transfer_pair import DECODE, PREFILL, Pair

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 6)),
    st.tuples(st.just("half"), st.sampled_from(["prefill", "decode"]), st.integers(5, 30)),
    st.tuples(st.just("prefill"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("decode"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("deliver"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 9), st.sampled_from(["prefill", "decode", "both"])),
    st.tuples(st.just("flush"), st.sampled_from(["prefill", "decode"]), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([1.0, 130.0]), st.just(0)),
    st.tuples(st.just("lost"), st.sampled_from(["prefill", "decode"]), st.just(0)),
    st.tuples(st.just("fail write"), st.just(0), st.just(0)),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=50),
    num_pages=st.sampled_from([24, 64]),
    shared=st.booleans(),
    chunk=st.sampled_from([8, 64]),
)
def test_every_request_is_answered_and_every_page_returns(
    actions: list[tuple[str, object, object]], num_pages: int, shared: bool, chunk: int
) -> None:
    pair = Pair(num_pages=num_pages, prefill={"chunked_prefill_size": chunk}, chunked_prefill_size=chunk)
    perform(pair, actions, shared=shared)

    pair.run()


def perform(pair: Pair, actions: list[tuple[str, object, object]], *, shared: bool) -> None:
    """Make them one after the other; `shared`: prompts have equal beginnings."""
    made = 0
    for action, first, second in actions:
        match action:
            case "submit" | "half":
                length = first if isinstance(first, int) else second
                assert isinstance(length, int)
                prompt = [1 + (k * (7 if shared else 7 + made)) % 90 for k in range(length)]
                pair.submit(
                    f"room{made}",
                    rid=f"r{made}",
                    prompt=prompt,
                    max_new_tokens=second if action == "submit" else 3,
                    to_prefill=first != "decode",
                    to_decode=first != "prefill",
                )
                made += 1
            case "prefill" | "decode":
                assert isinstance(first, int)
                for _ in range(first):
                    getattr(pair, action).step()
                    pair.collect()
            case "deliver" if choices := pair.choices():
                assert isinstance(first, int)
                index = choices[first % len(choices)]
                if second and pair.network[index].kind != "write":
                    pair.network[index].make()  # twice
                    pair.collect()
                pair.deliver(index)
            case "abort":
                for side in (pair.prefill, pair.decode):
                    if second in ("both", "prefill" if side is pair.prefill else "decode"):
                        answer = side.answers.get(f"r{first}")
                        side.abort(f"r{first}")
                        if answer is not None and answer.finish is not None and answer.finish.kind == "abort":
                            del side.answers[f"r{first}"]
                        pair.collect()
            case "flush":
                getattr(pair, str(first)).flush()
            case "time":
                assert isinstance(first, float)
                pair.prefill.now_s = pair.decode.now_s = max(pair.prefill.now_s, pair.decode.now_s) + first
            case "lost" if first == "prefill":
                pair.tell(pair.decode, PeerLost(PREFILL, "frozen"))
            case "lost":
                pair.tell(pair.prefill, PeerLost(DECODE, "frozen"))
            case "fail write":
                pair.fails_write = lambda command: hash(command.bootstrap_room) % 2 == 0
