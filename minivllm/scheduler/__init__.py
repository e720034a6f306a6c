"""Who runs when. Pure Python: nothing here knows tensors or the model."""

from minivllm.scheduler.continuous import ContinuousScheduler
from minivllm.scheduler.plan import Decision, NewRequest, RunnerOutput, SchedulerOutput
from minivllm.scheduler.scheduler import Scheduler
from minivllm.scheduler.static import StaticScheduler

__all__ = [
    "ContinuousScheduler",
    "Decision",
    "NewRequest",
    "RunnerOutput",
    "Scheduler",
    "SchedulerOutput",
    "StaticScheduler",
]
