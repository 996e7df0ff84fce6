"""Losses: how far a structure, or what it is made of, is from a target."""

from structmax.losses.crf import crf
from structmax.losses.entmax_loss import entmax_loss
from structmax.losses.hinge import hinge
from structmax.losses.margin_sparsemap import margin_sparsemap
from structmax.losses.partial_crf import partial_crf
from structmax.losses.perceptron import perceptron
from structmax.losses.perturbed import perturbed
from structmax.losses.smoothed import smoothed
from structmax.losses.soft_dtw import SoftDTW
from structmax.losses.sparsemap import sparsemap

__all__ = [
    "SoftDTW",
    "crf",
    "entmax_loss",
    "hinge",
    "margin_sparsemap",
    "partial_crf",
    "perceptron",
    "perturbed",
    "smoothed",
    "sparsemap",
]
