"""What the tests of the agent APIs' endpoints share."""

from __future__ import annotations

from typing import Any

from engine.runtime.feasibility import Capacity
from engine.runtime.messages import Finish, FinishKind

ROOMY = Capacity(max_model_len=8192, num_pages=4096, page_size=4, max_running_requests=8, vocab_size=258)
"""Tools are described in the prompt, and each byte is a token."""
CALL = '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}'
"""A call in the format of a model without a template for tools."""
FAILED = Finish(FinishKind.ERROR, message="out of luck", status=500)
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
