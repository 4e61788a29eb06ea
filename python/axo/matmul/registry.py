"""The distributed products by name: ``axo.matmul.algorithms["cannon"]``. A new one is a file and a line here."""

from axo.matmul.agarwal import Agarwal
from axo.matmul.algorithm import Algorithm
from axo.matmul.axonn import Axonn
from axo.matmul.cannon import Cannon
from axo.matmul.cosma import Cosma
from axo.matmul.megatron import MegatronColumn, MegatronRow
from axo.matmul.solomonik import Solomonik
from axo.matmul.summa import Summa
from axo.matmul.tesseract import Tesseract

algorithms: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        MegatronColumn(),
        MegatronRow(),
        Cannon(),
        Summa(),
        Solomonik(),
        Tesseract(),
        Agarwal(),
        Cosma(),
        Axonn(),
    )
}
