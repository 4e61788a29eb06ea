"""Pipeline stages as a fifth dimension: each stage is a grid of its own, schedules are torch's."""

from axo.pipeline.cut import split
from axo.pipeline.schedule import SCHEDULES, Schedule, check_algorithm, check_microbatches, layout, schedule, stages
from axo.pipeline.stage import Stage

__all__ = [
    "SCHEDULES",
    "Schedule",
    "Stage",
    "check_algorithm",
    "check_microbatches",
    "layout",
    "schedule",
    "split",
    "stages",
]
