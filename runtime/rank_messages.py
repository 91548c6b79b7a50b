"""What rank 0 tells the other ranks of its tensor-parallel group."""

from __future__ import annotations

from .messages import Message
from .step_plan import StepPlan


class LaunchStep(Message, frozen=True):
    """Execute this step, after all that were sent before; rank 0 does the same. Nothing is answered."""

    plan: StepPlan


RankInput = LaunchStep
