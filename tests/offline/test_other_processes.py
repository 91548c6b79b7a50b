"""An `LLM` where it cannot live: in a forked process, pickled, copied, closed. An error at once, never a wait."""

from __future__ import annotations

import copy
import os
import pickle
import select
import signal
import warnings

import pytest

from engine import LLM, EngineDeadError, SamplingParams

DEADLINE_S = 60.0
PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True)
CALLS = {
    "generate": lambda llm: llm.generate("a b", PARAMS),
    "generate a batch": lambda llm: llm.generate(["a", "b"], PARAMS),
    "stream": lambda llm: next(llm.generate("a b", PARAMS, stream=True)),
    "sample": lambda llm: llm.sample("a b", 2, PARAMS),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], PARAMS),
    "render_chat": lambda llm: llm.render_chat([{"role": "user", "content": "a"}]),
    "flush_cache": lambda llm: llm.flush_cache(),
    "pin": lambda llm: llm.pin("a b", ttl=1.0),
    "why": lambda llm: llm.why("llm-0"),
}


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), dtype="float32", num_threads=1, max_total_tokens=512) as llm:
        yield llm


def in_a_fork(call):
    """What a forked process gets from `call`: the text of its error, or `no error`."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads
        pid = os.fork()
    if pid == 0:
        try:
            call()
            answer = "no error"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    try:
        assert select.select([read_end], [], [], DEADLINE_S)[0], "the forked process hangs"
        return os.read(read_end, 65536).decode()
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_is_told_at_once(llm, name):
    answer = in_a_fork(lambda: CALLS[name](llm))
    assert answer.startswith(
        f"EngineDeadError: this engine runs in the process {os.getpid()}, and a forked process"
    )
    assert "make the LLM in the process that uses it" in answer


def test_a_stream_that_a_fork_continues_ends_with_the_error(llm):
    stream = llm.generate("a b", SamplingParams(max_new_tokens=50, ignore_eos=True), stream=True)
    next(stream)
    assert in_a_fork(lambda: list(stream)).startswith("EngineDeadError: this engine runs in the process")
    assert sum(len(chunk.token_ids) for chunk in stream) >= 45  # the parent's stream goes on


def test_a_fork_may_close_and_end_and_the_parent_goes_on(llm):
    assert in_a_fork(llm.close) == "no error"
    assert in_a_fork(lambda: llm.__exit__(None, None, None)) == "no error"
    assert in_a_fork(llm._engine._finalizer) == "no error"
    assert len(llm.generate("a b", PARAMS).token_ids) == 3


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda each: each.__name__)
def test_it_cannot_be_pickled_or_copied(llm, copying):
    with pytest.raises(
        TypeError, match="an LLM cannot be pickled or copied, because its engine runs in this process"
    ):
        copying(llm)


def test_parameters_and_outputs_can_be_pickled(llm):
    output = llm.generate("a b", PARAMS)
    assert pickle.loads(pickle.dumps(output)) == output  # noqa: S301  (our own bytes)
    assert pickle.loads(pickle.dumps(PARAMS)) == PARAMS  # noqa: S301  (our own bytes)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "render_chat"])
def test_a_closed_one_says_so(tiny_model, name):
    llm = LLM(str(tiny_model), dtype="float32", num_threads=1, max_total_tokens=512)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="the engine has been closed; make a new LLM"):
        CALLS[name](llm)
