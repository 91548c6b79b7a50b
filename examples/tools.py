"""The model calls a function of this program, gets its result, and answers."""

import argparse
import json

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city now, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


def temperature(city: str) -> float:
    """Stands in for a real lookup."""
    return {"Bern": 14.5, "Oslo": 3.0, "Rome": 21.0}[city]


def main() -> None:
    """One question, its calls, and the answer."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:30000")
    options.add_argument("--api-key", default="-")
    given = options.parse_args()

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How warm is it in Rome?"}]
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice="required",  # small models need it; "auto" leaves the decision to the model
        parallel_tool_calls=False,
        max_tokens=200,
    ).choices[0]
    messages.append(asked.message.model_dump(exclude_none=True))
    for call in asked.message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        result = temperature(**arguments)
        print(f"{call.function.name}({arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=64
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
