"""Many requests at once: the server batches them, answers are printed as they come, refusals are retried."""

import argparse
import asyncio
import time

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, number: int) -> int:
    """One request; the number of its tokens. The client retries a 429 after its Retry-After."""
    answer = await client.completions.create(
        model=model, prompt=f"{number} and {number + 1} are", max_tokens=16, seed=number
    )
    print(f"{number}: {answer.choices[0].text!r}")
    return answer.usage.completion_tokens if answer.usage else 0


async def main() -> None:
    """Send all of them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:30000")
    options.add_argument("--api-key", default="-")
    options.add_argument("--num", type=int, default=100)
    given = options.parse_args()

    async with AsyncOpenAI(base_url=f"{given.url}/v1", api_key=given.api_key, max_retries=10) as client:
        model = (await client.models.list()).data[0].id
        started_s = time.monotonic()
        counts = await asyncio.gather(*(ask(client, model, number) for number in range(given.num)))
    seconds = time.monotonic() - started_s
    print(
        f"{len(counts)} answers, {sum(counts)} tokens in {seconds:.1f} s: {sum(counts) / seconds:.0f} tokens/s"
    )


if __name__ == "__main__":
    asyncio.run(main())
