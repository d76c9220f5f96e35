"""Drive a trainwire worker from Python."""
