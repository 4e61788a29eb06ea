"""A training step of any number of ranks on one machine, without values: memory, traffic, order, and who disagrees.

    record = dryrun.run(config, rank=5)            # one rank: what it sends, in order, and what it holds
    ranks  = dryrun.representatives(config)        # one of each role, and neighbours to compare with
    report = dryrun.compare(config, ranks)         # the first collective that would not match, by name

It stands above ``axo.train``, whose model and step it runs; ``axo.perf`` below stays arithmetic and knows neither.
"""

from axo.dryrun.compare import Mismatch, compare, representatives, run_all
from axo.dryrun.step import Record, check, measure, run

__all__ = ["Mismatch", "Record", "check", "compare", "measure", "representatives", "run", "run_all"]
