"""`matmul`: GEMM in the shape of cuBLASLt's, column-major, with its epilogues."""

from .call import Call, call_of, matmul, settled
from .epilogues import MatmulEpilogue
from .heuristic import HeuristicCache, HeuristicKey, heuristics
from .request import MatmulRequest, ScaleSet

__all__ = [
    "Call",
    "HeuristicCache",
    "HeuristicKey",
    "MatmulEpilogue",
    "MatmulRequest",
    "ScaleSet",
    "call_of",
    "heuristics",
    "matmul",
    "settled",
]
