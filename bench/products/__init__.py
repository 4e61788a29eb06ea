"""The distributed products of the field by name, beside those that Axo's layers train with; all on one interface.

algorithms["cannon"]     an ``axo.matmul.Algorithm``; a new one is a file here and a line below
axo bench products       which moves least
"""

from axo.matmul import Algorithm
from axo.matmul import algorithms as trained

from .agarwal import Agarwal
from .cannon import Cannon
from .cosma import Cosma
from .megatron import MegatronColumn, MegatronRow
from .solomonik import Solomonik

algorithms: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        MegatronColumn(),
        MegatronRow(),
        Cannon(),
        trained["summa"],
        Solomonik(),
        trained["tesseract"],
        Agarwal(),
        Cosma(),
        trained["axonn"],
    )
}
