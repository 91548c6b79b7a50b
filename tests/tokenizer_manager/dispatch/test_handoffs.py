"""`Handoffs`: the other half of a request, from the fields of SGLang's and of vLLM's routers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.messages import KVHandoff
from engine.tokenizer_manager.dispatch.handoffs import Handoffs
from engine.tokenizer_manager.scheduling_options import Bootstrap

HERE: Any = {"host": "127.0.0.1", "port": 8998}


def test_without_fields_or_mode_a_request_has_no_other_half() -> None:
    assert Handoffs("decode").of(None, 2) == [None, None]
    assert Handoffs("decode").of(Bootstrap(**HERE), 1) == [None]
    assert Handoffs("null").of(Bootstrap(room=3, **HERE), 1) == [None]


def test_the_prefill_side_needs_the_room_only() -> None:
    assert Handoffs("prefill").of(Bootstrap(room=3), 1) == [KVHandoff("3")]


def test_each_prompt_has_its_own_room() -> None:
    decode = Handoffs("decode")
    rooms = decode.of(Bootstrap(room=[3, 4], host=["127.0.0.1"] * 2, port=[1, 2]), 2)
    assert rooms == [KVHandoff("3", "127.0.0.1:1"), KVHandoff("4", "127.0.0.1:2")]
    assert [each.bootstrap_room for each in decode.of(Bootstrap(room=3, **HERE), 2) if each] == ["3-0", "3-1"]
    assert Handoffs("prefill").of(Bootstrap(room=3), 2) == [KVHandoff("3-0"), KVHandoff("3-1")]


def test_another_machine_needs_a_key() -> None:
    far = Bootstrap(room=3, host="10.0.0.7", port=8998)
    assert Handoffs("decode", has_key=True).of(far, 1) == [KVHandoff("3", "10.0.0.7:8998")]
    with pytest.raises(RequestError, match="--cluster-key-file"):
        Handoffs("decode").of(far, 1)
    six = Bootstrap(room=3, host="[::1]", port=8998)
    assert Handoffs("decode").of(six, 1) == [KVHandoff("3", "[::1]:8998")]


@pytest.mark.parametrize(
    ("bootstrap", "words"),
    [
        (Bootstrap(room=3), "bootstrap_host is None"),
        (Bootstrap(room=3, host="a b", port=1), "bootstrap_host is 'a b'"),
        (Bootstrap(room=3, host="127.0.0.1"), "bootstrap_port is None"),
        (Bootstrap(room=3, host="127.0.0.1", port=70_000), "bootstrap_port is 70000"),
        (Bootstrap(room=[3, 4], **HERE), "bootstrap_room has 2 values for 1 prompts"),
    ],
)
def test_incomplete_fields_are_named(bootstrap: Bootstrap, words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        Handoffs("decode").of(bootstrap, 1)


def test_the_answer_of_a_prefill_engine_is_what_the_decode_engine_takes() -> None:
    prefill = Handoffs("prefill", host="127.0.0.1", port=8998)
    [half] = prefill.of(Bootstrap(kv_transfer_params={"do_remote_decode": True, "remote_host": None}), 1)
    assert half is not None and not half.peer
    params = prefill.answer(half)
    assert params is not None and params["do_remote_prefill"] is True

    assert Handoffs("decode").of(Bootstrap(kv_transfer_params=params), 1) == [
        KVHandoff(half.bootstrap_room, "127.0.0.1:8998")
    ]
    assert Handoffs("decode").answer(KVHandoff(half.bootstrap_room, "127.0.0.1:8998")) is None


def test_rooms_of_serial_requests_cannot_be_guessed() -> None:
    prefill = Handoffs("prefill", host="127.0.0.1", port=8998)
    params = Bootstrap(kv_transfer_params={"do_remote_decode": True})
    rooms = {half.bootstrap_room for _ in range(100) for half in prefill.of(params, 1) if half is not None}
    assert len(rooms) == 100 and max(map(int, rooms)) > 2**55
