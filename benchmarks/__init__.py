"""Measurements of trainwire beside its peers; `python -m benchmarks --help`."""
