"""Bridges to experiment trackers: each is fed with a run's events, in a process of its own."""

from .interface import Follower, RunInfo, Tracker, load, metrics

__all__ = ["Follower", "RunInfo", "Tracker", "load", "metrics"]
