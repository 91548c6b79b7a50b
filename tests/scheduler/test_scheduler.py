"""Tests of `scheduler/scheduler.py`: the life of requests, step by step."""

from .harness import Pages


def test_chunked_prefill_returns_every_page(make_scheduler):
    scheduler = make_scheduler(chunked_prefill_size=8, page_size=4, num_pages=16)
    scheduler.submit(prompt_len=20, max_new_tokens=1)

    steps = scheduler.run_until_idle()

    assert [step.extend_lens for step in steps] == [[8], [8], [4]]
    assert scheduler.pages() == Pages(free=11, cached=5, held=0)
