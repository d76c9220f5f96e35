"""Rows of files become examples: token ids, and a mask that says which of them are trained."""

from trainwire_engine.data.dataset import Dataset
from trainwire_engine.data.load import Notice, load_dataset
from trainwire_engine.data.report import DataReport, Dropped

__all__ = ["DataReport", "Dataset", "Dropped", "Notice", "load_dataset"]
