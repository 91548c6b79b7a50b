"""The official client against our server: what it parses is what its users get."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from engine.runtime.messages import Finish, FinishKind
from engine.runtime.transport.message_base import Logprobs

from ..conftest import Serve, Served
from ..conversation.chat_templates import QWEN3
from ..fake_engine import LENGTH, MODEL, TOKENIZER, WAIT_S, floats, ids_of, row, say_all
from .serving import ROOMY

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


# ---------------------------------------------------------------- tools and structured output

CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(pydantic.BaseModel):
    name: str
    age: int


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


def test_the_parse_helper_reads_a_model(serve: Serve):
    client = client_of(serve(say_all('{"name": "Ann", ', '"age": 5}')))
    answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)  # type: ignore[arg-type]

    assert answer.choices[0].message.parsed == Person(name="Ann", age=5)


def test_the_parse_helper_reads_a_strict_tool(serve: Serve):
    client = client_of(serve(say_all(CALL), chat_template=QWEN3, capacity=ROOMY))
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HI,  # type: ignore[arg-type]
        tools=[openai.pydantic_function_tool(GetWeather)],
    )
    [call] = answer.choices[0].message.tool_calls or []

    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.parsed_arguments == GetWeather(city="Oslo")


def test_the_parse_helper_tells_of_an_answer_that_was_cut(serve: Serve):
    client = client_of(serve(say_all('{"name": "Ann"', finish=LENGTH)))
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)  # type: ignore[arg-type]


def test_the_stream_helper_puts_calls_together(serve: Serve):
    texts = ["Wait.\n", *CALL, "\n", *CALL]
    client = client_of(serve(say_all(*texts), chat_template=QWEN3, capacity=ROOMY))
    with client.chat.completions.stream(
        model=MODEL,
        messages=HI,  # type: ignore[arg-type]
        tools=[openai.pydantic_function_tool(GetWeather)],
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message

    assert [event.arguments for event in done] == ['{"city": "Oslo"}'] * 2
    assert message.content == "Wait."
    assert [call.function.parsed_arguments for call in message.tool_calls or []] == [
        GetWeather(city="Oslo")
    ] * 2
    assert len({call.id for call in message.tool_calls or []}) == 2


def test_the_stream_helper_reads_a_model(serve: Serve):
    client = client_of(serve(say_all(*'{"name": "Ann", "age": 5}')))
    with client.chat.completions.stream(model=MODEL, messages=HI, response_format=Person) as stream:  # type: ignore[arg-type]
        message = stream.get_final_completion().choices[0].message

    assert message.parsed == Person(name="Ann", age=5)


def test_a_conversation_with_a_tool(serve: Serve):
    """The message of the answer is sent back as the client has it."""

    def script(request):
        is_second = "15 degrees" in TOKENIZER.decode(ids_of(request), skip_special_tokens=False)
        return say_all("It is cold." if is_second else CALL)(request)

    client = client_of(serve(script, chat_template=QWEN3, capacity=ROOMY))
    tools = [openai.pydantic_function_tool(GetWeather)]
    messages: list[Any] = [*HI]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    [call] = answer.choices[0].message.tool_calls or []
    messages += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)

    assert answer.choices[0].message.content == "It is cold."
    assert answer.choices[0].message.tool_calls is None


def test_a_refused_schema_is_a_bad_request(serve: Serve):
    client = client_of(serve(say_all("x")))
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}},
    }
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HI, response_format=form, stream=stream)  # type: ignore[call-overload]
        assert caught.value.code == "unsupported_schema"
        assert caught.value.param == "response_format.json_schema.schema"
