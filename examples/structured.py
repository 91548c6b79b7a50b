"""An answer that matches a JSON Schema, and one that is a choice between texts."""

import argparse
import json

from openai import OpenAI

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {
            "type": "array",
            "items": {"enum": ["de", "en", "fr", "ja"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask for a person, then for a verdict."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:30000")
    options.add_argument("--api-key", default="-")
    given = options.parse_args()

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Invent a person."}],
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    )
    person = json.loads(answer.choices[0].message.content or "")
    print(json.dumps(person, ensure_ascii=False))

    verdict = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Is {person['name']} older than 40? {person}"}],
        max_tokens=8,
        extra_body={"guided_choice": ["yes", "no"]},
    )
    print(verdict.choices[0].message.content)


if __name__ == "__main__":
    main()
