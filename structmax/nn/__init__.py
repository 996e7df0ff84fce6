"""Modules built on the structures and maps."""

from structmax.nn.attention import Attention
from structmax.nn.biaffine import Biaffine, LabelledBiaffine
from structmax.nn.chart_lstm import ChartLSTM
from structmax.nn.child_sum import ChildSumTreeLSTM
from structmax.nn.classifier import TreeClassifier
from structmax.nn.crf import CRF
from structmax.nn.dependency_classifier import DependencyClassifier
from structmax.nn.dot_product import attend
from structmax.nn.easy_first import EasyFirstTreeLSTM
from structmax.nn.esim import ESIM
from structmax.nn.gated_recursive import GatedRecursiveCell
from structmax.nn.latent_tree import LatentDependency, LatentTree
from structmax.nn.leaf_lstm import LeafLSTM, SentenceLSTM
from structmax.nn.pair_classifier import PairByAttention, PairByDependency, PairByTree
from structmax.nn.semantic_graph import SemanticGraph
from structmax.nn.seq2seq import Seq2Seq
from structmax.nn.spinn import SPINN
from structmax.nn.structured_attention import StructuredAttention
from structmax.nn.tree_lstm import TreeLSTM, TreeLSTMCell
from structmax.nn.word_encoder import WordEncoder

__all__ = [
    "CRF",
    "ESIM",
    "SPINN",
    "Attention",
    "Biaffine",
    "ChartLSTM",
    "ChildSumTreeLSTM",
    "DependencyClassifier",
    "EasyFirstTreeLSTM",
    "GatedRecursiveCell",
    "LabelledBiaffine",
    "LatentDependency",
    "LatentTree",
    "LeafLSTM",
    "PairByAttention",
    "PairByDependency",
    "PairByTree",
    "SemanticGraph",
    "SentenceLSTM",
    "Seq2Seq",
    "StructuredAttention",
    "TreeClassifier",
    "TreeLSTM",
    "TreeLSTMCell",
    "WordEncoder",
    "attend",
]
