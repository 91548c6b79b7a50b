"""A conversation with the official OpenAI client: each answer is streamed, and is part of the next prompt."""

import argparse

from openai import OpenAI

QUESTIONS = ("Name three rivers in Europe.", "Which of them is the longest?")


def main() -> None:
    """Ask the questions, one after the other."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:30000")
    options.add_argument("--api-key", default="-")
    given = options.parse_args()

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key)
    model = client.models.list().data[0].id
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=64,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer = ""
        for chunk in stream:
            if chunk.choices:
                text = chunk.choices[0].delta.content or ""
                answer += text
                print(text, end="", flush=True)
            if chunk.usage is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n  {chunk.usage.prompt_tokens} tokens, {cached} of them cached")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
