"""Losses: how far a structure, or what it is made of, is from a target."""

from structmax.losses.entmax_loss import entmax_loss
from structmax.losses.soft_dtw import SoftDTW

__all__ = ["SoftDTW", "entmax_loss"]
