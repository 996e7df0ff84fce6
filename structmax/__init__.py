"""structmax: latent structure for PyTorch."""

from structmax import nn
from structmax.forest.topology import Forest, ForestBuilder
from structmax.primitive import backend
from structmax.smoothing import Gini, Hard, Shannon, Smoothing, Tsallis
from structmax.structures.base import IntractableError, Ranked, Structure, TopK
from structmax.structures.choice import Choice
from structmax.structures.hmm import HMM
from structmax.structures.hyperpath import Hyperpath
from structmax.structures.linear_chain import LinearChain

__version__ = "0.1.0"

__all__ = [
    "HMM",
    "Choice",
    "Forest",
    "ForestBuilder",
    "Gini",
    "Hard",
    "Hyperpath",
    "IntractableError",
    "LinearChain",
    "Ranked",
    "Shannon",
    "Smoothing",
    "Structure",
    "TopK",
    "Tsallis",
    "backend",
    "nn",
]
