"""Modules built on the structures and maps."""

from structmax.nn.attention import Attention
from structmax.nn.biaffine import Biaffine
from structmax.nn.chart_lstm import ChartLSTM
from structmax.nn.child_sum import ChildSumTreeLSTM
from structmax.nn.classifier import TreeClassifier
from structmax.nn.crf import CRF
from structmax.nn.dot_product import attend
from structmax.nn.easy_first import EasyFirstTreeLSTM
from structmax.nn.gated_recursive import GatedRecursiveCell
from structmax.nn.latent_tree import LatentDependency, LatentTree
from structmax.nn.leaf_lstm import LeafLSTM, SentenceLSTM
from structmax.nn.spinn import SPINN
from structmax.nn.structured_attention import StructuredAttention
from structmax.nn.tree_lstm import TreeLSTM, TreeLSTMCell

__all__ = [
    "CRF",
    "SPINN",
    "Attention",
    "Biaffine",
    "ChartLSTM",
    "ChildSumTreeLSTM",
    "EasyFirstTreeLSTM",
    "GatedRecursiveCell",
    "LatentDependency",
    "LatentTree",
    "LeafLSTM",
    "SentenceLSTM",
    "StructuredAttention",
    "TreeClassifier",
    "TreeLSTM",
    "TreeLSTMCell",
    "attend",
]
