"""The official client against our server: what it parses is what its users get."""

from __future__ import annotations

import openai
import pytest

from engine.runtime.messages import Finish, FinishKind, Logprobs

from ..conftest import Serve, Served
from ..fake_engine import LENGTH, MODEL, WAIT_S, floats, row, say_all

HI = [{"role": "user", "content": "hi"}]


def client_of(served: Served, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S)


def test_chat(serve: Serve):
    client = client_of(serve(say_all("Hel", "lo", cached=4)))
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2, max_completion_tokens=5)  # type: ignore[arg-type]

    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.refusal is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_chat_stream(serve: Serve):
    client = client_of(serve(say_all("Hel", "lo")))
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options=options)  # type: ignore[call-overload]
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 5


def test_chat_stream_helper_puts_the_message_together(serve: Serve):
    client = client_of(serve(say_all("Hel", "lo")))
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()

    assert final.choices[0].message.content == "Hello"


def test_chat_logprobs(serve: Serve):
    def script(request):
        logprobs = Logprobs(floats(-0.5), (64).to_bytes(4, "little"), floats(-0.5), 1)
        yield row(request, "a", logprobs=logprobs, finish=LENGTH)

    client = client_of(serve(script))
    answer = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
    logprobs = answer.choices[0].logprobs

    assert logprobs is not None
    assert logprobs.content is not None
    assert (logprobs.content[0].token, logprobs.content[0].bytes) == ("a", [97])
    assert logprobs.content[0].top_logprobs[0].logprob == -0.5


def test_completions(serve: Serve):
    client = client_of(serve(say_all("lo", "!")))
    whole = client.completions.create(model=MODEL, prompt=["hel", "hel"], echo=True)
    parts = list(client.completions.create(model=MODEL, prompt="hel", stream=True))

    assert [choice.text for choice in whole.choices] == ["hello!", "hello!"]
    assert "".join(part.choices[0].text for part in parts) == "lo!"


def test_models(serve: Serve):
    client = client_of(serve())

    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_clients_exceptions(serve: Serve):
    served = serve(say_all("x"), api_key=("right",))
    client = client_of(served, "right")

    with pytest.raises(openai.AuthenticationError):
        client_of(served, "wrong").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.body["message"].startswith("temperature is -1")  # type: ignore[index]


def test_a_stream_that_fails_raises(serve: Serve):
    error = Finish(FinishKind.ERROR, message="out of luck", status=500)

    def script(request):
        yield row(request, "some")

    served = serve(script)
    client = client_of(served)
    stream = client.completions.create(model=MODEL, prompt="hi", stream=True)
    assert next(stream).choices[0].text == "some"
    served.engine.say(row(served.engine.next_request(), "", finish=error))
    with pytest.raises(openai.APIError, match="out of luck"):
        next(stream)


def test_closing_a_stream_aborts_it(serve: Serve):
    served = serve(lambda request: [row(request, "some")])
    with client_of(served).completions.create(model=MODEL, prompt="hi", stream=True) as stream:
        next(iter(stream))

    assert served.engine.next_abort().rid == served.engine.next_request().rid
