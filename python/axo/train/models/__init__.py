"""Plain models: LitGPT's GPT, from a configuration's name or file. Nothing here knows of a grid."""

from axo.train.models.configs import TINY, check_sequence, resolve
from axo.train.models.summary import Shape, build_empty, shape_of

__all__ = ["TINY", "Shape", "build_empty", "check_sequence", "resolve", "shape_of"]
