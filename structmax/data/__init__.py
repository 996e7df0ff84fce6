"""Readers and generators of data, trees, and batching."""

from structmax.data import (
    columns,
    conllu,
    glove,
    listops,
    parallel,
    snli,
    sst,
    summaries,
    treebank,
    ucr,
    words,
)
from structmax.data.batching import Batch, Batches, collate
from structmax.data.folder import data_folder, find_data
from structmax.data.trees import Trees
from structmax.data.words import Vocabulary, Words

__all__ = [
    "Batch",
    "Batches",
    "Trees",
    "Vocabulary",
    "Words",
    "collate",
    "columns",
    "conllu",
    "data_folder",
    "find_data",
    "glove",
    "listops",
    "parallel",
    "snli",
    "sst",
    "summaries",
    "treebank",
    "ucr",
    "words",
]
