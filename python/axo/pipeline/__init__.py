"""Pipeline stages as a fifth dimension: each stage is a grid of its own, schedules are torch's.

    cut, families       which part of a model a stage has, and what is known of each model family for that
    stage, schedule     one stage for torch's schedules; schedules by name
    actions             a record of what ran when

Where to cut, and what a schedule costs, is arithmetic: ``axo.perf.cut``, ``axo.perf.pipeline_schedule``.
"""

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
