"""The distributed products that layers train with, by name: ``axo.matmul.algorithms["tesseract"]``.

Those of the field that they are compared with stand in ``axo_bench.products.algorithms``.
"""

from axo.matmul.algorithm import Algorithm
from axo.matmul.axonn import Axonn
from axo.matmul.summa import Summa
from axo.matmul.tesseract import Tesseract

algorithms: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (Summa(), Tesseract(), Axonn())}
