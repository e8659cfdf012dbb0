"""CLEVR/Count and CLEVR/Dist: linear probes of the number of objects and of the distance of the nearest one."""

from typing import Any

from stop_mim.evaluation.task import TASKS, options_of
from stop_mim.evaluation.tasks.linear import Linear


@TASKS.register("clevr")
class Clevr(Linear):
    """The task linear, with its options, of counts and distances alone."""

    help = "the linear probe of object counts and of the nearest object's distance"
    Options = None
    labels = ("count", "distance")
    in_all = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.options = options_of(self.config, "linear")
