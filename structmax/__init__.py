"""structmax: latent structure for PyTorch."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from structmax.barycenter import barycenter
from structmax.forest.topology import Forest, ForestBuilder
from structmax.maps.budgetmax import budgetmax
from structmax.maps.csoftmax import csoftmax
from structmax.maps.csparsemax import csparsemax
from structmax.maps.entmax import entmax
from structmax.maps.fusedmax import fusedmax
from structmax.maps.normmax import normmax
from structmax.maps.oscarmax import oscarmax
from structmax.maps.smoothed_max import smoothed_max
from structmax.maps.softmax import softmax
from structmax.maps.sparsemax import sparsemax
from structmax.primitive import backend
from structmax.smoothing import Gini, Hard, Shannon, Smoothing, Tsallis
from structmax.sparse import SparseMAPResult, project, sparsemap_oracle
from structmax.structures.alignment import Alignment
from structmax.structures.assignment import Assignment
from structmax.structures.base import IntractableError, Ranked, Structure, TopK
from structmax.structures.binary_tree import BinaryTree
from structmax.structures.choice import Choice
from structmax.structures.ctc import CTC
from structmax.structures.dependency_tree import DependencyTree
from structmax.structures.easy_first import EasyFirst
from structmax.structures.grid_path import GridPath
from structmax.structures.hmm import HMM
from structmax.structures.hyperpath import Hyperpath
from structmax.structures.ksubset import KSubset
from structmax.structures.linear_chain import LinearChain
from structmax.structures.path import Path
from structmax.structures.pcfg import PCFG
from structmax.structures.rollout import Rollout
from structmax.structures.semi_markov import SemiMarkov
from structmax.structures.shift_reduce import ShiftReduce
from structmax.structures.spanning_tree import SpanningTree

if TYPE_CHECKING:
    from structmax import data, estimators, losses, nn
    from structmax.diagnosis import Diagnosis, diagnose
    from structmax.sparse.factor_graph import FactorGraph

__version__ = "0.1.0"

__all__ = [
    "CTC",
    "HMM",
    "PCFG",
    "Alignment",
    "Assignment",
    "BinaryTree",
    "Choice",
    "DependencyTree",
    "Diagnosis",
    "EasyFirst",
    "FactorGraph",
    "Forest",
    "ForestBuilder",
    "Gini",
    "GridPath",
    "Hard",
    "Hyperpath",
    "IntractableError",
    "KSubset",
    "LinearChain",
    "Path",
    "Ranked",
    "Rollout",
    "SemiMarkov",
    "Shannon",
    "ShiftReduce",
    "Smoothing",
    "SpanningTree",
    "SparseMAPResult",
    "Structure",
    "TopK",
    "Tsallis",
    "backend",
    "barycenter",
    "budgetmax",
    "csoftmax",
    "csparsemax",
    "data",
    "diagnose",
    "entmax",
    "estimators",
    "fusedmax",
    "losses",
    "nn",
    "normmax",
    "oscarmax",
    "project",
    "smoothed_max",
    "softmax",
    "sparsemap_oracle",
    "sparsemax",
]

# imported when they are asked for, which halves the time of importing structmax
_LATER = {
    "data": "structmax.data",
    "diagnose": "structmax.diagnosis:diagnose",
    "Diagnosis": "structmax.diagnosis:Diagnosis",
    "FactorGraph": "structmax.sparse.factor_graph:FactorGraph",
    "estimators": "structmax.estimators",
    "losses": "structmax.losses",
    "nn": "structmax.nn",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, member = _LATER[name].partition(":")
    found = _import_module(module)
    found = getattr(found, member) if member else found
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
